"""What a tormented plan reads: six sources of four formats, chats and pairs among them, and what every record of them holds.

Records are found here by plain means, so that the audit does not rest on the readers that it audits.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models

from spans_audit import Address

# Ids of a model's tokenizer, which chats need. Below them, the id of a byte is the byte.
END, TURN, OVER = 256, 257, 258
TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
FRACTIONAL = {"chats": 2}  # source of "2.5 epochs": whole ones; of the last one only a part is there

PLAN = """\
version: 1
seed: {seed}
output: {{ext: .safetensors, mesh: "dp=2", micro_batches: 2, micro_batch_tokens: 512}}
stages:
  - {{from: 0,  sequence_length: 128}}
  - {{from: 60, sequence_length: 256}}
tokenizer: {{kind: huggingface, file: tokenizer.json, eos: "<|end|>"}}
defaults: {{shuffle: {{block: 64KiB}}, long: split, on_error: {{do: skip, at_most: 20%}}}}
sources:
  code:  {{format: jsonl, files: code/, text_field: content}}
  prose: {{format: text, records: lines, files: prose/}}
  notes: {{format: text, records: lines, files: "notes/*.gz"}}
  table: {{format: parquet, files: table/}}
  chats: {{format: jsonl, files: chats/, chat: messages, long: split, epochs: 2.5}}
  pairs: {{format: jsonl, files: pairs/, pair: {{}}}}
mix:
  - {{from: 0, weights: {{code: 40, prose: 25, notes: 5, table: 20, chats: 5, pairs: 5}}}}
  - {{ramp_to: 200, weights: {{code: 10, prose: 25, notes: 35, table: 20, chats: 5, pairs: 5}}}}
"""


@dataclass
class Corpus:
    """Written files, and the truth about them."""

    plan: Path
    texts: dict[Address, bytes] = field(default_factory=dict)  # of chats and pairs the whole record
    bad: set[Address] = field(default_factory=set)
    parts: dict[Address, list[list[int]]] = field(
        default_factory=dict
    )  # tokens of exchanges or sides, which nothing cuts

    def ids(self, address: Address) -> list[int]:
        parts = self.parts.get(address)
        return [*self.texts[address], END] if parts is None else list(chain(*parts))

    def starts(self, address: Address) -> Collection[int]:
        """The tokens with which a span may begin."""
        parts = self.parts.get(address)
        if parts is None:
            return range(len(self.texts[address]) + 1)
        return [sum(map(len, parts[:number])) for number in range(len(parts))]

    def records(self, source: str) -> set[Address]:
        return {address for address in self.texts if address[0] == source}


def write_corpus(directory: Path, seed: int) -> Corpus:
    """Files and a plan over them, the same for every run of the seed."""
    draw = random.Random(seed)
    corpus = Corpus(directory / "plan.yaml")
    corpus.plan.write_text(PLAN.format(seed=seed))
    for source in ("code", "prose", "notes", "table", "chats", "pairs"):
        (directory / source).mkdir()
    _write_tokenizer(directory)
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
    _write_parts(corpus, directory / "chats/0.jsonl", "chats", [_chat(draw, line) for line in range(100)])
    _write_parts(corpus, directory / "pairs/0.jsonl", "pairs", [_pair(draw, line) for line in range(120)])
    return corpus


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(list(TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


Line = tuple[bytes, bytes | None]  # as stored; its text, None if it has none


def _words(draw: random.Random) -> str:
    """Of very different lengths: one in twenty is longer than a row."""
    length = draw.randrange(300, 900) if draw.random() < 0.05 else int(draw.lognormvariate(3.6, 0.8))
    return _letters(draw, length)


def _letters(draw: random.Random, length: int) -> str:
    return "".join(draw.choices("abcdefghij klmnoprstu äöü ", k=length))


def _good_json(text: str, name: str) -> Line:
    return json.dumps({name: text}).encode(), text.encode()


def _json_line(draw: random.Random, source: str, name: str, file: int, line: int) -> Line:
    if draw.random() < 0.02:
        return draw.choice([b'{"content": "torn', b'{"other": 1}', b"[1, 2]", b'"\xff"']), None
    return _good_json(f"{source} {file} {line} {_words(draw)}", name)


Parts = tuple[dict[str, object], list[list[int]]]  # a record, and the tokens of what it is made of; none if it is bad


def _chat(draw: random.Random, line: int) -> Parts:
    """Of one to five exchanges: some are longer than a row, no exchange is. One in ten spells what is no text of it."""
    if draw.random() < 0.02:
        return draw.choice([{"messages": []}, {"other": 1}, {"messages": [{"role": "user", "content": "alone"}]}]), []
    turns = []
    for number in range(draw.randrange(1, 6)):
        spelled = TOKENS[2] if draw.random() < 0.1 else ""
        turns.append(("user", f"chat {line} {number} {spelled}{_letters(draw, draw.randrange(12))}"))
        turns.append(("assistant", f"{number} {_letters(draw, draw.randrange(12))}"))
    ids = [[TURN, *f"{role}\n{text}".encode(), OVER, *b"\n"] for role, text in turns]
    exchanges = [[*asked, *answered] for asked, answered in zip(ids[::2], ids[1::2], strict=True)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}, exchanges


def _pair(draw: random.Random, line: int) -> Parts:
    """Which fits into a row."""
    if draw.random() < 0.02:
        return draw.choice([{"prompt": "x", "chosen": "y"}, {"chosen": 1, "rejected": 2}]), []
    prompt, *answers = (f"pair {line} {_letters(draw, 5)}", *(_letters(draw, draw.randrange(1, 15)) for _ in range(2)))
    record: dict[str, object] = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    return record, [[*(prompt + answer).encode(), END] for answer in answers]


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


def _write_parts(corpus: Corpus, path: Path, source: str, made: Sequence[Parts]) -> None:
    data = b""
    for record, parts in made:
        stored = json.dumps(record).encode()
        address = (source, 0, len(data))
        if parts:
            corpus.texts[address], corpus.parts[address] = stored, parts
        else:
            corpus.bad.add(address)
        data += stored + b"\n"
    path.write_bytes(data)


def _write_table(corpus: Corpus, path: Path, draw: random.Random) -> None:
    texts = [f"row {row} {_words(draw)}" for row in range(1000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=130)
    for row, text in enumerate(texts):
        corpus.texts["table", 0, row] = text.encode()
