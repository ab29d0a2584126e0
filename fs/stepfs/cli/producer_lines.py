"""The producers of a lake and the sources of their plans, as `stepfs status` shows them to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepfs.cli.columns import printable, state_text, table, time_text

_PRODUCERS = ["PRODUCER", "EPOCH", "STEPS", "STATE", "LAST ENTRY"]
_SOURCES = ["PRODUCER", "SOURCE", "TOKENS", "SHARE", "RECORDS", "SKIPPED", "EPOCH"]


def producer_lines(producers: object, now_ms: int) -> Iterator[str]:
    """Below an empty line a table of `producers`, a part of a status document, then that of `plan_lines`."""
    rows = []
    for name, known in sorted(_mapping(producers).items()):
        each = _mapping(known)
        time_s = each.get("time")
        time_ms = round(time_s * 1000) if isinstance(time_s, int | float) else 0
        state = state_text(time_ms, now_ms, retired=bool(each.get("retired")))
        rows.append([printable(name), str(each.get("epoch")), str(each.get("next_seq")), state, time_text(time_ms)])
    if rows:
        yield ""
        yield from table(_PRODUCERS, rows)
        yield from plan_lines(producers)


def plan_lines(producers: object) -> Iterator[str]:
    """A table below those of `producers`, a part of a status document; nothing if none of them runs a plan.

    Sources with the most tokens come first.
    """
    rows = [
        (str(producer), str(name), source)
        for producer, known in sorted(_mapping(producers).items())
        for name, source in _by_tokens(_mapping(_mapping(_mapping(known).get("plan")).get("sources")))
    ]
    if not rows:
        return
    yield ""
    yield from table(_SOURCES, [_row(*row) for row in rows])


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

    return [(name, _mapping(sources[name])) for name in sorted(sources, key=lambda name: (-tokens(name), name))]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
