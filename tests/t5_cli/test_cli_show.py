"""`stepfs show`: arrays, values and text of a payload in a lake, in a mount's file, or on disk; nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path

import json_schemas
import numpy as np
import pytest
import torch
from lakes import stepfs
from payload_samples import bomb, framed, npy, pt, safetensors
from realmount import make_lake
from tokenizers import Tokenizer, models

from stepfs.cli import payload_bytes
from stepfs.format.grid.record import Grid
from stepfs_producer import Producer

SAID = b"what the ids say"
IDS = np.array([[*SAID, 256, 257], [65] * (len(SAID) + 2)], np.int64)
BYTES = {"kind": "bytes", "identity": "bytes"}


def make(url: str, ext: str, *batches: list[bytes], schema: object = None) -> None:
    given = [] if schema is None else ["--payload-schema", json.dumps(schema)]
    assert stepfs("init", url, "--slices", len(batches[0]), "--ext", ext, *given).code == 0
    with Producer(url, producer_id="p") as producer:
        for number, batch in enumerate(batches):
            producer.append(batch, position=number)


def test_a_slice_is_shown_with_its_text_where_the_lake_knows_the_tokenizer(file_url: str) -> None:
    arrays = {
        "input_ids": {"dtype": "int64", "shape": ["rows", None]},
        "scores": {"dtype": "float32", "shape": [None]},
    }
    payload = safetensors(input_ids=IDS, scores=np.array([0.5, np.nan], np.float32))
    make(file_url, ".safetensors", [payload] * 2, [payload] * 2, schema={"arrays": arrays, "tokenizer": BYTES})
    document = stepfs("show", file_url, "--json").document
    json_schemas.check("show", document)
    assert (document["step"], document["rank"], document["producer"], document["bytes"]) == (
        1, 0, "p", len(payload),
    )  # fmt: skip
    assert document["lake"] == file_url
    assert document["arrays"] == [
        {"name": "input_ids", "dtype": "int64", "shape": [2, 18], "bytes": 288, "values": list(SAID[:8])},
        {"name": "scores", "dtype": "float32", "shape": [2], "bytes": 8, "values": [0.5, "nan"]},
    ]
    assert document["text"] == SAID.decode() + "A" * 18
    assert document["payload_schema"]["tokenizer"] == BYTES
    page = stepfs("show", file_url, "--step", 0, "--rank", 1).out
    assert page.startswith("step-000000000/rank-00001.safetensors  safetensors, ")
    assert "input_ids  int64    [2, 18]  119 104 97 116 32 116 104 101 …\n" in page
    assert "scores     float32  [2]      0.5 nan\n" in page
    assert SAID.decode() in page


def test_a_file_of_each_format_is_shown_and_gives_a_schema_to_start_from(tmp_path, file_url):
    rows = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    files = {
        "a.pt": (
            pt({"x": rows, "turned": rows.t(), "view": rows[1:], "sources": ["q"]}),
            ["x", "turned", "view"],
        ),
        "b.npy": (npy(np.arange(6, dtype=np.int32)), ["array"]),
        "c.safetensors": (safetensors(flags=np.array([True, False])), ["flags"]),
    }
    for name, (payload, arrays) in files.items():
        (tmp_path / name).write_bytes(payload)
        document = stepfs("show", tmp_path / name, "--json").document
        json_schemas.check("show", document)
        assert [array["name"] for array in document["arrays"]] == arrays
        assert (document["file"], document["lake"], document["text"]) == (str(tmp_path / name), None, None)
        ext = "." + name.partition(".")[2]
        schema = json.dumps(document["payload_schema"])
        make(f"{file_url}/{name}", ext, [payload], schema=json.loads(schema))
        of_lake = stepfs("show", f"{file_url}/{name}", "--json").document
        assert of_lake["arrays"] == document["arrays"]
    document = stepfs("show", tmp_path / "a.pt", "--json").document
    assert [array["values"] for array in document["arrays"]] == [[0, 1, 2, 3, 4, 5], None, [3, 4, 5]]
    assert document["facts"] == {"sources": ["q"]}
    assert "sources: ['q']" in stepfs("show", tmp_path / "a.pt").out


def test_text_by_a_models_file_and_a_warning_when_it_is_not_the_lakes(file_url: str, tmp_path: Path) -> None:
    model = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    path = tmp_path / "tokenizer.json"
    path.write_text(model.to_str())
    payload = tmp_path / "ids.npy"
    payload.write_bytes(npy(np.array([1, 2, 7, -100, 1], np.int32)))
    shown = stepfs("show", payload, "--tokenizer", path, "--json")
    assert (shown.code, shown.document["text"], shown.err) == (0, "hello world hello", "")
    schema = {"tokenizer": {"kind": "huggingface", "identity": "huggingface-1", "file_sha256": "0" * 64}}
    make(file_url, ".npy", [payload.read_bytes()], schema=schema)
    assert stepfs("show", file_url, "--json").document["text"] is None, "the lake has only the tokenizer's name"
    other = stepfs("show", file_url, "--tokenizer", path, "--json")
    assert other.document["text"] == "hello world hello"
    assert "is not the file that the lake's ids were made with (huggingface-1)" in other.err
    (tmp_path / "broken.json").write_text("{")
    assert stepfs("show", payload, "--tokenizer", tmp_path / "broken.json").code == 2
    assert stepfs("show", payload, "--tokenizer", tmp_path / "absent.json").code == 3


def test_a_slice_at_odds_is_shown_and_ends_with_5(file_url: str) -> None:
    make(file_url, ".npy", [npy(np.zeros(3))])
    fork = f"{file_url}-fork"
    other = '{"arrays": {"array": {"dtype": "int8", "shape": [3]}}}'
    assert stepfs("fork", f"{file_url}@1", fork, "--payload-schema", other).code == 0
    ended = stepfs("show", fork, "--json")
    assert ended.code == 5
    assert json.loads(ended.out)["problem"] == "has 'array' as float64 [3], the lake's schema says int8 [3]"
    assert "has 'array' as float64 [3]" in ended.err


@pytest.mark.parametrize(
    ("name", "data", "code", "words"),
    [
        ("a.pt", bomb(), 5, "GLOBAL exec "),
        ("a.safetensors", framed(b"{" * 9), 5, "no JSON"),
        ("a.npy", b"raw", 5, "is no .npy file"),
        ("a.pt", b"", 5, "it is empty"),
        ("a.tar", b"x", 2, "arrays are found in .safetensors .npy .pt files"),
        ("a", b"x", 2, "a file without extension"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_one_line(tmp_path, name, data, code, words):
    (tmp_path / name).write_bytes(data)
    ended = stepfs("show", tmp_path / name)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
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
    assert stepfs("init", file_url, "--ranks", 2, "--micro-batches", 3, "--ext", ".npy").code == 0
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


def test_a_long_slice_is_read_in_parts_and_a_short_one_verified(file_url, monkeypatch):
    payload = npy(np.arange(2_000_000))
    make(file_url, ".npy", [payload])
    whole = stepfs("show", file_url, "--json").document
    monkeypatch.setattr(payload_bytes, "WHOLE_BYTES_MAX", 1 << 20)
    assert stepfs("show", file_url, "--json").document == whole
    monkeypatch.undo()
    [tgb] = Path(file_url.removeprefix("file://")).glob("*/data/*/*.tgb")
    data = bytearray(tgb.read_bytes())
    data[5_000_000] ^= 1
    tgb.chmod(0o600)
    tgb.write_bytes(data)
    assert "checksum mismatch" in stepfs("show", file_url).err
    tgb.write_bytes(data[:1000])
    assert stepfs("show", file_url).code == 5
    tgb.unlink()
    assert stepfs("show", file_url).code == 5


def test_a_hostile_file_neither_writes_to_the_terminal_nor_breaks_the_decoder(tmp_path: Path) -> None:
    header = {"\x1b[31mred\ud800": {"dtype": "\x1b[31m" + "D" * 5000, "shape": [1], "data_offsets": [0, 8]}}
    (tmp_path / "a.safetensors").write_bytes(framed({"__metadata__": {"\x1b]0;": "\x1b[2J"}, **header}, bytes(8)))
    for options in ([], ["--json"]):
        ended = stepfs("show", tmp_path / "a.safetensors", *options)
        assert (ended.code, "\x1b" in ended.out) == (0, False)
        assert len(ended.out) < 2000
    model = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    (tmp_path / "tokenizer.json").write_text(model.to_str())
    (tmp_path / "b.npy").write_bytes(npy(np.array([1, 2**62, 2**32, -(2**63)])))
    shown = stepfs("show", tmp_path / "b.npy", "--tokenizer", tmp_path / "tokenizer.json", "--json")
    assert (shown.code, shown.document["text"]) == (0, "hello")
