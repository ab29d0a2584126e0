"""Every feature of a plan beside every other, over every kind of files: a cell works, proven by the records, or is refused by
the name of one of the two. The cells are generated; one that runs without either is the failure.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import tarfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as Pillow
from pyarrow import ipc, parquet
from safetensors.numpy import load
from tokenizers import AddedToken, Tokenizer
from written import write_megatron

from spans_audit import by_record, joined, pieces_of
from stepfs.errors import StepfsError
from stepfs.payload import expand
from stepfs.reader.dataset import decoder
from stepfs.torch import load as read_torch
from stepfs.torch import micro_batches
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.step import End, StepPlan
from stepfs_producer.run.load import LoadedSource, SampleBuffer, SampleChunk, spans_of
from stepfs_producer.run.prepare import LocatedPlan, prepare_plan, source_specs
from stepfs_producer.run.workers import tasks
from stepfs_producer.sources.listing import Layout, list_corpus

Settings = dict[str, Any]
EXCLUDED = {3, 8}
RECORDS, ROW, ALIGN, _FIRST = 12, 128, 8, 20  # ids of records begin with their numbers, from there on
FIM = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
END = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD = "<|image_pad|>"
OF_PARTS = TEMPLATE.replace(
    "{{ m.content }}", "{% for p in m.content %}{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}"
)
WITH_BYTES = ("parquet", "arrow", "webdataset")
TEXTS = [f"{n} " + "over and " * (3 * n % 17) for n in range(RECORDS)]
IDS = [list(range(_FIRST + n, _FIRST + 3 * n + 2)) for n in range(RECORDS)]
KINDS = ("jsonl", "json", "csv", "parquet", "arrow", "webdataset", "text", "megatron")


def _of_source(**more: object) -> Callable[[Settings], None]:
    return lambda plan: plan["sources"]["a"].update(more)


def _of_output(**more: object) -> Callable[[Settings], None]:
    return lambda plan: plan["output"].update(more)


def _with_columns(plan: Settings) -> None:
    plan["sources"]["a"]["transform"] = "user_functions:crossed_with_rows"
    plan["output"]["columns"] = {"numbers": {"dtype": "uint8", "shape": [2]}}


def _with_images(plan: Settings) -> None:
    plan["sources"]["a"].setdefault("transform", "user_functions:crossed")
    plan["sources"]["a"]["images"] = {"fields": "png"}


def _showing(plan: Settings) -> None:
    plan["sources"]["a"] |= {"chat": {"messages": "shown"}, "images": {"fields": "png"}}
    columns = {"pixels": {"dtype": "uint8", "shape": [588]}, "grid": {"dtype": "int32", "shape": [3]}}
    plan["output"]["columns"] = {**plan["output"].get("columns", {}), **columns}
    plan["tokenizer"]["chat_template"] = OF_PARTS


def _decoding_there(plan: Settings) -> None:
    _showing(plan)
    plan["sources"]["a"]["images"]["decode"] = "reader"


def _excluding(plan: Settings) -> None:
    source = {key: value for key, value in plan["sources"]["a"].items() if key in {"format", "files", "records"}}
    [spec] = source_specs(
        parsed_plan({"output": {"mesh": "dp=1", "sequence_length": 8}, "sources": {"a": {**source, "shuffle": "none"}}})
    ).values()
    listing = list_corpus(spec)
    task = Layout(spec, listing).task(BlockAddress(0, 0, 0))
    assert task is not None
    offsets = tasks.read(spec, task)[1].offsets.tolist()
    while len(offsets) < RECORDS:
        task = Layout(spec, listing).task(task.next_fragment)
        offsets += tasks.read(spec, task)[1].offsets.tolist()
    plan["exclude"] = [["a", listing.files[0].name, offsets[n]] for n in EXCLUDED]


def _in_stages(plan: Settings) -> None:
    del plan["output"]["sequence_length"]
    plan["output"]["micro_batch_tokens"] = ROW
    plan["stages"] = [{"sequence_length": ROW // 2}, {"from": 2, "sequence_length": ROW}]


def _aligned(plan: Settings) -> None:
    plan["pack"] = {**plan.get("pack", {}), "align": ALIGN}


FEATURES: dict[str, tuple[Callable[[Settings], None], str]] = {  # and what names it, where it is refused
    "chat": (_of_source(chat={}), "chat"),
    "shown": (_showing, "images|chat"),
    "decode": (_decoding_there, "decode|images|chat"),
    "pair": (_of_source(pair={"chosen": "better", "rejected": "worse"}), "pair"),
    "label": (_of_source(pair={"label": "good", "completion": "better"}), "pair"),
    "fim": (_of_source(fim={"tokens": list(FIM), "rate": 1}), "fim"),
    "transform": (_of_source(transform="user_functions:crossed"), "transform"),
    "columns": (_with_columns, "columns"),
    "images": (_with_images, "images"),
    "masks": (_of_source(tokens_field="ids", mask_field="mask"), "tokens_field"),
    ".npy": (_of_output(ext=".npy"), ".npy"),
    ".tar": (_of_output(ext=".tar"), ".tar"),
    "a file a micro-batch": (_of_output(files="micro_batches"), "micro_batches"),
    "labels: same": (_of_output(labels="same"), "labels"),
    "concat": (lambda plan: plan.update(pack={**plan.get("pack", {}), "method": "concat"}), "concat"),
    "stages": (_in_stages, "stages"),
    "its own length": (_of_source(sequence_length=ROW // 2), "sequence_length"),
    "truncate": (_of_source(long="truncate"), "long"),
    "holdout": (_of_source(holdout="40%"), "holdout"),
    "shard": (_of_source(shard="0/2"), "shard"),
    "two epochs": (_of_source(epochs=2), "epochs"),
    "two loads": (lambda plan: plan.update(balance={"loads": ["tokens", "numbers"]}), "load"),
    "as stored": (_of_source(shuffle="none"), "shuffle"),
    "exclude": (_excluding, "exclude"),
    "compact": (_of_output(arrays="compact"), "compact"),
    "align": (_aligned, "align"),
    "tag": (_of_source(tag="lang"), "tag"),
}
CUTTING = {"stages", "its own length", "concat", "truncate"}


def png(n: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (28 + 28 * (n % 2), 28), (n, n, n)).save(file, "PNG")
    return file.getvalue()


def lang(n: int) -> str:
    return f"{n % 3} – ☃"


def record(n: int, kind: str = "jsonl") -> Settings:
    asks = [{"type": "image"}] * (kind in WITH_BYTES) + [{"type": "text", "text": f"{n}?"}]
    return {
        "shown": [{"role": "user", "content": asks}, {"role": "assistant", "content": [{"type": "text", "text": f"{n} is it"}]}],
        "text": TEXTS[n],
        "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} is it"}],
        "prompt": f"{n}: ", "better": "yes", "worse": "no", "good": n % 3 < 2, "ids": IDS[n], "mask": [one % 2 for one in IDS[n]],
        "lang": lang(n),
    }  # fmt: skip


def write(directory: Path, kind: str) -> str:
    """The files of a kind, and the entry that names them."""
    records, path = [record(n, kind) for n in range(RECORDS)], directory / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    elif kind == "json":
        path.write_text(json.dumps(records))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, records[0])
            rows.writeheader()
            rows.writerows(
                {name: one if isinstance(one, str) else json.dumps(one) for name, one in row.items()} for row in records
            )
    elif kind == "text":
        path.write_text("".join(text.strip() + "\n" for text in TEXTS))
    elif kind == "megatron":
        return str(write_megatron(directory, [[ids] for ids in IDS]))
    elif kind == "webdataset":
        with tarfile.open(directory / "a.tar", "w") as archive:
            for n, one in enumerate(records):
                members = {name: str(value).encode() for name, value in one.items() if isinstance(value, (str, bool))}
                talks = {f"{name}.json": json.dumps(one[name]).encode() for name in ("messages", "shown")}
                for name, data in {**members, **talks, "png": png(n)}.items():
                    ending = name if name in {*talks, "text", "png"} else f"{name}.txt"
                    member = tarfile.TarInfo(f"{n:03}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        return str(directory / "a.tar")
    else:
        table = pa.Table.from_pylist([{**one, "png": png(n)} for n, one in enumerate(records)])
        if kind == "parquet":
            parquet.write_table(table, path, row_group_size=5)
        else:
            with ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=5)
    return str(path)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Settings]:
    """A plan of each kind."""
    directory = tmp_path_factory.mktemp("crossed")
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens([AddedToken(one) for one in (*FIM, "<|im_start|>", "<|im_end|>", PAD)])
    model.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = {"kind": "huggingface", "file": str(directory / "tokenizer.json"), "eos": END}
    output = {"mesh": "dp=2", "sequence_length": ROW, "micro_batches": 2}
    found = {}
    for kind in KINDS:
        source: Settings = {"format": kind, "files": write(directory, kind), "epochs": 1}
        if kind == "text":
            source["records"] = "lines"
        found[kind] = {"output": output, "tokenizer": tokenizer, "sources": {"a": source}, "until": {"last": "pad"}}
    return found


class Body:
    """A group of samples, held here."""

    def __init__(self, group: object, nbytes: int) -> None:
        self.group, self.nbytes = group, nbytes

    def let_go(self) -> None:
        pass


def loaded(source: LoadedSource) -> SampleBuffer:
    found, place = SampleBuffer(), BlockAddress(0, 0, 0)
    while (task := source.layout.task(place)) is not None:
        head, records = tasks.read(source.spec, task)
        name, seed = source.spec.name, source.spec.seed
        made, group = tasks.transform(source.transform, seed, place.epoch, name, records, 0, head.records)
        assert not made.bad, made.bad
        body: Any = Body(group, 1)
        found.add(SampleChunk(head, 0, made.heads, body))
        place = head.follows
    return found


def steps(settings: Settings) -> Iterator[tuple[StepPlan, list[bytes]]]:
    """The steps of a plan, made without workers and without a lake."""
    place = LocatedPlan(parsed_plan(settings))
    prepared = prepare_plan(place, {name: list_corpus(spec) for name, spec in source_specs(place.plan).items()})
    held = {one.spec.name: loaded(one) for one in prepared.sources}
    planner = Planner(prepared.rules)
    state = planner.begin()
    while True:
        for name, one in held.items():
            one.forget_before(state.sources[name])
            one.ended = True
        planned = planner.next(state, {name: one.ahead(1 << 40)[0] for name, one in held.items()})
        if isinstance(planned, End):
            return
        assert isinstance(planned, StepPlan)
        state = planned.after
        step, bodies = spans_of(planned, {name: one.until(state.sources[name]) for name, one in held.items()})
        yield planned, tasks.make_step(prepared.payloads, step, None, *(one.group for one in bodies))[0]  # type: ignore[attr-defined]


def contents(n: int, features: set[str], kind: str) -> list[str]:
    """The documents of a record, as text."""
    sides = features & {"pair", "label"}
    if features & {"chat", "shown", "decode"} and not sides:
        shown = PAD * (1 + n % 2) if features & {"shown", "decode"} and kind in WITH_BYTES else ""
        return [f"<|im_start|>user\n{shown}{n}?<|im_end|>\n<|im_start|>assistant\n{n} is it<|im_end|>\n"]
    answers = ("yes",) if "label" in features else ("yes", "no")
    if sides and "chat" in features:
        begin = f"<|im_start|>user\n{n}: <|im_end|>\n<|im_start|>assistant\n"
        return [f"{begin}{answer}<|im_end|>\n" for answer in answers]
    if sides:
        return [f"{n}: {answer}{END}" for answer in answers]
    text = TEXTS[n].strip() if kind == "text" else TEXTS[n]
    return [(text.upper() if features & {"transform", "columns", "images"} else text) + END]


def restored(ids: list[int], model: Tokenizer) -> list[int]:
    """A document whose middle came last, in its own order; whoever has one of its tokens has all three, once each."""
    marks = [model.token_to_id(one) or 0 for one in FIM]
    if not set(marks) & set(ids):
        return ids
    prefix, middle, suffix = (ids.index(one) for one in marks)
    assert [ids.count(one) for one in marks] == [1, 1, 1]
    if suffix == prefix + 1:
        before, inside, behind = [], ids[middle + 1 : -1], ids[suffix + 1 : middle]
    else:
        before, inside, behind = ids[prefix + 1 : suffix], ids[middle + 1 : -1], ids[suffix + 1 : middle]
    return [*before, *inside, *behind, ids[-1]]


def prove(settings: Settings, features: set[str], kind: str) -> None:
    """Every record is there as often as it should be, whole or, where that was asked for, its beginning."""
    model = Tokenizer.from_file(settings["tokenizer"]["file"])
    ext = settings["output"].get("ext", ".safetensors")
    made = list(steps(settings))
    payloads = [payload for _, files in made for payload in files]
    if ext == ".npy":
        plain = {**settings, "output": {**settings["output"], "ext": ".safetensors"}}
        made = list(steps(plain))
        others = [load(payload) for _, files in made for payload in files]
        for payload, other in zip(payloads, others, strict=True):
            names = ("input_ids", "labels", "position_ids", "doc_ids")
            assert (np.load(io.BytesIO(payload)) == np.stack([other[name] for name in names])).all()
        payloads, ext = [payload for _, files in made for payload in files], ".safetensors"
    for planned, files in made:
        tokens = [np.array([len(piece.ids) for piece in pieces_of(ext, payload)]) for payload in files]
        told = planned.costs if "a file a micro-batch" in features else planned.costs.sum(axis=1)
        assert [int((6 * 4096 * one + one**2).sum()) for one in tokens] == told.ravel().tolist(), "told is measured"
    if ext == ".safetensors":
        for payload in payloads:
            prove_labels(expand(load(payload)), features, kind, model)
    found: Counter[int] = Counter()
    for pieces in by_record(piece for payload in payloads for piece in pieces_of(ext, payload)).values():
        sides = [piece.side for piece in pieces]
        ids = joined(pieces)
        assert ids is not None, "no token is there twice"
        n, expected = expected_of(ids, features, kind, model)
        assert sides == (
            [2 - record(n)["good"]] if "label" in features else [1, 2] if "pair" in features else [0] * len(sides)
        )
        assert {piece.tag for piece in pieces} == {lang(n) if "tag" in features else ""}
        found[n] += 1
        if "truncate" not in features or len(expected) <= ROW:
            assert ids == expected or ("fim" in features and same(restored(ids, model), expected, model))
        else:
            assert ids == expected[: len(ids)]
            assert len(ids) in {ROW // 2, ROW} or "concat" in features
    out = EXCLUDED if "exclude" in features else set()
    assert not out & found.keys()
    times = 2 if "two epochs" in features else 1
    if features & {"holdout", "shard"}:
        assert set(found.values()) <= {times}
        assert 0 < len(found) < RECORDS
    else:
        assert set(found.values()) == {times}
        row = ROW // 2 if features & CUTTING else ROW
        missing = {n for n in range(RECORDS) if n not in found} - out
        assert all(n % 3 and len(encoded(TEXTS[n].upper(), model)) >= row for n in missing), (
            "rows keep a document whole, or drop it"
        )
        assert not missing or "columns" in features


def same(ids: list[int], expected: list[int], model: Tokenizer) -> bool:
    """The same text: cut between characters it has other tokens."""
    both = [model.decode(one, skip_special_tokens=False) for one in (ids, expected)]
    return both[0] == both[1]


def expected_of(ids: list[int], features: set[str], kind: str, model: Tokenizer) -> tuple[int, list[int]]:
    """Which record that is, and its ids by the model's own tokenizer."""
    if "masks" in features or kind == "megatron":
        inside = [one for one in restored(ids, model) if one != model.token_to_id(END)]
        n = inside[0] - _FIRST
        return n, [*IDS[n], model.token_to_id(END) or 0]
    text = model.decode(restored(ids, model), skip_special_tokens=False)
    n = int("".join(itertools.takewhile(str.isdigit, text.replace(PAD, "").removeprefix("<|im_start|>user\n"))))
    return n, [one for part in contents(n, features, kind) for one in encoded(part, model)]


