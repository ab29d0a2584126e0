"""The same records in any format give the same texts and tokens; damaged files are named, and are no bad records."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import webdataset
import zstandard
from pyarrow import parquet
from pyarrow.parquet import encryption
from sourced import blocks, laid_out, source, values

from stepfs.errors import CorruptError, StepfsError, UsageError
from stepfs_producer.sources import formats, reading
from stepfs_producer.sources import parquet as parquet_format
from stepfs_producer.sources.listing import list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import Kind, unpacked

TEXTS = [f"{number} " + "grüße 日本 " * (number % 7) for number in range(300)]
BYTES = [text.encode() for text in TEXTS]


def json_lines(texts: Sequence[str] = TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": len(text)}) + "\n" for text in texts).encode()


def write_gzip(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    data, path = json_lines(texts), path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))  # members, as bgzip and cat make them
    return path


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
    honest = formats.decompressed
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
    assert block.records.bad == {
        1: "not UTF-8 (invalid start byte at byte 0)",
        2: "no text in the field 'text'",
    }
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
    assert np.frombuffer(block.records.data, "<i4").tolist() == [1, 2, 3]
    assert block.records.mask == bytes([1, 0, 0])
    assert list(block.records.bad) == [2, 3]
    assert block.records.ends.tolist() == [8, 12, 12, 12, 12]


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
    for module in (formats, parquet_format):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"pip install 'stepfs\[{library}\]'"):
        list_corpus(source(write(tmp_path), form=form))


def test_parquet_of_other_programs(tmp_path: Path) -> None:
    """Views, JSON, and times that Python has no value for: the same with and without pandas."""
    day = pa.array([1_700_000_000_000_000_001], pa.timestamp("ns", "UTC"))
    table = pa.table({
        "view": pa.array(["a"], pa.string_view()), "lists": pa.array([[1, 2]], pa.list_view(pa.int32())),
        "json": pa.array(['{"a": 1}'], pa.json_()), "day": day, "even": pa.array([1_000], pa.timestamp("ns")),
        "far": pa.array([3_000_000], pa.date32()), "held": pa.array([5], pa.duration("ns")),
        "deep": pa.array([[{"at": 1}]], pa.list_(pa.struct([("at", pa.timestamp("ns"))]))),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "a.parquet")
    (block,) = blocks(source(tmp_path, form="parquet", whole_records=True, shuffle=False))
    (row,) = map(unpacked, values([block]))
    assert row == {
        "view": "a", "lists": [1, 2], "json": '{"a": 1}', "day": "2023-11-14 22:13:20.000000001Z",
        "even": "1970-01-01 00:00:00.000001", "far": "10183-09-21", "held": "5",
        "deep": [{"at": "1970-01-01 00:00:00.000000001"}], "map": [["k", 1]],
    }  # fmt: skip
    assert values(blocks(source(tmp_path, form="parquet", text_field="view"))) == [b"a"]
    assert blocks(source(tmp_path, form="parquet", tokens_field="lists"))[0].records.kind is Kind.TOKENS
    (block,) = blocks(source(tmp_path, form="parquet", whole_records=True, columns=("view",)))
    assert unpacked(values([block])[0]) == {"view": "a"}
    with pytest.raises(UsageError, match="has no column 'none'; it has view, lists"):
        list_corpus(source(tmp_path, form="parquet", whole_records=True, columns=("none",)))


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
    found = blocks(replace(spec, skip_damaged=True))
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


OBJECTS = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]


def write_csv(path: Path) -> None:
    with (path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file)
        rows.writerows([["n", "text"], *([number, text] for number, text in enumerate(TEXTS))])


def write_tsv(path: Path) -> None:
    lines = ["n\ttext", *(f"{number}\t{text}" for number, text in enumerate(TEXTS))]
    (path / "a.tsv").write_text("\n".join(lines))


def write_json(path: Path) -> None:
    (path / "a.json").write_text(json.dumps(OBJECTS, indent=1, ensure_ascii=False))


def write_objects(path: Path) -> None:
    (path / "a.json").write_text(" ".join(map(json.dumps, OBJECTS)))


def write_ipc(path: Path) -> None:
    table = pa.Table.from_pylist(OBJECTS)
    with pa.ipc.new_file(path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=37)


def write_stream(path: Path) -> None:
    table = pa.Table.from_pylist(OBJECTS)
    with pa.ipc.new_stream(path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=37)


def write_tar(path: Path) -> None:
    with webdataset.ShardWriter(f"{path}/%04d.tar", maxcount=100, verbose=0) as shards:
        for number, text in enumerate(TEXTS):
            shards.write({"__key__": f"{number:06d}", "text": text.encode(), "n.cls": str(number).encode()})


@pytest.mark.parametrize(
    ("form", "write"),
    [
        ("csv", write_csv), ("csv", write_tsv), ("json", write_json), ("json", write_objects), ("arrow", write_ipc),
        ("arrow", write_stream), ("webdataset", write_tar),
    ],
)  # fmt: skip
def test_tables_of_other_programs_give_the_same_texts(form: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    spec = source(tmp_path, form=form, shuffle=False)
    assert values(blocks(spec)) == BYTES
    whole = [unpacked(one) for one in values(blocks(replace(spec, whole_records=True)))]
    assert [row["text"] for row in whole] == TEXTS
    assert [int(row["n.cls" if form == "webdataset" else "n"]) for row in whole] == list(range(300))


@pytest.mark.parametrize(
    ("form", "name", "data", "why"),
    [
        ("csv", "a.csv", b"text,n\na,1\nb\nc,3\n", "1 values, and the first line names 2"),
        ("csv", "a.csv", b"text,n\n\xff,1\n", "not Unicode"),
        ("json", "a.json", b'[{"text": "a"}, 5]', "not a JSON object"),
        ("json", "a.json", b'[{"n": 1}]', "no field 'text'; it has 'n'"),
    ],
)
def test_a_row_that_does_not_fit_is_a_bad_record(form: str, name: str, data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    (block,) = blocks(source(tmp_path, form=form, shuffle=False))
    (reason,) = block.records.bad.values()
    assert reason.startswith(why)


@pytest.mark.parametrize(
    ("form", "name", "data", "why"),
    [
        ("json", "a.json", b'[{"text": "a"}, {"text"', "damaged JSON"), ("csv", "a.csv", b'text\n"a', "damaged CSV"),
        ("arrow", "a.arrow", b"ARROW1\0\0" + bytes(100), "damaged Arrow"), ("webdataset", "a.tar", b"x" * 2000, "damaged tar"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_named(form: str, name: str, data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptError, match=f"{name}: {why}"):
        blocks(source(tmp_path, form=form, shuffle=False))
