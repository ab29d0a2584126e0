"""Sources whose files other programs write as tables: Arrow, CSV, JSON, Parquet, WebDataset; compressed ones, too."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import webdataset
import zstandard
from declared import changed
from pyarrow import parquet
from sourced import blocks, source, values
from written import TEXTS

from stepfs.errors import AbsentError, CorruptError, UsageError
from stepfs_producer.plan.sources import Chat
from stepfs_producer.sources import tables
from stepfs_producer.sources.listing import list_corpus
from stepfs_producer.sources.record import Kind, packed, unpacked

BYTES = [text.encode() for text in TEXTS]
OTHERS = Path(__file__).parent / "others"  # six rows each, of pandas 3.1, polars 2.1, DuckDB 2.0 and datasets 5.2
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def tar_of(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


TWO = tar_of(("0.txt", b"a"), ("1.txt", b"b"))


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


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize(
    ("form", "write"),
    [
        ("csv", write_csv), ("csv", write_tsv), ("json", write_json), ("json", write_objects), ("arrow", write_ipc),
        ("arrow", write_stream), ("webdataset", write_tar),
    ],
)  # fmt: skip
def test_tables_of_other_programs_give_the_same_texts(
    form: str, write: Callable[[Path], None], ending: str, tmp_path: Path
) -> None:
    write(tmp_path)
    for path in list(tmp_path.iterdir()) if ending else ():
        path.with_name(path.name + ending).write_bytes(PACKED[ending](path.read_bytes()))
        path.unlink()
    if ending and form == "arrow":
        (path,) = tmp_path.iterdir()
        with pytest.raises(UsageError, match=f"{path}: an Arrow file is read as it was written; decompress it"):
            list_corpus(source(path, form=form))
        return
    spec = source(tmp_path, form=form, shuffle=False)
    assert values(blocks(spec)) == BYTES
    whole = [unpacked(one) for one in values(blocks(changed(spec, whole_records=True)))]
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
        ("arrow", "a.arrow", b"ARROW1\0\0" + bytes(100), "damaged Arrow"),
        ("arrow", "datasets.arrow", (OTHERS / "datasets.arrow").read_bytes()[:-300], "damaged Arrow"),
        ("arrow", "polars.arrow", (OTHERS / "polars.arrow").read_bytes()[:-300], "damaged Arrow"), ("webdataset", "a.tar", b"x" * 2000, "damaged tar"),
        ("webdataset", "a.tar", TWO[:1024], r"damaged tar \(it ends without the blocks that end a tar\)"),
        ("webdataset", "a.tar", TWO[:1100], r"damaged tar \(no member where one should begin: truncated header\)"),
        ("webdataset", "a.tar", TWO[:1024] + b"\xff" * 40 + TWO[1064:], r"damaged tar \(no member where one should begin: bad checksum\)"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_named(form: str, name: str, data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptError, match=f"{name}: {why}"):
        blocks(source(tmp_path, form=form, shuffle=False))


JSON = {
    "arrays end to end": (b'[{"text": "a"}]\n[{"text": "b"}]', ["a", "b"]),
    "objects behind an array": (b'[{"text": "a"}] {"text": "b"}\n{"text": "c"}', ["a", "b", "c"]),
    "an empty array first": (b'[]\n[{"text": "a"}]', ["a"]),
    "something behind it": (b'[{"text": "a"}] oops', "Expecting value"),
    "a bracket too many": (b'[{"text": "a"}]]', "Expecting value"),
    "cut behind a comma": (b'[{"text": "a"},\n', "it ends within an array"),
    "cut behind an object": (b'[{"text": "a"}', "it ends within an array"),
    "a number at the end of a piece": (b'[{"text": "a"}, 1.5e-07, {"text": "b"}]', ["a", "b"]),
}
CSV = {
    "a quote within a field": (b'id,text\n1,5" pipe\n2,two\n', ['5" pipe', "two"]),
    "text behind a closing quote": (b'id,text\n1,"one" more\n2,two\n', ["one more", "two"]),
    "a quote that is open to the end": (b'id,text\n1,"one\n2,two\n3,three\n', "a quote is open up to its end"),
    "the same in the first line": (b'id,"text\n1,one\n2,two\n', "a quote is open up to its end"),
    "a line end in the header": (b'id,"te\nxt",text\n1,x,one\n', ["one"]),
    "no line end at the end": (b"id,text\n1,one\n2,two", ["one", "two"]),
    "columns without a name": (b"id,text,,\n1,one,,\n", ["one"]),
    "tabs": (b"id\ttext\n1\tone, two\n", ["one, two"]),
}


@pytest.mark.parametrize(
    ("form", "data", "found"),
    [pytest.param("json", *one, id=name) for name, one in JSON.items()]
    + [pytest.param("csv", *one, id=name) for name, one in CSV.items()],
)
def test_what_a_file_holds_up_to_its_end(form: str, data: bytes, found: list[str] | str, tmp_path: Path, monkeypatch):
    """A list of texts, or why the file is damaged."""
    monkeypatch.setattr(tables, "_PIECE", 21)
    (tmp_path / f"a.{form}").write_bytes(data)
    spec = source(tmp_path, form=form, shuffle=False)
    if isinstance(found, list):
        assert values(blocks(spec)) == [one.encode() for one in found]
        return
    with pytest.raises(CorruptError, match=f"a.{form}: damaged {form.upper()} .*{found}.*; replace it or leave it out"):
        blocks(spec)
    kept = blocks(changed(spec, skip_damaged=True))
    assert [why for block in kept for why in block.records.bad.values()][-1].startswith("the rest of ")


def test_the_delimiter_of_a_csv_is_the_plans(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('id;text\n1;"a;b, c"\n2;é\n'.encode())
    assert values(blocks(source(tmp_path, form="csv", delimiter=";", shuffle=False))) == [b"a;b, c", "é".encode()]


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,n,text\na,1,b\n")
    with pytest.raises(UsageError, match=r"a\.csv: two columns are called 'text'; rename one"):
        blocks(source(tmp_path, form="csv"))
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "n"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for form in ("parquet", "arrow"):
        with pytest.raises(UsageError, match=rf"a\.{form} has two columns 'text'; rename one"):
            list_corpus(source(tmp_path, form=form))
        assert values(blocks(source(tmp_path, form=form, text_field="n"))) == [b"c"], (
            "of others it is nobody's business"
        )


def test_members_of_a_sample_are_named_as_webdataset_names_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "RECORD_BYTES_MAX", 100)
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(
        ("0.TXT", b"zero"), ("__meta__/0.txt", b"no"), ("d/1.Txt", b"one"), ("d/1.N.CLS", b"1"),
        ("2.txt", b"x"), ("2.TXT", b"y"), ("2.json", b"{}"), ("3.txt", b"x" * 60), ("3.bin", b"x" * 60), ("4.txt", b"four"),
    ))  # fmt: skip
    (block,) = blocks(source(path, form="webdataset", text_field="txt", shuffle=False))
    assert values([block]) == [b"zero", b"one", b"four"]
    assert block.records.bad == {
        2: "two members are the field 'txt', the second 2.TXT",
        3: "members of 120 bytes or more; at most 100 of a sample are read",
    }
    (block,) = blocks(source(path, form="webdataset", whole_records=True, shuffle=False))
    assert [unpacked(one) for one in values([block])] == [{"txt": "zero"}, {"txt": "one", "n.cls": 1}, {"txt": "four"}]


def saved(path: Path, *names: str, beside: tuple[str, ...] = ()) -> Path:
    """A directory as `save_to_disk` leaves it, and what `map` and `filter` put there later."""
    path.mkdir(parents=True)
    for number, name in enumerate((*names, *beside)):
        table = pa.table({"indices": [0]} if number >= len(names) else {"text": [name]})
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def test_of_a_saved_data_set_the_files_of_its_data_are_read(tmp_path: Path) -> None:
    cache = "cache-0123456789abcdef.arrow"
    data = saved(
        tmp_path / "data", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow", beside=(cache, "more.arrow")
    )
    expected = [b"data-00000-of-00002.arrow", b"data-00001-of-00002.arrow"]
    for entry in (data, f"{data}/*", tmp_path):
        assert values(blocks(source(entry, form="arrow", shuffle=False))) == expected
    assert blocks(source(data / cache, form="arrow", whole_records=True)), "named, it is read"
    assert values(blocks(source(f"{data}/data-*.arrow", form="arrow", shuffle=False))) == expected
    (data / "state.json").unlink()
    (data / "more.arrow").unlink()
    assert values(blocks(source(f"{data}/*.arrow", form="arrow", shuffle=False))) == expected, "and no cache"
    saved(tmp_path / "other", "gone.arrow")
    (tmp_path / "other/gone.arrow").unlink()
    with pytest.raises(AbsentError, match=r"state\.json names .*/other/gone\.arrow, which is not there; save it anew"):
        list_corpus(source(tmp_path / "other", form="arrow"))


def test_the_splits_of_a_saved_data_set_are_apart(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / split, f"{split}.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError) as refused:
        list_corpus(source(tmp_path, form="arrow"))
    advice = f"{tmp_path}/train/"
    assert f"has the splits train, test; name the directory of one: {advice}" in str(refused.value)
    assert values(blocks(source(advice, form="arrow"))) == [b"train.arrow"]
    shutil.rmtree(tmp_path / "test")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert values(blocks(source(tmp_path, form="arrow"))) == [b"train.arrow"]


NS = pa.timestamp("ns")
ODD, EVEN = 1_700_000_000_000_000_001, 1_700_000_000_000_001_000
TIMES = {
    "large_list": (pa.large_list(NS), [ODD, EVEN], ["2023-11-14 22:13:20.000000001", "2023-11-14 22:13:20.000001000"]),
    "fixed list": (pa.list_(NS, 1), [EVEN], ["2023-11-14 22:13:20.000001"]),
    "list view": (pa.list_view(NS), [EVEN], ["2023-11-14 22:13:20.000001"]),
    "map": (pa.map_(pa.string(), NS), [("k", EVEN)], [["k", "2023-11-14 22:13:20.000001"]]),
    "of a list of structs": (pa.large_list(pa.struct([("at", NS)])), [{"at": ODD}, None],
                             [{"at": "2023-11-14 22:13:20.000000001"}, None]),
    "duration": (pa.large_list(pa.duration("ns")), [1_000], ["0:00:00.000001"]),
    "time": (pa.large_list(pa.time64("ns")), [1], ["00:00:00.000000001"]),
    "a zone of Windows": (pa.timestamp("us", "W. Europe Standard Time"), EVEN // 1_000, "2023-11-14 22:13:20.000001+00:00"),
    "the same, finer": (pa.timestamp("ns", "Mars/Olympus"), ODD, "2023-11-14 22:13:20.000000001Z"),
    "beyond 9999": (pa.large_list(pa.timestamp("ms")), [316_516_204_800_000], ["12000-01-01 00:00:00.000"]),
    "before year 1": (pa.list_(pa.timestamp("us")), [-(10**17)], ["-1199-02-15 14:13:20.000000"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMES)
def test_times_of_any_depth_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    kind, value, expected = TIMES[name]
    column = pa.array([value, None, value], kind)
    for one in (column, column.dictionary_encode() if pa.types.is_timestamp(kind) else column):
        table = pa.table({"text": ["a", "b", "c"], "x": one})
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
        found = [
            unpacked(each) for each in values(blocks(source(tmp_path, form="arrow", shuffle=False, whole_records=True)))
        ]
        assert [row["x"] for row in found] == [expected, None, expected]
        assert values(blocks(source(tmp_path, form="arrow", shuffle=False))) == [b"a", b"b", b"c"]
        if pa.types.is_list_view(kind):
            continue  # Parquet has none
        parquet.write_table(table, tmp_path / "a.parquet")
        again = blocks(source(tmp_path, form="parquet", shuffle=False, whole_records=True))
        assert [unpacked(each) for each in values(again)] == found


def test_the_readable_beginning_of_a_compressed_table_is_taken(tmp_path: Path) -> None:
    noise = random.Random(1)
    rows = [{"text": f"{number} {noise.randbytes(40).hex()}"} for number in range(3000)]
    data = gzip.compress(json.dumps(rows).encode())
    (tmp_path / "a.json.gz").write_bytes(data[: len(data) // 2])
    spec = changed(source(tmp_path, form="json", shuffle=False), skip_damaged=True)
    found = [one.decode() for one in values(blocks(spec))]
    assert found == [row["text"] for row in rows[: len(found)]]
    assert 1000 < len(found) < 1600


JSON_TYPE = pa.json_(pa.string())
CALL = pa.struct([("name", pa.string()), ("arguments", pa.struct([("a", pa.int64()), ("b", pa.int64())]))])
NESTED = {
    "List(Json())": (pa.list_(JSON_TYPE), ['{"a": null}', None, "[1]"], [{"a": None}, None, [1]]),
    "Json() in a struct": (pa.list_(pa.struct([("arguments", JSON_TYPE), ("role", pa.string())])),
                           [{"arguments": '{"n": 1}', "role": None}], [{"arguments": {"n": 1}}]),
    "padded": (pa.list_(CALL), [{"name": "f", "arguments": {"a": 1, "b": None}}], [{"name": "f", "arguments": {"a": 1}}]),
    "a list of nulls": (pa.list_(pa.int64()), [None], [None]),
}  # fmt: skip


def stored(kind: pa.DataType) -> pa.DataType:
    """The same type without JSON, which Arrow makes of texts alone."""
    if pa.types.is_list(kind):
        return pa.list_(stored(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, stored(field.type)) for field in kind])
    return pa.string() if kind == JSON_TYPE else kind


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_json_columns_are_objects_and_chats_have_no_padding(name: str, form: str, tmp_path: Path) -> None:
    kind, value, expected = NESTED[name]
    table = pa.table(
        {
            "messages": pa.array([value], stored(kind)).cast(kind),
            "other": pa.array([None], pa.struct([("a", pa.int64())])),
        }
    )
    if form == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    (block,) = blocks(source(tmp_path, form=form, shuffle=False, chat=Chat()))
    assert unpacked(values([block])[0]) == {"messages": expected}
    (block,) = blocks(source(tmp_path, form=form, shuffle=False, whole_records=True))
    whole = unpacked(values([block])[0])
    assert whole["other"] is None
    assert (whole["messages"] == expected) == (name in {"List(Json())", "a list of nulls"}), "transforms get all keys"


def test_a_json_column_that_holds_none_is_a_bad_record(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": pa.array(["{", "1"], JSON_TYPE)}), tmp_path / "a.parquet")
    (block,) = blocks(source(tmp_path, form="parquet", shuffle=False, whole_records=True))
    assert list(block.records.bad) == [0]
    assert block.records.bad[0].startswith("not JSON (")
    assert values(blocks(source(tmp_path, form="parquet", shuffle=False, text_field="x"))) == [b"{", b"1"]


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
        "view": "a", "lists": [1, 2], "json": {"a": 1}, "day": "2023-11-14 22:13:20.000000001Z",
        "even": "1970-01-01 00:00:00.000001", "far": "10183-09-21", "held": "5",
        "deep": [{"at": "1970-01-01 00:00:00.000000001"}], "map": [["k", 1]],
    }  # fmt: skip
    assert values(blocks(source(tmp_path, form="parquet", text_field="view"))) == [b"a"]
    assert blocks(source(tmp_path, form="parquet", tokens_field="lists"))[0].records.kind is Kind.TOKENS
    (block,) = blocks(source(tmp_path, form="parquet", whole_records=True, columns=("view",)))
    assert unpacked(values([block])[0]) == {"view": "a"}
    with pytest.raises(UsageError, match="has no column 'none'; it has view, lists"):
        list_corpus(source(tmp_path, form="parquet", whole_records=True, columns=("none",)))


@pytest.mark.parametrize("path", sorted(OTHERS.iterdir()), ids=lambda path: path.name)
def test_files_of_other_programs_have_the_rows_that_pyarrow_reads(path: Path) -> None:
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
    else:
        begin = path.read_bytes()[:6]
        table = (pa.ipc.open_file if begin == b"ARROW1" else pa.ipc.open_stream)(path).read_all()
    form = path.suffix[1:]
    found = blocks(source(path, form=form, shuffle=False, whole_records=True))
    of_json = [field.name for field in table.schema if getattr(field.type, "extension_name", "") == "arrow.json"]
    rows = [row | {name: json.loads(row[name]) for name in of_json} for row in table.to_pylist()]
    assert [unpacked(one) for one in values(found)] == [unpacked(packed(row)) for row in rows]
    texts = [one.decode() for one in values(blocks(source(path, form=form, shuffle=False)))]
    assert texts == table.column("text").to_pylist() == [f"é row {number}" for number in range(6)]
