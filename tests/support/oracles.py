"""Records with what another program makes of them and what a plan makes: (ids, mask) of each document, of an answer with a
label the side of a pair, and of images their grids and a checksum of their pixels.

What the other program answered is kept in `t0_pure/answers/NAME.json`, written by `python tests/t0_pure/test_against_NAME.py`, so
that a push needs no more than that; each night it is asked again.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import chat_templates
import model_files
import numpy as np
from PIL import Image as Pillow
from tokenizers import AddedToken, Tokenizer

from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.run.prepare import tokenizer_spec, transform_spec
from stepfs_producer.run.workers import tasks
from stepfs_producer.sources.record import Kind, Records, packed
from stepfs_producer.transforms.tokenizer import pinned

Documents = list[list[list[int]]]  # of each: ids, mask, and what else it has
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
COLUMNS = {"pixels": {"dtype": "uint8", "shape": [588]}, "grid": {"dtype": "int32", "shape": [3]}}
DATA = Path(__file__).parents[1] / "t0_pure/answers"


@dataclass(frozen=True)
class Case:
    record: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=lambda: {"chat": {}})  # of the plan
    template: str = chat_templates.with_blocks("chatml")
    model: str = "gpt2"
    config: Mapping[str, Any] = field(default_factory=dict)  # of tokenizer_config.json
    beside: Mapping[str, str] = field(default_factory=dict)  # further files of the model's folder
    flags: Mapping[str, bool] = field(default_factory=dict)  # of its control tokens
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # of the plan
    theirs: Mapping[str, Any] = field(default_factory=dict)  # of the call of the other program
    images: Sequence[tuple[int, int]] = ()  # sizes of those in the record's field `images`


def written(case: Case, folder: Path) -> Path:
    """The folder of the case's model."""
    model = Tokenizer.from_str(getattr(model_files, case.model)())
    controls = [
        AddedToken(name, special=True, **{"normalized": False, **case.flags}) for name in chat_templates.CONTROLS
    ]
    model.add_special_tokens(controls)
    model.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    model.add_special_tokens([AddedToken(name, normalized=False) for name in VISION if case.images])
    model.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **case.config}
    config = {"chat_template": case.template, **{key: one for key, one in config.items() if one != "absent"}}
    for name, text in {"tokenizer_config.json": json.dumps(config), **case.beside}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def ours(case: Case, folder: Path) -> Documents:
    """What a plan makes of the record; an error of the record is raised."""
    written(case, folder)
    plan = resolve(
        parsed_plan({
            "output": {"mesh": "dp=1", "sequence_length": 4096, **({"columns": COLUMNS} if "images" in case.source else {})},
            "tokenizer": {"kind": "huggingface", "file": "tokenizer.json", "eos": "</s>", **case.tokenizer},
            "sources": {"s": {"format": "parquet" if case.images else "jsonl", "files": "x", **case.source}},
        })
    )  # fmt: skip
    spec = transform_spec(plan, "s", pinned(tokenizer_spec(plan, directory=str(folder))), directory=str(folder))
    record = dict(case.record) | ({"images": [png_of(one) for one in pictures(case)]} if case.images else {})
    data = packed(record)
    assert isinstance(data, bytes)
    zero = np.zeros(1, np.int64)
    whole = Ragged(np.frombuffer(data, np.uint8), zero + len(data))
    records = Records(Kind.FIELDS, whole, zero, zero, zero > 0)
    head, made = tasks.transform(spec, 0, 0, "s", records, 0, 1)
    if head.bad:
        raise ValueError(head.bad[0][2])
    ids, several = made.ids.values, head.heads.documents
    mask = np.ones(len(ids), np.uint8) if made.mask is None else made.mask
    cuts = np.zeros(0, np.int64) if several is None else several[0][:-1]
    more = [made.sides.tolist()] if made.sides is not None and several is None else []
    if made.columns:
        grid, pixels = (column.values for column in made.columns)
        more += [grid.ravel().tolist(), [zlib.crc32(pixels.tobytes())]]
    return [
        [one.tolist(), two.tolist(), *more] for one, two in zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
    ]


def pictures(case: Case) -> list[Pillow.Image]:
    draw = np.random.default_rng(len(case.images))
    coarse = [draw.integers(0, 256, (7, 5, 3), np.uint8) for _ in case.images]
    return [Pillow.fromarray(one).resize(size) for one, size in zip(coarse, case.images, strict=True)]


def png_of(image: Pillow.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def kept(name: str) -> dict[str, Documents]:
    found: dict[str, Documents] = json.loads((DATA / f"{name}.json").read_text())
    return found


def ask(name: str, cases: Mapping[str, Case], theirs: Callable[[Case, Path], Documents]) -> None:
    """Keep what the other program answers now."""
    answers = {}
    for case in cases:
        with TemporaryDirectory() as folder:
            answers[case] = theirs(cases[case], written(cases[case], Path(folder)))
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(answer)}" for case, answer in answers.items())
    (DATA / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
