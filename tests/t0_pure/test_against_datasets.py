"""What `datasets` saves and reads, against our reading of it: its answers are kept, and asked for again at night."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nightly
import pytest
from their_answers import Case, asked, compare, kept, program

KEPT = Path(__file__).parent / "answers/datasets.zip"
ROWS = [{"text": f"é row {number}", "n": number} for number in range(6)]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {name: None}}}}
    for name in "ab"
]
TALK = [
    {"role": "user", "content": "sum?"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "a", "arguments": {"x": [1, None]}}}]},
]  # fmt: skip


def saved(change: Callable[[Any], object] = lambda data: None, **how: Any) -> Callable[[Path], list[Any]]:
    """Saved to disk, and worked with from there."""

    def ask(directory: Path) -> list[Any]:
        datasets = program("datasets")

        datasets.disable_progress_bars()
        datasets.Dataset.from_list(ROWS).save_to_disk(str(directory / "data"), **how)
        change(datasets.load_from_disk(str(directory / "data")))
        return list(datasets.load_from_disk(str(directory / "data")))

    return ask


def split(directory: Path) -> list[Any]:
    datasets = program("datasets")

    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(str(directory))
    return list(datasets.load_from_disk(str(directory))["train"])


def of_features(form: str, features: Callable[[Any], Any], *rows: dict[str, Any]) -> Callable[[Path], list[Any]]:
    def ask(directory: Path) -> list[Any]:
        datasets = program("datasets")

        datasets.disable_progress_bars()
        data = datasets.Dataset.from_list(list(rows), features=datasets.Features(features(datasets)))
        if form == "arrow":
            data.save_to_disk(str(directory / "data"))
            return list(datasets.load_from_disk(str(directory / "data")))
        (directory / "data").mkdir()
        data.to_parquet(str(directory / "data/a.parquet"))
        return list(data)

    return ask


def exported(name: str, **how: Any) -> Callable[[Path], list[Any]]:
    """Written by `to_…`, and read again by `load_dataset`."""

    def ask(directory: Path) -> list[Any]:
        datasets = program("datasets")

        datasets.disable_progress_bars()
        form = name.split(".")[1]
        data = datasets.Dataset.from_list(ROWS)
        plain = directory / name.removesuffix(".gz")
        getattr(data, f"to_{form}")(str(plain), **how)
        if name.endswith(".gz"):
            (directory / name).write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
            plain.unlink()
        cache = str(directory.parent / f"cache of {directory.name}")
        read = datasets.load_dataset(form, data_files=str(directory / name), split="train", cache_dir=cache)
        return [row["text"] for row in read]

    return ask


def json_list(d: Any) -> dict[str, Any]:
    return {"messages": d.List(d.Json()), "tools": d.List(d.Json())}


def json_inside(d: Any) -> dict[str, Any]:
    text = d.Value("string")
    function = {"name": text, "arguments": d.Json()}
    return {
        "messages": d.List({"role": text, "content": text, "tool_calls": d.List({"type": text, "function": function})})
    }


def kinds(d: Any) -> dict[str, Any]:
    text = d.Value("string")
    return {
        "label": d.ClassLabel(names=["no", "yes"]), "words": d.List(d.LargeList(text)), "pair": d.Translation(["en", "no"]),
        "at": d.Value("timestamp[us]"), "long": d.Value("large_string"), "grid": d.Array2D((2, 2), "int32"),
    }  # fmt: skip


OF_KINDS = {
    "label": 1,
    "words": [["a"], []],
    "pair": {"en": "one", "no": "én"},
    "at": 1_700_000_000_000_001,
    "long": "x",
    "grid": [[1, 2], [3, 4]],
}
TALKS = {"messages": TALK, "tools": TOOLS}
ARROW, PARQUET = {"format": "arrow", "files": "data"}, {"format": "parquet", "files": "data"}
CASES = {
    "saved": Case(saved(), ARROW),
    "saved in shards": Case(saved(num_shards=3), ARROW),
    "saved, then map": Case(saved(lambda data: data.map(lambda row: {"text": row["text"] + "!"})), ARROW),
    "saved, then filter": Case(saved(lambda data: data.filter(lambda row: row["n"] % 2)), ARROW),
    "saved, then shuffle": Case(saved(lambda data: data.shuffle(seed=1)), ARROW),
    "a split": Case(split, {"format": "arrow", "files": "train"}),
    "several splits": Case(split, {"format": "arrow"}, refused="has the splits train, test; name the directory of one: "),
    "Json in lists, arrow": Case(of_features("arrow", json_list, TALKS), ARROW),
    "Json in lists, parquet": Case(of_features("parquet", json_list, TALKS), PARQUET),
    "Json alone": Case(of_features("arrow", lambda d: dict.fromkeys(TALKS, d.Json()), TALKS), ARROW),
    "Json in structs, arrow": Case(of_features("arrow", json_inside, {"messages": TALK}), ARROW),
    "Json in structs, parquet": Case(of_features("parquet", json_inside, {"messages": TALK}), PARQUET),
    "kinds of features, arrow": Case(of_features("arrow", kinds, OF_KINDS), ARROW),
    "kinds of features, parquet": Case(of_features("parquet", kinds, OF_KINDS), PARQUET),
    "to_csv": Case(exported("a.csv", index=False), {"format": "csv", "text_field": "text"}),
    "to_csv, gz": Case(exported("a.csv.gz", index=False), {"format": "csv", "text_field": "text"}),
    "to_json": Case(exported("a.json"), {"format": "jsonl", "text_field": "text"}),
    "to_json, gz": Case(exported("a.json.gz"), {"format": "jsonl", "text_field": "text"}),
    "to_json, an array": Case(exported("a.json", lines=False), {"format": "json", "text_field": "text"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_records_are_those_of_datasets(name: str, tmp_path: Path) -> None:
    compare(CASES[name], kept(KEPT, name, tmp_path), tmp_path / name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_datasets_answers_as_it_did(name: str, tmp_path: Path) -> None:
    nightly.needs("datasets")
    answer = asked(CASES[name], tmp_path / name)
    assert answer == kept(KEPT, name, tmp_path / "kept")
    compare(CASES[name], answer, tmp_path / name)
