"""A format of one's own, as its documentation says: a class of a few lines."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from sourced import blocks, laid_out, source, values

from stepfs.errors import UsageError
from stepfs_producer import Bad
from stepfs_producer.sources.listing import list_corpus
from stepfs_producer.sources.record import Kind


class Fasta:
    """The example of `stepfs_producer.sources.own`, with an option."""

    suffixes = (".fa",)

    def __init__(self, mark: str = ">") -> None:
        self.mark = mark.encode()

    def records(self, file, part):
        for number, entry in enumerate(file.read().split(self.mark)[1:]):
            name, _, letters = entry.partition(b"\n")
            yield number, Bad("no name") if not name else letters.replace(b"\n", b"")


class Chunks:
    """Token ids in parts that are read alone."""

    kind = "tokens"

    def parts(self, file):
        return [(len(row["ids"]), 4 * len(row["ids"])) for row in map(json.loads, file)]

    def records(self, file, part):
        for number, line in enumerate(file):
            if number == part:
                yield from ((1000 * part + n, [one]) for n, one in enumerate(json.loads(line)["ids"]))


class Rows:
    def records(self, file, part):
        yield from enumerate(map(json.loads, file))


class Broken:
    def records(self, file, part):
        yield 0, b"good"
        raise KeyError("oops")


class Nothing:
    pass


class Wrong:
    def records(self, file, part):
        yield 0, 3


HERE = __name__


def test_a_class_of_few_lines_is_a_source(tmp_path) -> None:
    (tmp_path / "a.fa").write_bytes(b">one\nAC\nGT\n>\nX\n>two\nTT\n")
    (tmp_path / "notes.txt").write_bytes(b"no")
    spec = source(tmp_path, form=f"{HERE}:Fasta", shuffle=False)
    (block,) = blocks(spec)
    assert values([block]) == [b"ACGT", b"TT"]
    assert block.records.bad == {1: "no name"}
    (tmp_path / "a.fa").write_bytes(b"#one\nAC\n" * 50)
    cut = source(tmp_path, form=f"{HERE}:Fasta", options={"mark": "#"}, block_bytes=10)
    assert len(blocks(cut)) == 10
    assert values(blocks(cut)) == [b"AC"] * 50


def test_its_parts_are_fragments_and_its_tokens_tokens(tmp_path) -> None:
    (tmp_path / "a").write_text('{"ids": [1, 2]}\n{"ids": [3]}\n')
    spec = source(tmp_path, form=f"{HERE}:Chunks", shuffle=False)
    assert laid_out(spec).fragments_count == 2
    (block,) = blocks(spec)
    assert block.records.kind is Kind.TOKENS
    assert np.frombuffer(block.records.data, "<i4").tolist() == [1, 2, 3]
    assert block.records.offsets.tolist() == [0, 1, 1000]


def test_its_objects_have_fields(tmp_path) -> None:
    (tmp_path / "a").write_text('{"body": "x"}\n{"body": 1}\n')
    (block,) = blocks(source(tmp_path, form=f"{HERE}:Rows", text_field="body", shuffle=False))
    assert (values([block]), list(block.records.bad)) == ([b"x"], [1])
    (block,) = blocks(source(tmp_path, form=f"{HERE}:Rows", whole_records=True, epochs=Fraction(1), shuffle=False))
    assert values([block]) == [b'{"body": "x"}', b'{"body": 1}']


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (f"{HERE}:Broken", r"a: .*:Broken raised KeyError: 'oops'; mend it, or leave the file out"),
        (f"{HERE}:Nothing", "has no method `records`"),
        (f"{HERE}:Wrong", "yields int where the plan expects text"),
        (f"{HERE}:Absent", "name a class as `module:Class`"),
        ("no_such_module:Absent", "name a class as `module:Class`"),
    ],
)
def test_a_wrong_class_is_named_in_one_line(tmp_path, form, said) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(UsageError, match=said) as caught:
        blocks(source(tmp_path, form=form))
    assert "\n" not in str(caught.value)


def test_an_error_of_the_disk_is_not_the_classs(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.fa").write_bytes(b">one\nAC")
    spec = source(tmp_path, form=f"{HERE}:Fasta")
    layout = laid_out(spec, list_corpus(spec))
    blocks(spec, layout)  # the file's beginning is checked, so that the class meets the error

    def failing(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pread", failing)
    with pytest.raises(OSError, match="Input/output error"):
        blocks(spec, layout)
