"""`stepfs show`: arrays and first values of a payload in a lake or on disk; no code of a file runs."""

from __future__ import annotations

import os
from pathlib import Path

import json_schemas
import numpy as np
import pytest
import torch
from lakes import stepfs
from payload_samples import bomb, framed, npy, pt, safetensors
from realmount import make_lake

from stepfs.format.grid import Grid
from stepfs_producer import Producer

IDS = np.arange(36).reshape(2, 18)


def make(url: str, ext: str, *batches: list[bytes]) -> None:
    assert stepfs("init", url, "--slices", len(batches[0]), "--ext", ext).code == 0
    with Producer(url, producer_id="p") as producer:
        for number, batch in enumerate(batches):
            producer.append(batch, position=number)


def test_a_slice_is_shown_with_its_first_values(file_url: str) -> None:
    scores = np.array([0.5, np.nan], np.float32)
    payload = safetensors(input_ids=IDS, scores=scores)
    make(file_url, ".safetensors", [payload] * 2, [payload] * 2)
    document = stepfs("show", file_url, "--json").document
    json_schemas.check("show", document)
    assert (document["step"], document["rank"], document["producer"], document["bytes"]) == (
        1, 0, "p", len(payload),
    )  # fmt: skip
    assert (document["lake"], document["begins"]) == (file_url, None)
    assert document["arrays"] == [
        {"name": "input_ids", "dtype": "int64", "shape": [2, 18], "bytes": 288, "values": list(range(8))},
        {"name": "scores", "dtype": "float32", "shape": [2], "bytes": 8, "values": [0.5, "nan"]},
    ]
    page = stepfs("show", file_url, "--step", 0, "--rank", 1).out
    assert page.startswith("step-000000000/rank-00001.safetensors  safetensors, ")
    assert "input_ids  int64    [2, 18]  0 1 2 3 4 5 6 7 …\n" in page
    assert "scores     float32  [2]      0.5 nan\n" in page


def test_a_file_of_each_format_is_shown_as_its_slice_is(tmp_path, file_url):
    rows = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    number = torch.tensor([1 + 2j])
    tensors = pt({"x": rows, "turned": rows.t(), "conj": number.conj(), "sources": ["q"], "raw": b"jpeg"})
    files = {
        "a.pt": (tensors, {"x": None, "turned": None, "conj": None}),
        "b.npy": (npy(np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))), {"array": [0, 1, 2, 3, 4, 5]}),
        "c.safetensors": (safetensors(flags=np.array([True, False])), {"flags": [True, False]}),
        "d.jsonl": (b'{"text": "one"}\n{"text": "two"}\n', {}),
    }
    for name, (payload, arrays) in files.items():
        (tmp_path / name).write_bytes(payload)
        document = stepfs("show", tmp_path / name, "--json").document
        json_schemas.check("show", document)
        assert {array["name"]: array["values"] for array in document["arrays"]} == arrays
        assert (document["file"], document["lake"]) == (str(tmp_path / name), None)
        make(f"{file_url}/{name}", "." + name.partition(".")[2], [payload])
        of_lake = stepfs("show", f"{file_url}/{name}", "--json").document
        assert [of_lake[key] for key in ("arrays", "facts", "begins")] == [
            document[key] for key in ("arrays", "facts", "begins")
        ]
    page = stepfs("show", tmp_path / "a.pt").out
    assert [line.split() for line in page.splitlines()[2:]] == [
        ["x", "bfloat16", "[2,", "3]", "-"],
        ["turned", "bfloat16", "[3,", "2]", "-"],
        ["conj", "complex64", "[1]", "-"],
        ["sources:", "['q']"],
        ["raw:", "4", "bytes"],
    ]
    assert stepfs("show", tmp_path / "d.jsonl").out.splitlines()[1:] == ['{"text": "one"}', '{"text": "two"}']
    (tmp_path / "e").write_bytes(b"\x1b[31m\xff" + bytes(1000))
    shown = stepfs("show", tmp_path / "e").out
    assert ("no extension, 1006 B" in shown, "\x1b" in shown, len(shown) < 300) == (True, False, True)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.pt", bomb(), "GLOBAL exec "),
        ("a.safetensors", framed(b"{" * 9), "JSONDecodeError"),
        ("a.npy", b"raw", "is no .npy file"),
        ("a.pt", b"", "it is empty"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    ended = stepfs("show", tmp_path / name)
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1)
    assert words in ended.err


