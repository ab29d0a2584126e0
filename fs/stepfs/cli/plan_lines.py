"""The sources of planned producers, as `stepfs status` shows them to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepfs.cli.columns import printable, table

_HEADER = ["PRODUCER", "SOURCE", "TOKENS", "SHARE", "RECORDS", "SKIPPED", "EPOCH"]


def plan_lines(producers: object, *, rows_max: int | None = None) -> Iterator[str]:
    """A table below those of `producers`, a part of a status document; nothing if none of them runs a plan.

    Sources with the most tokens come first; `rows_max` is how many a screen has room for.
    """
    rows = [
        (str(producer), str(name), source)
        for producer, known in sorted(_mapping(producers).items())
        for name, source in _by_tokens(_mapping(_mapping(_mapping(known).get("plan")).get("sources")))
    ]
    if not rows:
        return
    yield ""
    shown = rows if rows_max is None else rows[:rows_max]
    yield from table(_HEADER, [_row(*row) for row in shown])
    if len(shown) < len(rows):
        yield f"… and {len(rows) - len(shown)} more sources; --json names all"


def _row(producer: str, name: str, source: Mapping[str, object]) -> list[str]:
    share = source.get("share")
    return [
        printable(producer),
        printable(name),
        str(source.get("tokens")),
        f"{share:.2%}" if isinstance(share, int | float) else "-",
        str(source.get("records")),
        str(source.get("skipped")),
        str(source.get("epoch")),
    ]


def _by_tokens(sources: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    def tokens(name: str) -> int:
        count = _mapping(sources[name]).get("tokens")
        return count if isinstance(count, int) else 0

    return [
        (name, _mapping(sources[name])) for name in sorted(sources, key=lambda name: (-tokens(name), name))
    ]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
