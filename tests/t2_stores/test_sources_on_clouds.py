"""Sources at gs:// and az://: found by directory, name and glob; a version that was not listed is refused."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator

import obstore
import pyarrow as pa
import pytest
from declared import source_spec
from pyarrow import parquet

from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.sources.files import bucket_of, split_url
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import SourceSpec

Put = Callable[[str, bytes | None], None]


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.nightly)])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    bucket_of.cache_clear()
    url: str = request.getfixturevalue(f"{request.param}_url")
    yield url
    bucket_of.cache_clear()


@pytest.fixture
def put(root: str) -> Put:
    bucket, prefix = split_url(root)

    def send(key: str, data: bytes | None) -> None:
        client = bucket_of(bucket, None, None)._opened()  # type: ignore[attr-defined]
        if data is None:
            obstore.delete(client, f"{prefix}/{key}")
        else:
            obstore.put(client, f"{prefix}/{key}", data)

    return send


def texts(spec: SourceSpec) -> list[str]:
    layout = Layout(spec, list_corpus(spec))
    place, found = BlockAddress(0, 0, 0), []
    while place.epoch == 0 and (task := layout.task(place)) is not None:
        block = read_block(spec, task)
        found += [block.records.data[n].tobytes().decode() for n in range(len(block.records))]
        place = block.follows
    return found


def source(*files: str, form: str = "jsonl") -> SourceSpec:
    return source_spec(*files, form=form, shuffle=False)


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def test_objects_are_found_by_directory_name_and_glob(root: str, put: Put) -> None:
    for key in (
        "data/a.jsonl",
        "data/deep/b.jsonl",
        "data/.hidden/c.jsonl",
        "data-old/d.jsonl",
        "data/e.txt",
        "zz.jsonl",
    ):
        put(key, line(key))
    everything = ["data/a.jsonl", "data/deep/b.jsonl"]
    assert sorted(texts(source(f"{root}/data"))) == sorted(texts(source(f"{root}/data/"))) == everything
    assert texts(source(f"{root}/data/a.jsonl")) == ["data/a.jsonl"]
    assert texts(source(f"{root}/data/**/b.jsonl")) == ["data/deep/b.jsonl"]
    assert [file.name for file in list_corpus(source(f"{root}/data")).files] == ["0/a.jsonl", "0/deep/b.jsonl"]
    with pytest.raises(AbsentError, match="no files that end in"):
        list_corpus(source(f"{root}/none"))


def test_compressed_files_and_parquet_are_read(root: str, put: Put) -> None:
    table = io.BytesIO()
    parquet.write_table(pa.table({"text": ["a", "b"]}), table)
    put("p/a.parquet", table.getvalue())
    put("z/a.jsonl.gz", gzip.compress(line("a") + line("b")))
    assert texts(source(f"{root}/p", form="parquet")) == texts(source(f"{root}/z")) == ["a", "b"]


def test_another_version_than_the_listed_one_is_refused(root: str, put: Put) -> None:
    put("a.jsonl", line("before"))
    spec = source(f"{root}/a.jsonl")
    layout = Layout(spec, list_corpus(spec))
    task = layout.task(BlockAddress(0, 0, 0))
    assert task is not None
    assert len(read_block(spec, task).records) == 1
    put("a.jsonl", line("behind"))
    with pytest.raises(RefusedError, match=r"a\.jsonl was replaced since it was listed \(other etag\)"):
        read_block(spec, task)
    put("a.jsonl", None)
    with pytest.raises(RefusedError, match=r"a\.jsonl is gone; restore it"):
        read_block(spec, task)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("gs://", "names no bucket; write gs://bucket/prefix/"),
        ("az://account", "names no bucket; write az://account/container/prefix/"),
        ("az://a@b/c", "credentials do not belong into a URL"),
        (
            "https://host/a.jsonl",
            "sources are files, or lie at s3://, gs://, az:// or hf://; fetch it first: curl -O https://host",
        ),
        ("hf://models/a/b", "'hf://models/a/b' names no data set of the Hub; write hf://datasets/OWNER/NAME@REVISION/"),
        ("file://host/a", "'file://host/a' is not absolute; write file:///directory"),
        ("hf://datasets/a", "names no data set of the Hub; write hf://datasets/OWNER/NAME@REVISION/data/"),
    ],
)
def test_what_is_no_place_of_a_source_is_named(entry: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list_corpus(source(entry))
