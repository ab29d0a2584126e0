"""What a tormented plan reads: five sources of four formats, and what every record of them holds.

Records are found here by plain means, so that the audit does not rest on the readers that it audits.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

END = 256  # the id of the end of a document, with `tokenizer: {kind: bytes}`
FRACTIONAL = {"chats": 2}  # source of "2.5 epochs": whole ones; of the last one only a part is there

PLAN = """\
version: 1
seed: {seed}
output: {{ext: .safetensors, mesh: "dp=2", micro_batches: 2, micro_batch_tokens: 512}}
stages:
  - {{from: 0,  sequence_length: 128}}
  - {{from: 60, sequence_length: 256}}
tokenizer: {{kind: bytes}}
defaults: {{shuffle: {{block: 64KiB}}, long: split}}
sources:
  code:  {{format: jsonl, files: code/, text_field: content, on_error: {{do: skip, at_most: 20%}}}}
  prose: {{format: text, files: prose/, on_error: {{do: skip, at_most: 20%}}}}
  notes: {{format: text, files: "notes/*.gz"}}
  table: {{format: parquet, files: table/}}
  chats: {{format: jsonl, files: chats/, epochs: 2.5}}
mix:
  - {{from: 0, weights: {{code: 40, prose: 30, notes: 5, table: 20, chats: 5}}}}
  - {{ramp_to: 200, weights: {{code: 10, prose: 30, notes: 35, table: 20, chats: 5}}}}
"""

Address = tuple[str, int, int]  # source, number of the file in its listing, offset or row


@dataclass
class Corpus:
    """Written files, and the truth about them."""

    plan: Path
    texts: dict[Address, bytes] = field(default_factory=dict)
    bad: set[Address] = field(default_factory=set)

    def ids(self, address: Address) -> list[int]:
        return [*self.texts[address], END]

    def records(self, source: str) -> set[Address]:
        return {address for address in self.texts if address[0] == source}


def write_corpus(directory: Path, seed: int) -> Corpus:
    """Files and a plan over them, the same for every run of the seed."""
    draw = random.Random(seed)
    corpus = Corpus(directory / "plan.yaml")
    corpus.plan.write_text(PLAN.format(seed=seed))
    for source in ("code", "prose", "notes", "table", "chats"):
        (directory / source).mkdir()
    for number in range(2):
        lines = [_json_line(draw, "code", "content", number, line) for line in range(900)]
        _write_lines(corpus, directory / f"code/{number}.jsonl", "code", number, lines)
    lines = [_json_line(draw, "code", "content", 2, line) for line in range(300)]
    _write_lines(corpus, directory / "code/2.jsonl.gz", "code", 2, lines)
    for number in range(2):
        lines = [_text_line(draw, f"prose {number} {line}") for line in range(1200)]
        _write_lines(corpus, directory / f"prose/{number}.txt", "prose", number, lines)
    lines = [(text := f"note {line} {_words(draw)}".encode(), text) for line in range(800)]
    _write_lines(corpus, directory / "notes/0.txt.gz", "notes", 0, lines)
    _write_table(corpus, directory / "table/0.parquet", draw)
    lines = [_good_json(f"chat {line} {_words(draw)}", "text") for line in range(200)]
    _write_lines(corpus, directory / "chats/0.jsonl", "chats", 0, lines)
    return corpus


Line = tuple[bytes, bytes | None]  # as stored; its text, None if it has none


def _words(draw: random.Random) -> str:
    """Of very different lengths: one in twenty is longer than a row."""
    length = draw.randrange(300, 900) if draw.random() < 0.05 else int(draw.lognormvariate(3.6, 0.8))
    return "".join(draw.choices("abcdefghij klmnoprstu äöü ", k=length))


def _good_json(text: str, name: str) -> Line:
    return json.dumps({name: text}).encode(), text.encode()


def _json_line(draw: random.Random, source: str, name: str, file: int, line: int) -> Line:
    if draw.random() < 0.02:
        return draw.choice([b'{"content": "torn', b'{"other": 1}', b"[1, 2]", b'"\xff"']), None
    return _good_json(f"{source} {file} {line} {_words(draw)}", name)


def _text_line(draw: random.Random, begin: str) -> Line:
    if draw.random() < 0.02:
        return begin.encode() + b" \xff\xfe", None
    text = f"{begin} {_words(draw)}".strip().encode()
    return text, text


def _write_lines(corpus: Corpus, path: Path, source: str, file: int, lines: Sequence[Line]) -> None:
    offset = 0
    for stored, text in lines:
        if text is None:
            corpus.bad.add((source, file, offset))
        else:
            corpus.texts[source, file, offset] = text
        offset += len(stored) + 1
    data = b"".join(stored + b"\n" for stored, _ in lines)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _write_table(corpus: Corpus, path: Path, draw: random.Random) -> None:
    texts = [f"row {row} {_words(draw)}" for row in range(1000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=130)
    for row, text in enumerate(texts):
        corpus.texts["table", 0, row] = text.encode()