def encoded(text: str, model: Tokenizer) -> list[int]:
    ids: list[int] = model.encode(text, add_special_tokens=False).ids
    return ids


def prove_labels(arrays: dict[str, np.ndarray], features: set[str], kind: str, model: Tokenizer) -> None:
    """Labels are the document's next tokens, of those that are learned; rows of columns stand where their span says."""
    at = 0
    for row, (micro, start, count, *_) in enumerate(arrays["spans"].tolist()):
        here = slice(start, start + count)
        ids, labels = arrays["input_ids"][micro][here].tolist(), arrays["labels"][micro][here].tolist()
        learned = [one for one in labels if one >= 0]
        own = ids if "labels: same" in features else ids[1:]
        if features & {"chat", "shown", "decode", "pair", "label"}:
            answers = model.decode(learned, skip_special_tokens=False)
            whole = [
                f"{one}{end}"
                for one in ("yes", "no", *(f"{n} is it" for n in range(RECORDS)))
                for end in (END, "<|im_end|>\n")
            ]
            assert any(answers in one for one in whole) if features & CUTTING else answers in whole
        elif "masks" in features:
            names = {model.token_to_id(one) for one in (*FIM, END)}
            assert all(label in {-100, one} for label, one in zip(labels, own, strict=False))
            assert all(label == one for label, one in zip(labels, own, strict=False) if one % 2 and one not in names)
            assert all(
                label == -100 for label, one in zip(labels, own, strict=False) if one % 2 == 0 and one not in names
            )
        else:
            assert labels[: len(own)] == own
        if features & {"shown", "decode"}:
            number, rows = int(answers.split()[0]), int(arrays["pixels_counts"][row])
            assert rows == 4 * ids.count(model.token_to_id(PAD)) == (4 + 4 * (number % 2)) * (kind in WITH_BYTES)
            assert (arrays["pixels"][at : at + rows] == number).all()
            at += rows
        if "columns" in features:
            rows = int(arrays["numbers_counts"][row])
            of_ids = "masks" in features or kind == "megatron"
            number = ids[0] if of_ids else int("".join(itertools.takewhile(str.isdigit, model.decode(ids))) or 0)
            assert rows == number % 3
            assert (arrays["numbers"][at : at + rows] == number).all()
            at += rows


