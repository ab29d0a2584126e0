"""Sources in a bucket: any key, every format, requests that say which version they mean."""

from __future__ import annotations

import gzip
import io
import json
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest
import servers
import zstandard
from declared import source_spec
from pyarrow import parquet

from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError, UsageError
from stepfs.format.planned import Listing, from_shards
from stepfs.store.listed import ListedObject
from stepfs.store.s3.clients import Clients
from stepfs.store.s3.read_only import ReadOnlyBucket
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.sources.files import bucket_of
from stepfs_producer.sources.listing import Layout, list_corpus, located
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import Block, SourceSpec

STRANGE = [
    "c++/a b.jsonl",
    "c++/50%.jsonl",
    "c++/ü#?&=.jsonl",
    "c++/x+y%20z.jsonl",
    "c++/[1].jsonl",
    "c++/deep/er.jsonl",
]


@pytest.fixture(autouse=True)
def connections_of_this_test() -> Iterator[None]:
    bucket_of.cache_clear()
    yield
    bucket_of.cache_clear()


@pytest.fixture
def root(s3_url: str) -> str:
    return s3_url


@pytest.fixture
def put(root: str, seaweed: servers.S3Server) -> Callable[[str, bytes], None]:
    client = boto3.client(
        "s3", endpoint_url=seaweed.endpoint_url, aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY, region_name="us-east-1",
    )  # fmt: skip
    prefix = urllib.parse.urlsplit(root).path.strip("/")

    def send(key: str, data: bytes) -> None:
        client.put_object(Bucket=servers.BUCKET, Key=f"{prefix}/{key}", Body=data)

    return send


def source(*files: str, form: str = "jsonl", **fields: object) -> SourceSpec:
    return source_spec(*files, form=form, shuffle=False, **fields)  # type: ignore[arg-type]


def texts(spec: SourceSpec, listing: Listing | None = None) -> list[str]:
    layout = Layout(spec, listing or list_corpus(spec), range_bytes_min=64)
    place, found = BlockAddress(0, 0, 0), []
    while place.epoch == 0 and (task := layout.task(place)) is not None:
        block: Block = read_block(spec, task)
        found += [block.records.data[n].tobytes().decode() for n in range(len(block.records))]
        place = block.follows
    return found


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def test_objects_with_strange_keys_are_found_and_read(root, put) -> None:
    for key in [*STRANGE, "c++/.hidden/no.jsonl", "c++/README.md", "c++x.jsonl"]:
        put(key, line(key))
    spec = source(f"{root}/c++/")
    assert [file.name for file in list_corpus(spec).files] == sorted(
        (f"0/{key[4:]}" for key in STRANGE), key=str.encode
    )
    assert sorted(texts(spec)) == sorted(STRANGE)
    assert texts(source(f"{root}/c++")) == texts(spec)
    assert texts(source(f"{root}/c++/*+y*.jsonl")) == ["c++/x+y%20z.jsonl"]
    assert texts(source(f"{root}/c++/**/er.jsonl")) == ["c++/deep/er.jsonl"]
    for key in STRANGE:
        if "[" not in key and "?" not in key:
            assert texts(source(f"{root}/{key}")) == [key]


@pytest.mark.parametrize(
    ("entry", "names"),
    [("data", ["0/1.jsonl"]), ("data/", ["0/1.jsonl"]), ("data/1.jsonl", ["0/1.jsonl"]), ("data/*", ["0/1.jsonl"])],
)
def test_a_directory_is_listed_without_those_whose_names_only_begin_so(root, put, monkeypatch, entry, names) -> None:
    """One page may be asked for, to see whether the name is a file's; `data-old/` may have millions."""
    put("data/1.jsonl", line("x"))
    for number in range(3):
        put(f"data-old/{number}.jsonl", line("old"))
    seen = set()
    honest = ReadOnlyBucket.list

    def watched(self: ReadOnlyBucket, prefix: str) -> Iterator[ListedObject]:
        for number, found in enumerate(honest(self, prefix)):
            seen.add((number, found.key.rpartition("/")[0].rpartition("/")[2]))
            yield found

    monkeypatch.setattr(ReadOnlyBucket, "list", watched)
    assert [file.name for file in list_corpus(source(f"{root}/{entry}")).files] == names
    assert seen <= {(0, "data"), (0, "data-old")}


def test_a_glob_lists_from_its_first_wildcard_on(root, put, monkeypatch) -> None:
    for year in (2023, 2024):
        put(f"{year}-a.jsonl", line("x"))
    asked = []
    honest = ReadOnlyBucket.list
    monkeypatch.setattr(ReadOnlyBucket, "list", lambda self, prefix: asked.append(prefix) or honest(self, prefix))
    assert [file.name for file in list_corpus(source(f"{root}/2024-*")).files] == ["0/2024-a.jsonl"]
    assert asked[0].endswith("/2024-")


