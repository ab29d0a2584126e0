"""What becomes of one stored record: its text, its tokens, or the reason why it cannot be decoded."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
from sourced import blocks, source, values

from stepfs_producer.sources import formats as lines
from stepfs_producer.sources.record import Kind


def test_a_record_that_cannot_be_decoded_says_why_and_the_others_stay(tmp_path) -> None:
    bad = [
        b'{"text": "\xff"}', b'{"text": ', b'{"body": "x"}', b'{"text": 3}', b"[1]", b'{"text": "\\ud800"}',
        b"[" * 100_000, b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*bad, b'{"text": "good"}']))
    (block,) = blocks(source(tmp_path, shuffle=False))
    assert values([block]) == [b"good"]
    reasons = [block.records.bad[index] for index in range(len(bad))]
    assert reasons[0] == "not UTF-8 (invalid start byte at byte 10)"
    assert reasons[1].startswith("not JSON (Expecting value")
    assert reasons[2:6] == [
        "no field 'text'; it has 'body'",
        "no text in the field 'text'",
        "not a JSON object",
        "not Unicode (surrogates not allowed at character 0)",
    ]
    assert all(reason.startswith("not JSON (") for reason in reasons[6:])


def test_a_line_above_the_bound_is_a_bad_record_that_is_never_held(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lines, "RECORD_BYTES_MAX", 3 << 20)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "before"}\n')
        file.truncate(200 << 20)
        file.seek(0, 2)
        file.write(b'\n{"text": "after"}\n')
    tracemalloc.start()
    found = blocks(source(path, shuffle=False))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values(found) == [b"before", b"after"]
    (reason,) = [why for one in found for why in one.records.bad.values()]
    assert reason.startswith(f"a line of {(200 << 20) - 19} bytes; at most ")
    assert peak < 16 << 20


def test_a_line_of_text_is_a_record(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\n\r\n  two \n\xff\nthree")
    (tmp_path / ".hidden").write_text("no")
    (block,) = blocks(source(tmp_path, form="text", shuffle=False))
    assert values([block]) == [b"one", b"  two ", b"three"]
    assert block.records.offsets.tolist() == [0, 7, 14, 16]
    assert block.records.bad == {2: "not UTF-8 (invalid start byte at byte 0)"}


def test_a_transform_of_whole_records_gets_the_object(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b' {"turns": [1]} \r\n{"text": }\n')
    (block,) = blocks(source(tmp_path, whole_records=True, shuffle=False))
    assert (block.records.kind, values([block])) == (Kind.JSON, [b'{"turns": [1]}'])
    assert list(block.records.bad) == [1]


def test_token_ids_of_json_lines_have_a_mask(tmp_path) -> None:
    rows = [
        {"ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"ids": [], "labels": []}, {"ids": [1.5], "labels": [1]},
        {"ids": [-1], "labels": [1]}, {"ids": [1], "labels": [1, 2]}, {"ids": [2**31], "labels": [1]},
        {"ids": [True], "labels": [1]}, {"ids": [[1], [2, 3]], "labels": [1, 1]}, {"ids": [4], "labels": [4]},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = blocks(source(tmp_path, tokens_field="ids", labels_field="labels", shuffle=False))
    assert block.records.kind is Kind.TOKENS
    assert np.frombuffer(block.records.data, "<i4").tolist() == [1, 2, 3, 4]
    assert block.records.mask == bytes([0, 1, 1, 1])
    assert sorted(block.records.bad) == [2, 3, 4, 5, 6, 7]
