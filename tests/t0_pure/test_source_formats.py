"""The records of a source: every format, the programs of users too."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import random
import re
import tracemalloc
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from declared import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pyarrow.parquet import encryption
from sourced import blocks, laid_out, source, values
from written import TEXTS, json_lines, write_gzip, write_megatron

from stepfs.errors import AbsentError, CorruptError, StepfsError, UsageError
from stepfs_producer import Bad
from stepfs_producer.sources import compressed, formats, reading
from stepfs_producer.sources import formats as lines
from stepfs_producer.sources import parquet as parquet_format
from stepfs_producer.sources.listing import list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import Kind

BYTES = [text.encode() for text in TEXTS]


def write_zstd(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    data, path = json_lines(texts), path / "a.jsonl.zst"
    one = zstandard.ZstdCompressor()
    stream = io.BytesIO()
    with one.stream_writer(stream, closefd=False) as writer:  # a frame that does not state its size
        writer.write(data[5000:])
    path.write_bytes(one.compress(data[:5000]) + stream.getvalue())
    return path


def write_parquet(path: Path, texts: Sequence[str | None] = TEXTS, name: str = "a.parquet") -> Path:
    table = pa.table({"text": pa.array(texts), "n": list(range(len(texts)))})
    parquet.write_table(table, path / name, row_group_size=37)
    return path / name


@pytest.mark.parametrize(("write", "form"), [(write_gzip, "jsonl"), (write_zstd, "jsonl"), (write_parquet, "parquet")])
def test_the_texts_are_those_of_the_plain_file(tmp_path, write, form) -> None:
    spec = source(write(tmp_path), form=form, shuffle=False)
    assert values(blocks(spec)) == BYTES
    small = source(write(tmp_path), form=form, shuffle=False, block_bytes=700)
    found = blocks(small)
    assert len(found) > 10
    assert values(found) == BYTES
    shuffled = source(write(tmp_path), form=form, block_bytes=700)
    assert sorted(values(blocks(shuffled))) == sorted(BYTES)


@pytest.mark.parametrize("write", [write_gzip, write_zstd])
def test_blocks_of_a_compressed_file_are_the_same_in_any_order_and_process(tmp_path, write, monkeypatch):
    spec = source(write(tmp_path), block_bytes=700)
    layout = laid_out(spec)
    found = blocks(spec, layout)
    for forgetful in (False, True):
        if forgetful:
            monkeypatch.setattr(reading, "OPEN_MAX", 0)
        for one in [found[8], found[2], found[9], *found]:
            task = layout.task(one.place)
            assert task is not None
            again = read_block(spec, task)
            assert (values([again]), again.follows) == (values([one]), one.follows)


def test_a_compressed_file_that_is_read_in_turn_is_decompressed_once(tmp_path, monkeypatch) -> None:
    opened = []
    honest = compressed.decompressed
    spec = source(write_gzip(tmp_path), block_bytes=700)
    layout = laid_out(spec)
    monkeypatch.setattr(formats, "decompressed", lambda file: opened.append(file) or honest(file))
    blocks(spec, layout)
    assert len(opened) == 1


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data) // 2 + 40):
        data[place] ^= 255
    path.write_bytes(data)


def begin_wrong(path: Path) -> None:
    path.write_bytes(b"nonsense" * 20)


@pytest.mark.parametrize(("write", "form"), [(write_gzip, "jsonl"), (write_zstd, "jsonl"), (write_parquet, "parquet")])
@pytest.mark.parametrize("damage", [cut_short, flip, begin_wrong])
def test_a_damaged_file_is_named_and_no_bad_record(tmp_path, write, form, damage) -> None:
    path = write(tmp_path)
    damage(path)
    with pytest.raises(CorruptError, match=rf"^{path}: damaged .* replace it or leave it out$"):
        blocks(source(path, form=form))


@pytest.mark.parametrize(("write", "form"), [(write_gzip, "jsonl"), (write_zstd, "jsonl"), (write_parquet, "parquet")])
def test_an_error_of_the_disk_stays_one_inside_libraries(tmp_path, write, form, monkeypatch) -> None:
    path = write(tmp_path)
    spec = source(path, form=form)
    layout = laid_out(spec)
    blocks(spec, layout)  # the file's beginning is checked, so that the library meets the error

    def failing(*arguments):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.pread", failing)
        with pytest.raises(OSError, match="Input/output error") as caught:
            blocks(spec, layout)
        assert caught.value.filename == str(path)
    assert sorted(values(blocks(spec, layout))) == sorted(BYTES)


def test_a_row_that_holds_no_text_is_bad_and_its_neighbours_stay(tmp_path) -> None:
    table = pa.table({"text": pa.array([b"one", b"\xff", None, b"two"], pa.binary())})
    parquet.write_table(table.cast(pa.schema([("text", pa.binary())])), tmp_path / "a.parquet")
    (block,) = blocks(source(tmp_path, form="parquet", shuffle=False))
    assert values([block]) == [b"one", b"two"]
    assert block.records.bad == {1: "not UTF-8 (invalid start byte at byte 0)", 2: "null in the field 'text'"}
    assert block.records.offsets.tolist() == [0, 1, 2, 3]


def test_rows_become_objects_for_a_transform_of_whole_records(tmp_path) -> None:
    spec = source(write_parquet(tmp_path), form="parquet", whole_records=True, shuffle=False)
    found = blocks(spec)
    assert found[0].records.kind is Kind.FIELDS
    assert [json.loads(one) for one in values(found)] == [{"text": text, "n": n} for n, text in enumerate(TEXTS)]


def test_dictionaries_and_long_strings_are_text(tmp_path) -> None:
    for kind in (pa.dictionary(pa.int32(), pa.string()), pa.large_string(), pa.binary()):
        parquet.write_table(pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)}), tmp_path / "a.parquet")
        assert values(blocks(source(tmp_path, form="parquet", shuffle=False))) == [b"a", b"b", b"a"]


def test_columns_of_token_ids_have_a_mask(tmp_path) -> None:
    columns = {
        "ids": pa.array([[1, 2], [3], None, [4, None], []], pa.list_(pa.int64())),
        "mask": pa.array([[True, False], [True], [], [True, True], []]),
        "labels": pa.array([[1, 2], [-100], [], [1, 1], []], pa.list_(pa.int32())),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    fields = {"tokens_field": "ids", "mask_field": "mask", "labels_field": "labels"}
    (block,) = blocks(source(tmp_path, form="parquet", shuffle=False, **fields))
    assert np.frombuffer(block.records.data.values, "<i4").tolist() == [1, 2, 3]
    assert block.records.mask.tolist() == [1, 0, 0]
    assert list(block.records.bad) == [2, 3]
    assert block.records.data.ends.tolist() == [8, 12, 12, 12, 12]


@pytest.mark.parametrize(
    ("fields", "said"), [
        ({"text_field": "content"}, "has no column 'content'; set text_field to one of text, n"),
        ({"text_field": "n"}, "column 'n' is of type int64, not of text; set text_field to another column"),
        ({"tokens_field": "text"}, "column 'text' is of type string, not of lists of integers; set tokens_field"),
    ],
)  # fmt: skip
def test_a_wrong_column_is_refused_when_the_files_are_listed(tmp_path, fields, said) -> None:
    with pytest.raises(UsageError) as caught:
        list_corpus(source(write_parquet(tmp_path), form="parquet", **fields))
    assert said in str(caught.value)


def test_row_groups_are_fragments_and_their_needed_columns_are_what_counts(tmp_path) -> None:
    spec = source(write_parquet(tmp_path), form="parquet")
    (file,) = list_corpus(spec).files
    assert [records for records, _ in file.parts] == [37] * 8 + [4]
    assert sum(count for _, count in file.parts) < sum(
        count for _, count in list_corpus(source(tmp_path, form="parquet", whole_records=True)).files[0].parts
    )
    assert laid_out(spec).fragments_count == 9


def test_few_large_rows_are_decoded_at_a_time_and_many_small_ones(tmp_path, monkeypatch) -> None:
    """256 images of 2 MiB at once took 1.3 GiB; what is decoded at a time shows nowhere."""
    monkeypatch.setattr(parquet_format, "BATCH_BYTES", 64 << 10)
    sizes: list[int] = []
    batches = parquet.ParquetFile.iter_batches

    def noted(self, batch_size, **more):
        sizes.append(batch_size)
        return batches(self, batch_size=batch_size, **more)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", noted)
    large = [f"{number:05d}" * 3200 for number in range(40)]  # 16 kB
    spec = source(write_parquet(tmp_path, large), form="parquet")
    assert sorted(values(blocks(spec))) == [text.encode() for text in large]
    assert max(sizes) <= 4
    sizes.clear()
    blocks(source(write_parquet(tmp_path, name="b.parquet"), form="parquet"))
    assert parquet_format.ROWS_MAX >= max(sizes) >= min(sizes) > 37, "a whole group"


def test_a_record_above_the_bound_is_bad_by_its_size_whatever_its_format(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "RECORD_BYTES_MAX", 10)
    path = write_parquet(tmp_path, ["short", "much too long", "short too"])
    (block,) = blocks(source(path, form="parquet", shuffle=False))
    assert block.records.bad == {1: "a record of 13 bytes; at most 10 are read"}
    assert values([block]) == [b"short", b"short too"]


def test_a_source_without_a_row_is_refused(tmp_path) -> None:
    write_parquet(tmp_path, [])
    with pytest.raises(StepfsError, match="source code: all its files are empty"):
        list_corpus(source(tmp_path, form="parquet"))


@pytest.mark.parametrize(
    ("library", "write", "form"), [("zstd", write_zstd, "jsonl"), ("parquet", write_parquet, "parquet")]
)
def test_a_missing_library_says_what_to_install(tmp_path, library, write, form, monkeypatch) -> None:
    for module in (compressed, parquet_format):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"pip install 'stepfs\[{library}\]'"):
        list_corpus(source(write(tmp_path), form=form))


@pytest.mark.parametrize("plain_footer", [True, False])
def test_an_encrypted_parquet_file_is_named(plain_footer: bool, tmp_path: Path) -> None:
    """Asking one with a plain footer for the sizes of its columns ends the process."""

    class Keys(encryption.KmsClient):
        def wrap_key(self, key: bytes, _name: str) -> bytes:
            return base64.b64encode(key)

        def unwrap_key(self, key: bytes, _name: str) -> bytes:
            return base64.b64decode(key)

    made = encryption.EncryptionConfiguration("footer", column_keys={"key": ["text"]}, plaintext_footer=plain_footer)
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), made)
    table = pa.table({"text": ["a"]})
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match="this Parquet file cannot be read: it is encrypted; write it anew"):
        list_corpus(source(tmp_path, form="parquet"))


@pytest.mark.parametrize("write", [write_gzip, write_zstd, write_parquet])
def test_the_readable_beginning_of_a_damaged_file_is_taken(
    write: Callable[[Path, Sequence[str]], Path], tmp_path: Path
) -> None:
    noise = random.Random(1)
    texts = [f"{number} {noise.randbytes(300).hex()}" for number in range(600)]
    path = write(tmp_path, texts)
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + b"\xff" * 9000 + data[half + 9000 :] if write is write_parquet else data[:half])
    form = "parquet" if write is write_parquet else "jsonl"
    spec = source(tmp_path, form=form, shuffle=False)
    with pytest.raises(CorruptError, match="damaged"):
        blocks(spec)
    found = blocks(changed(spec, skip_damaged=True))
    reasons = [reason for block in found for reason in block.records.bad.values()]
    assert reasons
    assert all(re.match(rf"the rest of .*{path.name}: damaged", reason) for reason in reasons)
    read = [one.decode() for block in found for one in values([block]) if one]
    assert read == [one for one in texts if one in set(read)]
    assert 200 < len(read) < 600


def test_a_damaged_footer_leaves_a_file_out(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(CorruptError, match=r"b\.parquet: damaged Parquet"):
        list_corpus(source(tmp_path, form="parquet"))
    listing = list_corpus(source(tmp_path, form="parquet", skip_damaged=True))
    assert [len(file.parts) for file in listing.files] == [9, 0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=3), min_size=1, max_size=20),
    st.sampled_from([4, 5, 8]),
    st.sampled_from([8, 16, 64]),
    st.booleans(),
)
def test_every_document_of_an_indexed_dataset_is_in_one_block(tmp_path_factory, documents, code, least, modes) -> None:
    flat = [[token for sequence in document for token in sequence] for document in documents]
    expected = [np.array(document, "<i4").tobytes() for document in flat if document]
    if not expected:
        return
    path = write_megatron(tmp_path_factory.mktemp("megatron"), documents, code, modes=modes)
    spec = source(path, form="megatron", shuffle=False, block_bytes=100)
    found = blocks(spec, laid_out(spec, range_bytes_min=least))
    assert values(found) == expected
    assert [one for block in found for one in block.records.offsets.tolist()] == [
        number for number, document in enumerate(flat) if document
    ]


def drop_index(path: Path) -> None:
    path.with_suffix(".idx").unlink()


def damage_index(path: Path) -> None:
    path.with_suffix(".idx").write_bytes(b"MMIDIDY\0\0" + bytes(40))


def float_index(path: Path) -> None:
    data = bytearray(path.with_suffix(".idx").read_bytes())
    data[17] = 6
    path.with_suffix(".idx").write_bytes(data)


def shift_pointers(path: Path) -> None:
    data = bytearray(path.with_suffix(".idx").read_bytes())
    data[34 + 4 * 3 + 8] += 2
    path.with_suffix(".idx").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (drop_index, AbsentError, "has no .idx file beside it"),
        (damage_index, CorruptError, "no Megatron index"),
        (float_index, UsageError, "data type 6"),
        (shift_pointers, CorruptError, "damaged Megatron index"),
        (lambda path: path.write_bytes(b"\0\0"), CorruptError, "damaged Megatron index"),
    ],
)
def test_a_wrong_index_is_refused_by_name(tmp_path, change: Callable[[Path], None], kind, said) -> None:
    path = write_megatron(tmp_path, [[[1, 2]], [[3]], [[4]]])
    assert len(values(blocks(source(str(path)[:-4], form="megatron")))) == 3  # named as Megatron does
    change(path)
    with pytest.raises(kind, match=said):
        blocks(source(tmp_path, form="megatron"))


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
    (block,) = blocks(source(tmp_path, form="text", records="lines", shuffle=False))
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
    assert np.frombuffer(block.records.data.values, "<i4").tolist() == [1, 2, 3, 4]
    assert block.records.mask.tolist() == [0, 1, 1, 1]
    assert sorted(block.records.bad) == [2, 3, 4, 5, 6, 7]


class Fasta:
    """The example of `stepfs_producer.sources.custom`, with an option."""

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
    assert np.frombuffer(block.records.data.values, "<i4").tolist() == [1, 2, 3]
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


def test_a_field_within_a_field_and_token_ids_of_json(tmp_path: Path) -> None:
    rows = [{"meta": {"text": "a", "ids": [1, 2]}, "mask": [0, 1], "a.b": "dotted"}, {"meta": {}}, {"meta": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = blocks(source(tmp_path, form="jsonl", shuffle=False, text_field="meta.text"))
    assert values([block])[0] == b"a"
    assert list(block.records.bad.values()) == ["no field 'meta.text'; it has 'meta'"] * 2
    assert values(blocks(source(tmp_path, form="jsonl", shuffle=False, text_field="a.b")))[0] == b"dotted"
    spec = source(tmp_path, form="jsonl", shuffle=False, tokens_field="meta.ids", mask_field="mask")
    (block,) = blocks(spec)
    assert block.records.kind is Kind.TOKENS
    assert np.frombuffer(values([block])[0], "<i4").tolist() == [1, 2]
    assert block.records.mask.tolist() == [0, 1]
    assert len(block.records.bad) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(b"a\n", mtime=0), "is gzip; let its name end in .gz"),
        (zstandard.compress(b"a\n"), "is zstd; let its name end in .zst"),
        (bz2.compress(b"a\n"), "is bzip2; decompress it by `bunzip2`, or compress it anew by `gzip`"),
        (lzma.compress(b"a\n"), "is xz; decompress it by `unxz`, or compress it anew by `gzip`"),
        (b"%PDF-1.7\n", "is a PDF; take its text out by a program such as `pdftotext`, or leave it out"),
        (b"PK\3\4 ", "is a zip archive; unpack it by `unzip`"),
        (b"PAR1 ", "is Parquet; give its source format: parquet"),
    ],
)
def test_a_file_of_another_kind_is_named_for_what_it_is(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=re.escape(f"{name} {said}")):
        list_corpus(source(tmp_path, form="text" if name == "a.txt" else "jsonl"))


def test_a_null_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    (block,) = blocks(source(tmp_path, form="jsonl"))
    assert list(block.records.bad.values()) == ["null in the field 'text'"]
    write_parquet(tmp_path, [None, "a"])
    (block,) = blocks(source(tmp_path / "a.parquet", form="parquet", shuffle=False))
    assert list(block.records.bad.values()) == ["null in the field 'text'"]


def test_a_field_within_a_column_of_parquet(tmp_path: Path) -> None:
    rows = [{"text": "é", "ids": [1, 2], "more": {"mask": [0, 1]}}, None, {"text": None, "ids": [3]}]
    parquet.write_table(pa.table({"meta": rows, "a.b": ["x", "y", "z"]}), tmp_path / "a.parquet")

    def read(**fields: object) -> tuple[list[bytes], list[str]]:
        (block,) = blocks(source(tmp_path, form="parquet", shuffle=False, **fields))
        return values([block]), list(block.records.bad.values())

    found, bad = read(text_field="meta.text")
    assert (found[0], bad) == ("é".encode(), ["null in the field 'meta.text'"] * 2)
    assert read(text_field="a.b")[0] == [b"x", b"y", b"z"]
    found, bad = read(tokens_field="meta.ids", mask_field="meta.more.mask")
    assert np.frombuffer(found[0], "<i4").tolist() == [1, 2]
    assert len(bad) == 2
    for name in ("meta.txt", "meta.text.more", "mata.text"):
        with pytest.raises(UsageError, match=f"has no column '{name}'; set text_field to one of meta, a.b"):
            list_corpus(source(tmp_path, form="parquet", text_field=name))
