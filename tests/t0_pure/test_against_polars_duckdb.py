"""Tables that polars and DuckDB write, against our reading of them: their answers are kept, and asked for again at night."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nightly
import pytest
from their_answers import REFUSED, Case, asked, compare, kept, program

KEPT = Path(__file__).parent / "answers/polars_duckdb.zip"
DAY = dt.datetime(2023, 11, 14, 22, 13, 20, 1)  # noqa: DTZ001 - as columns without a zone hold it


def columns(pl: Any) -> dict[str, Any]:
    """Of every type that polars has."""
    at = pl.Series([DAY, None, DAY])
    return {
        "text": ["a", "é", "c"], "ns": at.cast(pl.Datetime("ns")), "zone": at.dt.replace_time_zone("Europe/Oslo"), "day": at.dt.date(),
        "long": at.cast(pl.Datetime("ms")), "list": [[1, 2], None, []], "times": pl.Series([[DAY], None, []]).cast(pl.List(pl.Datetime("ns"))),
        "struct": [{"a": 1, "at": DAY}, None, {"a": None, "at": None}], "category": pl.Series(["x", "y", "x"], dtype=pl.Categorical),
        "enum": pl.Series(["x", None, "x"], dtype=pl.Enum(["x", "y"])), "decimal": [decimal.Decimal("1.25")] * 3, "bytes": [b"\xff", b"", None],
        "array": pl.Series([[1, 2], [3, 4], None], dtype=pl.Array(pl.Int32, 2)), "gap": pl.Series([dt.timedelta(1, 2)] * 3).cast(pl.Duration("ns")),
        "time": [dt.time(1, 2, 3, 4)] * 3, "wide": pl.Series([2**64 - 1] * 3, dtype=pl.UInt64), "flag": [True, None, False], "real": [0.5, None, 1.5],
    }  # fmt: skip


def polars(write: str, name: str, **how: Any) -> Callable[[Path], Any]:
    """Written by polars; the answer are the rows that it wrote."""

    def ask(directory: Path) -> Any:
        pl = program("polars")

        frame = pl.DataFrame(columns(pl))
        getattr(frame, write)(directory / name, **{key: one(pl) if callable(one) else one for key, one in how.items()})
        return frame.to_dicts()

    return ask


def read_csv(data: bytes, name: str = "a.csv", **how: Any) -> Callable[[Path], Any]:
    """What DuckDB reads of a CSV whose first line names its columns, in the column `text`."""

    def ask(directory: Path) -> Any:
        duckdb = program("duckdb")

        (directory / name).write_bytes(data)
        more = "".join(f", {key} = '{value}'" for key, value in how.items())
        try:
            rows = duckdb.sql(
                f"select text from read_csv('{directory / name}', header = true, all_varchar = true, null_padding = false{more})"
            )
            return ["" if one is None else one for (one,) in rows.fetchall()]
        except duckdb.Error:
            return REFUSED

    return ask


QUERY = """
    select 'document ' || i || ' é' as text, i::hugeint as huge, uuid_text as uuid, [i, i + 1] as list, {'a': i, 'b': [i]} as struct,
    map {'k': i} as map, 1.5::decimal(18, 3) as decimal, timestamptz '2024-01-01 10:00:00+02' as zone,
    timestamp '2023-11-14 22:13:20.000001' as at, date '2024-02-29' as day, 'x'::blob as bytes, time '01:02:03' as clock, null as nothing
    from range(5) r(i), (values ('6a1f5a2e-0000-4000-8000-000000000001')) u(uuid_text)