def cells() -> Iterator[tuple[str, str, str, bool]]:
    """Each pair over each kind; a push has one kind each, another one from pair to pair."""
    turn = deque(KINDS)
    for one, other in itertools.combinations_with_replacement(FEATURES, 2):
        turn.rotate(1)
        for kind in KINDS:
            yield one, other, kind, kind == turn[0]


CELLS = [
    pytest.param(one, other, kind, id=f"{one} × {other} × {kind}", marks=() if in_push else pytest.mark.nightly)
    for one, other, kind, in_push in cells()
]


@pytest.mark.parametrize(("one", "other", "kind"), CELLS)
def test_a_cell_works_or_is_refused_by_name(one: str, other: str, kind: str, plans: dict[str, Settings]) -> None:
    settings = json.loads(json.dumps(plans[kind]))
    for name in dict.fromkeys((one, other)):
        FEATURES[name][0](settings)
    if kind == "webdataset" and "pair" in settings["sources"]["a"]:
        named = {"prompt": "prompt", **settings["sources"]["a"]["pair"]}
        settings["sources"]["a"]["pair"] = {key: f"{name}.txt" for key, name in named.items()}
    if kind == "webdataset" and "chat" in settings["sources"]["a"] and "pair" not in settings["sources"]["a"]:
        name = settings["sources"]["a"]["chat"].get("messages", "messages")
        settings["sources"]["a"]["chat"] = {"messages": f"{name}.json"}
    if kind == "webdataset" and "tag" in settings["sources"]["a"]:
        settings["sources"]["a"]["tag"] = "lang.txt"
    try:
        prove(settings, {one, other}, kind)
    except StepfsError as error:
        if not re.search(f"{FEATURES[one][1]}|{FEATURES[other][1]}", str(error)):
            pytest.fail(f"refused, and neither is named: {error}")


