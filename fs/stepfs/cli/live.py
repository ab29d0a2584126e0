"""`stepfs status DIR`: one mount on one screen; with --watch rates since the last look.

A pure function of two status documents, so it is tested without a mount. If a document lacks a field,
the screen shows a dash in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepfs.cli.columns import age_text, printable, size_text
from stepfs.command_hint import command

Document = Mapping[str, object]


def live_lines(now: Document, before: Document | None, *, since_start: bool = False) -> Iterator[str]:
    """The screen for a status document; rates need the previous document, or are those `since_start`."""
    rate = _Rates(now, {"pid": now.get("pid")} if since_start else before)
    basis = "; rates since its start" if since_start else ""
    group = f", group {printable(str(now['group']))}" if now.get("group") else ""
    yield f"{printable(str(now.get('lake')))}{group}  (pid {now.get('pid')}, up {age_text(_number(now, 'uptime_s'))}{basis})"
    yield ""
    yield f"steps    {_steps(now)}"
    yield (
        f"readers  waited {rate.share('waited_s')} of the time, {_count(now, 'waiting')} waiting for a commit,"
        f" {_count(now, 'open_files')} open files"
    )
    yield f"reading  {rate.size('bytes_read')} through the daemon, {rate.size('data', 'primed')} primed, {_hits(rate)}"
    yield f"fetched  {rate.size('data', 'bytes_fetched')} in {rate.count('data', 'requests')} GETs{_trouble(now)}"
    yield f"cache    {_cache(now, 'memory')} in memory, {_cache(now, 'disk')} on disk"
    yield f"store    {_store(now)}, {rate.count('store', 'requests')} requests"
    yield f"producers and groups: {printable(command('stepfs', 'status', now.get('lake')))}"


class _Rates:
    """Rates of counters between two documents; a dash while there is only one."""

    def __init__(self, now: Document, before: Document | None) -> None:
        self._now = now
        # Another process, or the same second: nothing to divide by.
        same = before is not None and before.get("pid") == now.get("pid")
        self._before = before if same else None
        self._span_s = 0.0 if self._before is None else _number(now, "uptime_s") - _number(self._before, "uptime_s")

    def per_s(self, *path: str) -> float | None:
        if self._before is None or self._span_s <= 0:
            return None
        return max(0.0, _number(self._now, *path) - _number(self._before, *path)) / self._span_s

    def size(self, *path: str) -> str:
        rate = self.per_s(*path)
        return "-" if rate is None else f"{size_text(round(rate))}/s"

    def count(self, *path: str) -> str:
        rate = self.per_s(*path)
        return "-" if rate is None else f"{rate:.1f}/s"

    def share(self, *path: str) -> str:
        rate = self.per_s(*path)
        return "-" if rate is None else f"{100 * min(1.0, rate):.1f} %"


def _steps(now: Document) -> str:
    frontier, last = now.get("frontier"), now.get("last_step")
    if frontier == -1:
        return "none yet"
    read = "nothing read yet" if not isinstance(last, int) else f"last read {last}"
    ahead = f", {frontier - last} ahead" if isinstance(last, int) and isinstance(frontier, int) else ""
    return f"{now.get('first_step')} to {frontier}{', sealed' if now.get('sealed') else ''}; {read}{ahead}"


def _hits(rate: _Rates) -> str:
    hits, misses = rate.per_s("data", "hits"), rate.per_s("data", "misses")
    if not hits and not misses:
        return "no opens"
    assert hits is not None
    assert misses is not None
    return f"{100 * hits / (hits + misses):.1f} % of opens found their bytes"


def _trouble(now: Document) -> str:
    counts = {name: _number(now, "data", name) for name in ("hedges", "retries", "corrupt")}
    seen = [f"{count:.0f} {name}" for name, count in counts.items() if count]
    return f"; since the start {', '.join(seen)}" if seen else ""


def _cache(now: Document, kind: str) -> str:
    used, limit = _number(now, "cache", f"{kind}_bytes"), _number(now, "cache", f"{kind}_limit_bytes")
    return f"{size_text(round(used))} of {size_text(round(limit))}"


def _store(now: Document) -> str:
    store = now.get("store")
    if not isinstance(store, dict):
        return "-"
    if not store.get("reachable"):
        return f"DOES NOT ANSWER: {printable(str(store.get('trouble')))}"
    return printable(str(store.get("trouble"))) if store.get("trouble") else "answers"


def _count(now: Document, name: str) -> str:
    return f"{_number(now, name):.0f}"


def _number(document: object, *path: str) -> float:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return float(document) if isinstance(document, int | float) else 0.0