"""  # fmt: skip


def copied(name: str, how: str) -> Callable[[Path], Any]:
    """Copied to a file by DuckDB; the answer are the rows of the query."""

    def ask(directory: Path) -> Any:
        duckdb = program("duckdb")

        duckdb.sql("set timezone = 'UTC'")
        rows = duckdb.sql(QUERY)
        duckdb.sql(f"copy ({QUERY}) to '{directory / name}' ({how})")
        if name.endswith("parquet"):
            found = [dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()]
            return [row | {"map": list(row["map"].items()), "huge": float(row["huge"])} for row in found]
        return [row[0] for row in rows.fetchall()]

    return ask


PARQUET, TEXT = {"format": "parquet"}, {"text_field": "text"}
CASES = {
    **{f"polars, parquet, {one}": Case(polars("write_parquet", "a.parquet", compression=one), PARQUET) for one in ("zstd", "lz4", "uncompressed")},
    "polars, parquet in groups": Case(polars("write_parquet", "a.parquet", row_group_size=2, use_pyarrow=False), PARQUET),
    "polars, ipc": Case(polars("write_ipc", "a.arrow", compression="zstd"), {"format": "arrow"}),
    "polars, ipc, old": Case(polars("write_ipc", "a.arrow", compat_level=lambda pl: pl.CompatLevel.oldest()), {"format": "arrow"}),
    "polars, stream": Case(polars("write_ipc_stream", "a.arrow"), {"format": "arrow"}),
    "duckdb, parquet": Case(copied("a.parquet", "format parquet"), PARQUET),
    "duckdb, parquet v2": Case(copied("a.parquet", "format parquet, compression zstd, parquet_version v2"), PARQUET),
    "duckdb, csv": Case(copied("a.csv", "format csv, header"), {"format": "csv", **TEXT}),
    "duckdb, csv, semicolons": Case(copied("a.csv", "format csv, header, delimiter ';'"), {"format": "csv", "delimiter": ";", **TEXT}),
    "duckdb, csv.gz": Case(copied("a.csv.gz", "format csv, header, compression gzip"), {"format": "csv", **TEXT}),
    "duckdb, tsv": Case(copied("a.tsv", "format csv, header, delimiter '\t'"), {"format": "csv", **TEXT}),
    "duckdb, lines of json": Case(copied("a.jsonl", "format json"), {"format": "jsonl", **TEXT}),
    "duckdb, an array of json": Case(copied("a.json", "format json, array true"), {"format": "json", **TEXT}),
    "duckdb, json.zst": Case(copied("a.json.zst", "format json, array true, compression zstd"), {"format": "json", **TEXT}),
    "csv, a line end in quotes": Case(read_csv(b'id,text\n1,"two\nlines"\n2,x\n'), {"format": "csv", **TEXT}),
    "csv, CRLF": Case(read_csv(b"id,text\r\n1,one\r\n2,two\r\n"), {"format": "csv", **TEXT}),
    "csv, all quoted": Case(read_csv(b'"id","text"\n"1","a ""b"", c"\n'), {"format": "csv", **TEXT}),
    "csv, a quote within a field": Case(read_csv(b'id,text\n1,5" pipe\n2,two\n', strict_mode="false"), {"format": "csv", **TEXT}),
    "csv, a BOM": Case(read_csv(b"\xef\xbb\xbfid,text\n1,one\n"), {"format": "csv", **TEXT}),
    "csv, a quote that stays open": Case(read_csv(b'id,text\n1,"one\n2,two\n', quote='"', delim=","), {"format": "csv", **TEXT}),
    "csv, blank lines": Case(read_csv(b"id,text\n\n1,one\n\n2,two\n\n", delim=","), {"format": "csv", **TEXT}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_records_are_those_of_the_program(name: str, tmp_path: Path) -> None:
    compare(CASES[name], kept(KEPT, name, tmp_path), tmp_path / name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_the_program_answers_as_it_did(name: str, tmp_path: Path) -> None:
    nightly.needs("polars")
    nightly.needs("duckdb")
    answer = asked(CASES[name], tmp_path / name)
    assert answer == kept(KEPT, name, tmp_path / "kept")
    compare(CASES[name], answer, tmp_path / name)