def test_what_is_not_there_is_named(file_url: str, tmp_path: Path) -> None:
    assert stepfs("show", tmp_path / "absent.pt").code == 3
    assert stepfs("show", file_url).code == 3
    stepfs("init", file_url, "--slices", 2)
    assert "has no step yet" in stepfs("show", file_url).err
    with Producer(file_url, producer_id="p") as producer:
        producer.append([pt(torch.zeros(1))] * 2, position=0)
    assert "there are 2 ranks here" in stepfs("show", file_url, "--rank", 2).err
    assert stepfs("show", file_url, "--step", 1).code == 3
    (tmp_path / "x.pt").write_bytes(pt(torch.zeros(1)))
    assert stepfs("show", tmp_path / "x.pt", "--step", 1).code == 2
    assert "neither a lake nor a mount" in stepfs("show", tmp_path).err


def test_a_micro_batch_is_named_by_rank_and_number(file_url: str) -> None:
    assert stepfs("init", file_url, "--data-ranks", 2, "--micro-batches", 3, "--ext", ".npy").code == 0
    with Producer(file_url, producer_id="p") as producer:
        producer.append([npy(np.full(2, index)) for index in range(6)], position=0)
    page = stepfs("show", file_url, "--rank", 1, "--micro", 2).out
    assert page.startswith("step-000000000/rank-00001.micro-0002.npy  npy, ")
    document = stepfs("show", file_url, "--rank", 1, "--json").document
    assert (document["rank"], document["micro_batch"], document["arrays"][0]["values"]) == (1, 0, [3.0, 3.0])
    assert "there are 2 ranks here, and 3 files of each" in stepfs("show", file_url, "--micro", 3).err
    assert "there are 2 ranks here" in stepfs("show", file_url, "--rank", 2).err


def test_a_file_beside_a_ranks_is_named(file_url: str) -> None:
    make_lake(file_url, slices=Grid(2, files=("", "pixels")), ext=".npy")
    with Producer(file_url, producer_id="p") as producer:
        producer.append([npy(np.full(2, index)) for index in range(4)], position=0)
    page = stepfs("show", file_url, "--rank", 1, "--beside", "pixels").out
    assert page.startswith("step-000000000/rank-00001.pixels.npy  npy, ")
    document = stepfs("show", file_url, "--rank", 1, "--beside", "pixels", "--json").document
    assert (document["beside"], document["arrays"][0]["values"]) == ("pixels", [3.0, 3.0])
    wrong = stepfs("show", file_url, "--beside", "pixel")
    assert (wrong.code, "there are: pixels" in wrong.err) == (2, True)


def test_a_slice_is_verified(file_url):
    make(file_url, ".npy", [npy(np.arange(100_000))])
    assert stepfs("show", file_url).code == 0
    [tgb] = Path(file_url.removeprefix("file://")).glob("*/data/*/*.tgb")
    data = bytearray(tgb.read_bytes())
    data[500_000] ^= 1
    tgb.chmod(0o600)
    tgb.write_bytes(data)
    assert "slice 0 is not what was committed" in stepfs("show", file_url).err
    tgb.write_bytes(data[:1000])
    assert stepfs("show", file_url).code == 5
    tgb.unlink()
    assert stepfs("show", file_url).code == 5


def test_a_hostile_file_does_not_write_to_the_terminal(tmp_path: Path) -> None:
    header = {"\x1b[31mred\ud800": {"dtype": "\x1b[31m" + "D" * 5000, "shape": [1], "data_offsets": [0, 8]}}
    (tmp_path / "a.safetensors").write_bytes(framed({"__metadata__": {"\x1b]0;": "\x1b[2J"}, **header}, bytes(8)))
    for options in ([], ["--json"]):
        ended = stepfs("show", tmp_path / "a.safetensors", *options)
        assert (ended.code, "\x1b" in ended.out) == (0, False)
        assert len(ended.out) < 2000


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Nobody writes to it: opening it would wait for ever."""
    os.mkfifo(tmp_path / "fifo.npy")
    return tmp_path / "fifo.npy"


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_and_not_opened(fifo: Path, tmp_path: Path) -> None:
    (tmp_path / "link.npy").symlink_to(fifo)
    (tmp_path / "directory.npy").mkdir()
    for target in (fifo, tmp_path / "link.npy", "/dev/zero"):
        ended = stepfs("show", target)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        assert f"{target}: is not a regular file" in ended.err
    ended = stepfs("show", tmp_path / "directory.npy")
    assert (ended.code, ended.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("option", [["--step", 0], ["--rank", 0], ["--rank", 5], ["--micro", 1]])
def test_options_of_lakes_are_refused_for_a_file(tmp_path: Path, option: list[object]) -> None:
    (tmp_path / "x.npy").write_bytes(npy(np.zeros(2)))
    ended = stepfs("show", tmp_path / "x.npy", *option)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert f"{option[0]} is for lakes" in ended.err
