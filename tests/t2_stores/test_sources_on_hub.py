"""Sources at hf://: of a double of the Hub and of its CDN, which huggingface_hub reads, too. The Hub itself was never asked."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import nightly
import pyarrow as pa
import pytest
from declared import source_spec
from hub_double import REPOSITORY, TOKEN, Hub, hub_double
from pyarrow import parquet

from stepfs.errors import AbsentError, RefusedError, StepfsError, StoreUnreachableError, UsageError
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.sources.files import bucket_of
from stepfs_producer.sources.hub import HubDataset, parse_hub_url, with_commits
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import SourceSpec

ROOT = f"hf://datasets/{REPOSITORY}"


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def table(*texts: str) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), file, row_group_size=2)
    return file.getvalue()


FILES = {
    "README.md": b"# name\n",
    "data/train-0.jsonl": lines("a", "b"),
    "data/train-1.jsonl": lines("c"),
    "data/deep/over there/train-2.jsonl": lines("d + é"),
    "data/.hidden.jsonl": lines("no"),
    "data/test-0.jsonl": lines("test"),
    "parquet/x.parquet": table("p", "q", "r"),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    bucket_of.cache_clear()
    with hub_double() as found:
        found.small = {"README.md", "data/train-1.jsonl"}
        found.push("main", FILES)
        monkeypatch.setenv("HF_ENDPOINT", f"{found.url}/")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found
    bucket_of.cache_clear()


def source(*files: str, form: str = "jsonl") -> SourceSpec:
    return source_spec(*files, form=form, shuffle=False)


def texts(spec: SourceSpec) -> list[str]:
    layout = Layout(spec, list_corpus(spec))
    place, found = BlockAddress(0, 0, 0), []
    while place.epoch == 0 and (task := layout.task(place)) is not None:
        block = read_block(spec, task)
        found += [block.records.data[n].tobytes().decode() for n in range(len(block.records))]
        place = block.follows
    return found


@pytest.mark.parametrize(
    ("entry", "form", "found"),
    [
        ("", "jsonl", ["d + é", "test", "a", "b", "c"]),
        ("/data", "jsonl", ["d + é", "test", "a", "b", "c"]),
        ("@main/data/train-*.jsonl", "jsonl", ["a", "b", "c"]),
        ("/data/**/train-2.jsonl", "jsonl", ["d + é"]),
        ("@main/data/train-1.jsonl", "jsonl", ["c"]),
        ("/parquet", "parquet", ["p", "q", "r"]),
        ("@refs%2Fconvert%2Fparquet/parquet/*.parquet", "parquet", ["p", "q", "r"]),
        ("@refs/convert/parquet/parquet/*.parquet", "parquet", ["p", "q", "r"]),
    ],
)
def test_files_are_found_by_directory_name_and_glob(hub: Hub, entry: str, form: str, found: list[str]) -> None:
    hub.branches["refs/convert/parquet"] = hub.branches["main"]
    assert texts(source(f"{ROOT}{entry}", form=form)) == found


def test_each_listing_is_asked_for_once_and_each_place_once_an_hour(hub: Hub) -> None:
    bucket = HubDataset(f"{ROOT}@main")
    [found] = bucket.list("data/train-0.jsonl")
    assert [one.key for one in bucket.list("data/train-")] == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert len(hub.asked("hub", "/tree/")) == 2, "pages of a directory"
    data = FILES[found.key]
    parts = [bucket.read(found.key, begin, min(begin + 7, len(data)), found.etag) for begin in range(0, len(data), 7)]
    assert b"".join(parts) == data
    assert len(hub.asked("hub", "/resolve/")) == 1
    assert [one.range for one in hub.asked("cdn")][:2] == ["bytes=0-6", "bytes=7-13"]


def test_the_token_goes_to_the_hub_alone_and_into_no_message(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private = True
    assert len(texts(source(f"{ROOT}/data"))) == 5
    assert {one.authorization for one in hub.asked("hub")} == {f"Bearer {TOKEN}"}
    assert {one.authorization for one in hub.asked("cdn")} == {None}
    for token, word in (("", "without HF_TOKEN nobody may list there"), ("hf_other", "HF_TOKEN may not list there")):
        monkeypatch.setenv("HF_TOKEN", token)
        bucket_of.cache_clear()
        with pytest.raises(RefusedError, match=word) as raised:
            list_corpus(source(f"{ROOT}/data"))
        assert "hf_" not in str(raised.value)


def test_it_waits_as_long_as_the_server_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("stepfs_producer.sources.hub.time.sleep", slept.append)
    hub.busy = [{"Retry-After": "17"}, {"Retry-After": "0"}, {}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}]
    assert len(texts(source(f"{ROOT}/data"))) == 5
    assert slept == [17, 1, 5, 5]
    hub.busy = [{"Retry-After": "400"}] * 3
    with pytest.raises(StoreUnreachableError, match=r"127.0.0.1 is busy \(429\); try again later"):
        list(HubDataset(f"{ROOT}@main").list("data/"))
    assert slept[4:] == [400, 400], "at most a quarter of an hour"


def test_a_signed_place_that_holds_no_more_is_asked_for_again(hub: Hub) -> None:
    bucket = HubDataset(f"{ROOT}@main")
    [found] = bucket.list("data/train-0.jsonl")
    assert bucket.read(found.key, 0, 5, found.etag) == FILES[found.key][:5]
    hub.expired = hub.signed
    assert bucket.read(found.key, 5, 9, found.etag) == FILES[found.key][5:9]
    assert len(hub.asked("hub", "/resolve/")) == 2


@pytest.mark.parametrize("key", ["data/train-0.jsonl", "data/train-1.jsonl"])
def test_a_file_that_is_not_the_listed_one_is_refused(hub: Hub, key: str) -> None:
    bucket = HubDataset(f"{ROOT}@main")
    [found] = bucket.list(key)
    with pytest.raises(RefusedError, match="is shorter than listed"):
        bucket.read(key, found.size, found.size + 4, found.etag)
    with pytest.raises(RefusedError, match="is gone"):
        HubDataset(f"{ROOT}@main").read("data/nothing.jsonl", 0, 4, found.etag)
    hub.other_etag = True
    with pytest.raises(RefusedError, match=r"was replaced since it was listed \(other etag\)"):
        HubDataset(f"{ROOT}@main").read(key, 0, 4, found.etag)


def test_a_plan_names_the_commit(hub: Hub) -> None:
    first = hub.branches["main"]
    hub.push("dev", {"data/train-0.jsonl": lines("dev")})
    files = [f"{ROOT}/data/*.jsonl", f"{ROOT}@main/x", f"{ROOT}@dev/data", "local/a.jsonl"]
    sources = {"web": {"format": "jsonl", "files": files}}
    found = with_commits(Plan.read({"output": {"mesh": "dp=1", "sequence_length": 8}, "sources": sources}))
    dev = hub.branches["dev"]
    assert found.sources["web"].files == (
        f"{ROOT}@{first}/data/*.jsonl",
        f"{ROOT}@{first}/x",
        f"{ROOT}@{dev}/data",
        "local/a.jsonl",
    )
    assert len(hub.asked("hub", "/revision/")) == 2
    assert with_commits(found) == found
    assert len(hub.asked("hub")) == 2, "a commit is not asked for"
    hub.push("main", {"data/train-0.jsonl": lines("new")})
    assert texts(source(f"{ROOT}@{first}/data")) == ["d + é", "test", "a", "b", "c"]
    assert texts(source(f"{ROOT}@main/data")) == ["new"]


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        (f"{ROOT}@gone/data", AbsentError, "no such data set, revision or directory; correct the URL"),
        ("hf://datasets/owner/other/data", AbsentError, "no such data set, revision or directory"),
        (f"{ROOT}/nothing", AbsentError, "no such data set, revision or directory"),
        (f"{ROOT}/data/*.parquet", AbsentError, "no files; name files, a directory of them, or a glob that matches"),
        ("hf://datasets/name/data.jsonl/", AbsentError, "no such data set, revision or directory"),
        ("hf://datasets/name", UsageError, "names no data set of the Hub; write hf://datasets/OWNER/NAME@REVISION/"),
        ("hf://spaces/owner/name", UsageError, "names no data set of the Hub"),
        (f"hf://datasets/user:{TOKEN}@owner/name", UsageError, "names no data set of the Hub"),
    ],
)
def test_what_is_not_there_is_named(hub: Hub, url: str, error: type[StepfsError], message: str) -> None:
    assert hub.commits
    with pytest.raises(error, match=message) as raised:
        list_corpus(source(url))
    assert TOKEN not in str(raised.value)


def test_a_server_that_is_none_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        StoreUnreachableError, match=r"127.0.0.1 does not answer \(.*\); try again, or correct HF_ENDPOINT"
    ):
        list_corpus(source(f"{ROOT}/data"))
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.cdn_url}/")
    bucket_of.cache_clear()
    with pytest.raises(StepfsError):
        list_corpus(source(f"{ROOT}/data"))


def test_urls_are_read_as_huggingface_hub_reads_them() -> None:
    url = parse_hub_url("hf://datasets/a-b/c.d@refs/pr/3/x/y z.jsonl")
    assert (url.repository, url.revision, url.key) == ("a-b/c.d", "refs/pr/3", "x/y z.jsonl")
    assert parse_hub_url(f"{url.root}/k")[:2] == url[:2]


@pytest.mark.nightly
def test_the_double_answers_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    nightly.needs("huggingface_hub")
    import huggingface_hub  # noqa: PLC0415 - of the nightly alone

    hub.private = True
    api = huggingface_hub.HfApi(endpoint=hub.url, token=TOKEN)
    rows = api.list_repo_tree(REPOSITORY, repo_type="dataset", recursive=True)
    assert sorted(row.path for row in rows if isinstance(row, huggingface_hub.RepoFile)) == sorted(FILES)
    own = {one.key: one.etag for one in HubDataset(f"{ROOT}@main").list("")}
    for name, data in FILES.items():
        path = Path(
            huggingface_hub.hf_hub_download(
                REPOSITORY, name, repo_type="dataset", endpoint=hub.url, token=TOKEN, cache_dir=tmp_path
            )
        )
        assert path.read_bytes() == data
        assert path.resolve().name == own[name], "its cache has names by the same etags"
