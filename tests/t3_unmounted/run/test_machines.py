"""What every machine must have is looked at on each of them, and what one lacks is said in a line each."""

from __future__ import annotations

import pickle
from dataclasses import replace
from importlib import metadata

import pytest
import trio
from planned_run import sources_in, write_corpus

from stepfs.errors import StoreUnreachableError
from stepfs.format.grid import Grid
from stepfs.format.keys import data_prefix, parse_data_key
from stepfs.lake.identity import create_lake, open_lake
from stepfs.store.opening import open_store
from stepfs_producer.run import machines
from stepfs_producer.run.machines import node_check
from stepfs_producer.run.options import RunOptions

MIX = {"code": 1, "prose": 1}


@pytest.fixture
def lake(tmp_path) -> RunOptions:
    url = f"file://{tmp_path}/lake"

    async def create() -> None:
        store = open_store(url)
        await create_lake(store, slices=Grid(2, 1), ext=".npy")
        await store.aclose()

    trio.run(create)
    return RunOptions(url)


@pytest.fixture
def sources(tmp_path):
    for name in MIX:
        write_corpus(tmp_path, name, 20)
    return sources_in(tmp_path, MIX)


def lake_id_of(options: RunOptions) -> str:
    async def read() -> str:
        store = open_store(options.lake)
        found = (await open_lake(store)).lake_id
        await store.aclose()
        return found

    return trio.run(read)


def lacks(sources, options: RunOptions, lake_id: str | None = None) -> list[str]:
    """As another machine finds it, to which it travels."""
    look = node_check(sources, lake_id or lake_id_of(options), options)
    return pickle.loads(pickle.dumps(look))()


def test_a_machine_that_has_all_lacks_nothing(sources, lake) -> None:
    assert lacks(sources, lake) == []


def test_other_versions_are_named(sources, lake, monkeypatch) -> None:
    look = node_check(sources, lake_id_of(lake), lake)
    installed = metadata.version

    def version(name: str) -> str:
        if name == "tokenizers":
            raise metadata.PackageNotFoundError
        return "0.9" if name == "numpy" else installed(name)

    monkeypatch.setattr("stepfs_producer.run.lake.version", version)
    assert look() == [
        f"has numpy 0.9, the command {installed('numpy')}; install the same",
        f"has tokenizers not, the command {installed('tokenizers')}; install the same",
    ]


def test_a_file_a_function_and_a_tokenizer_that_are_not_there_are_named(sources, lake, tmp_path) -> None:
    (tmp_path / "code/a.jsonl").unlink()
    code, prose = sources
    wrong = replace(prose, transform=replace(prose.transform, call="my_missing:render"))
    line, other = lacks((code, wrong), lake)
    assert line.startswith(f"cannot work for source code: {tmp_path}/code/a.jsonl is gone")
    assert other.startswith("cannot work for source prose: my_missing:render: no module")
    tokenizer = replace(prose.transform.tokenizer, file="gone.json", digest="0" * 64)
    (line,) = lacks((replace(prose, transform=replace(prose.transform, tokenizer=tokenizer)),), lake)
    assert "gone.json: no such tokenizer file" in line


def test_a_lake_that_is_elsewhere_or_another_one_is_named(sources, lake, tmp_path) -> None:
    (line,) = lacks(sources, RunOptions(f"file://{tmp_path}/elsewhere"), "0" * 32)
    assert line.startswith(f"cannot put into the lake file://{tmp_path}/elsewhere: ")
    (line,) = lacks(sources, lake, "0" * 32)
    assert "another lake stands there" in line


def test_rights_to_put_are_tried(sources, lake, monkeypatch) -> None:
    async def refused(*_arguments, **_more) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stepfs.store.local.local_store.LocalStore.put", refused)
    (line,) = lacks(sources, lake)
    assert "Permission denied" in line


@pytest.mark.parametrize("store", ["lake", "source"])
def test_a_store_that_is_away_says_nothing_about_the_machine(sources, lake, monkeypatch, store) -> None:
    """The run ended with exit code 4, which asks to mend something, where a server was restarted."""

    def away(*_arguments: object, **_more: object) -> None:
        raise StoreUnreachableError("the server answers nothing")

    name = "open_lake" if store == "lake" else "format_of"
    monkeypatch.setattr(f"stepfs_producer.run.machines.{name}", away)
    with pytest.raises(StoreUnreachableError, match="the server answers nothing"):
        lacks(sources, lake)


def test_what_the_look_puts_is_known_as_an_orphan(sources, lake) -> None:
    assert lacks(sources, lake) == []

    async def keys() -> list[str]:
        store = open_store(lake.lake)
        found = await store.list(data_prefix((await open_lake(store)).lake_id))
        await store.aclose()
        return [one.key for one in found]

    (key,) = trio.run(keys)
    name = parse_data_key(key)
    assert name is not None
    assert name.epoch == 0, "before any incarnation, so no step can name it"


def test_the_directory_travels_without_the_files_of_sources(sources, tmp_path) -> None:
    (tmp_path / "prose" / "render.py").write_text("x")
    assert machines.travelling(str(tmp_path), sources) == {
        "working_dir": str(tmp_path),
        "excludes": [".?*", "__pycache__", "/code", "/prose/a.jsonl", "/prose/b.jsonl"],
    }


def test_nodes_find_the_tokenizer_in_the_directory_that_travels(sources, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def named(file: str | None, directory: str) -> str | None:
        spec = replace(sources[0].transform.tokenizer, file=file)
        given = replace(sources[0], transform=replace(sources[0].transform, tokenizer=spec))
        return machines.as_nodes_see((given,), directory)[0].transform.tokenizer.file

    assert named(None, "plans") is None
    assert named("plans/tokenizer.json", "plans") == "tokenizer.json"
    assert named("plans/../shared/tokenizer.json", "plans") == f"{tmp_path}/shared/tokenizer.json"
    assert named("/models/tokenizer.json", "plans") == "/models/tokenizer.json"