def test_a_large_object_is_read_in_ranges_and_any_format_is(root, put) -> None:
    many = [f"{number} " + "x" * (number % 90) for number in range(400)]
    data = b"".join(map(line, many))
    put("a.jsonl", data)
    put("b.jsonl.gz", gzip.compress(data))
    table = io.BytesIO()
    parquet.write_table(pa.table({"text": many}), table, row_group_size=50)
    put("c.parquet", table.getvalue())
    assert texts(source(f"{root}/a.jsonl", block_bytes=1000)) == many
    assert texts(source(f"{root}/b.jsonl.gz", block_bytes=1000)) == many
    assert texts(source(f"{root}/c.parquet", form="parquet")) == many


def test_a_range_of_lines_is_one_request(root, put, monkeypatch) -> None:
    data = b"".join(line("x" * 1000) for _ in range(3000))
    put("a.jsonl", data)
    put("b.jsonl.zst", zstandard.compress(data))
    asked = []
    honest = ReadOnlyBucket.read
    monkeypatch.setattr(ReadOnlyBucket, "read", lambda self, *args: asked.append(args) or honest(self, *args))
    for name, requests in (("a.jsonl", 3), ("b.jsonl.zst", 1)):
        spec = source(f"{root}/{name}", block_bytes=1 << 20)
        layout = Layout(spec, list_corpus(spec))
        asked.clear()
        place, count = BlockAddress(0, 0, 0), 0
        while place.epoch == 0:
            block = read_block(spec, layout.task(place))
            place, count = block.follows, count + len(block.records)
        assert (len(asked), count) == (requests, 3000)


@pytest.mark.parametrize("same_size", [True, False])
def test_an_object_that_was_replaced_is_refused_by_name(root, put, same_size) -> None:
    put("a.jsonl", line("before"))
    spec = source(f"{root}/")
    listing = list_corpus(spec)
    stored = from_shards(listing.to_shards(), listing.digest)
    put("a.jsonl", line("after!" if same_size else "a longer text"))
    with pytest.raises(
        RefusedError,
        match=r"/a\.jsonl was replaced since it was listed .*restore it, or run again with --accept-changes",
    ):
        texts(spec, listing)
    with pytest.raises(RefusedError, match=r"/a\.jsonl (was replaced|is longer)"):
        located(stored, list_corpus(spec), "code")


def test_an_object_that_is_gone_is_refused_by_name(root, put) -> None:
    put("a.jsonl", line("here"))
    spec = source(f"{root}/")
    listing = list_corpus(spec)
    bucket, prefix = urllib.parse.urlsplit(root).netloc, urllib.parse.urlsplit(root).path.strip("/")
    Clients(None, 20.0, 20.0).data().delete_object(Bucket=bucket, Key=f"{prefix}/a.jsonl")
    with pytest.raises(RefusedError, match=r"/a\.jsonl is gone; restore it"):
        texts(spec, listing)


def test_what_is_not_there_is_said(root) -> None:
    with pytest.raises(AbsentError, match=r"no files that end in \.jsonl"):
        list_corpus(source(f"{root}/nothing/"))
    with pytest.raises(AbsentError, match="bucket no-such-bucket of the source does not exist; correct the URL"):
        list_corpus(source("s3://no-such-bucket/x/"))


def test_a_source_has_its_own_server_and_profile(root, put, seaweed, monkeypatch, tmp_path: Path) -> None:
    put("a.jsonl", line("mine"))
    (tmp_path / "credentials").write_text(
        f"[corpora]\naws_access_key_id={servers.ACCESS_KEY}\naws_secret_access_key={servers.SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    spec = source(f"{root}/", endpoint_url=seaweed.endpoint_url, profile="corpora")
    assert texts(spec) == ["mine"]
    with pytest.raises(UsageError, match="AWS settings are wrong"):
        list_corpus(source(f"{root}/", endpoint_url=seaweed.endpoint_url, profile="absent"))


def test_a_server_that_is_down_is_no_bad_record(root, put, monkeypatch) -> None:
    put("a.jsonl", line("x"))
    spec = source(f"{root}/")
    listing = list_corpus(spec)
    bucket_of.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{servers.free_ports(1)[0]}")
    with pytest.raises(StoreUnreachableError):
        texts(spec, listing)


def test_a_server_that_ignores_if_match_is_not_believed(root, put, monkeypatch) -> None:
    put("a.jsonl", line("before"))
    spec = source(f"{root}/")
    listing = list_corpus(spec)
    put("a.jsonl", line("after!"))
    client = Clients(None, 20.0, 20.0).data()
    client.meta.events.register(
        "provide-client-params.s3.GetObject",
        lambda params, **_: {name: value for name, value in params.items() if name != "IfMatch"},
    )
    with pytest.raises(RefusedError, match="was replaced since it was listed"):
        texts(spec, listing)