@pytest.mark.parametrize("ext", [".safetensors", ".pt"])
@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
@pytest.mark.parametrize("more", ["compact", "a file a micro-batch", "tag"])
def test_images_decoded_by_the_reader_are_those_that_the_producer_decodes(
    more: str, kind: str, ext: str, plans: dict[str, Settings]
) -> None:
    """In each byte, for `StepDataset` and for loops of one's own; also where a file has no image."""
    made = []
    for feature in ("shown", "decode"):
        settings = json.loads(json.dumps(plans[kind]))
        for name in (feature, more):
            FEATURES[name][0](settings)
        settings["output"]["ext"] = ext
        if kind == "webdataset":
            settings["sources"]["a"]["chat"] = {"messages": "shown.json"}
            settings["sources"]["a"] |= {"tag": "lang.txt"} if more == "tag" else {}
        made.append([payload for _, files in steps(settings) for payload in files])
    assert 4 * sum(map(len, made[1])) < 3 * sum(map(len, made[0]))
    batches = [list(map(decoder(ext), map(memoryview, payloads))) for payloads in made]
    split = [[part for batch in each for part in micro_batches(batch)] for each in batches]
    raw = [expand(read_torch(payload, "cpu") if ext == ".pt" else load(payload)) for payload in made[1]]
    for theirs, ours in [*zip(*batches, strict=True), *zip(*split, strict=True), *zip(batches[0], raw, strict=True)]:
        assert theirs.keys() == ours.keys()
        for name, array in theirs.items():
            found = ours[name]
            assert type(found) is type(array) or isinstance(found, np.ndarray)
            if hasattr(array, "numpy"):
                both = [np.asarray(one) for one in (array, found)]
                assert [both[0].dtype, both[0].shape, both[0].tobytes()] == [
                    both[1].dtype,
                    both[1].shape,
                    both[1].tobytes(),
                ]
            else:
                assert array == found
    assert any(len(batch["pixels"]) for batch in batches[1])
    assert all(not len(batch["pixels"]) for batch in map(load, made[1] if ext == ".safetensors" else ()))
