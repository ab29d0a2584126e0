"""What a mount's status says of the waits of its readers, for people: shares, rates, who must act, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from stepfs._internal.clock import age_text

NOTABLE: Final = 0.02  # of the last minute: less is no reason to act
_SHOWN: Final = 0.0005
_LIKE: Final = 0.95  # rates that differ less are the same

_FOR: Final = {
    "commit": "for commits",
    "store": "for bytes from the store",
    "throttled": "for a store that asks for fewer requests",
    "unreachable": "for a store that does not answer",
    "near": "for bytes from the nearer place",
    "disk": "for bytes from the cache disk",
    "memory": "for room in memory",
    "daemon": "for the daemon, whose loop was late",
    "takeover": "for the next daemon",
}

# What to do, and whose it is where that is not this node's.
_ADVICE: Final = {
    "commit": "the producers must act: start more of them, or give each more workers; `stepfs status LAKE` names the quiet ones",
    "store": "mount so that more is fetched at a time or further ahead: name the `--ranks` read here, give more `--memory` or"
    " `--prefetch`; or read a replica (`--near`)",
    "throttled": "run fewer mounts and producers at once on this bucket, or ask its operator for a higher limit or another prefix",
    "unreachable": "run `stepfs doctor LAKE`, which looks at the store and at the network to it",
    "near": "look at the disk or server behind `--near`, or mount without it",
    "disk": "mount with a faster `--cache-dir`, or with more `--memory`",
    "memory": "mount with more `--memory`, or with fewer `--ranks`, so that the next step fits beside this one",
    "daemon": "leave the daemon a core of this node: the processors are taken, or the daemon was stopped",
    "takeover": "read in the log why another daemon has taken over, and in `dmesg` whether memory was short",
}


def of_cause(cause: str) -> str:
    """What a reader waited for, behind "waited 2 %"."""
    return _FOR.get(cause, f"for {cause}")


def shares_text(shares: Mapping[str, float], said: Mapping[str, str] | None = None) -> str:
    """`2.8 % for commits, 0.3 % for …`; `said`: by cause, what is added."""
    told = said or {}
    return ", ".join(
        f"{100 * share:.1f} % {of_cause(cause)}{told.get(cause, '')}"
        for cause, share in shares.items()
        if share >= _SHOWN
    )


def minute_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """The last minute in a status document; empty if the daemon is of a version that does not say."""
    waits = status.get("waits")
    minute = waits.get("last_minute") if isinstance(waits, dict) else None
    return minute if isinstance(minute, dict) and isinstance(minute.get("shares"), dict) else {}


def waited_text(status: Mapping[str, Any]) -> str:
    """`waited 3.1 % of the last minute: …`, with the rates where readers wait for commits."""
    minute = minute_of(status)
    shares, span_s = minute["shares"], minute.get("span_s") or 0.0
    when = "the last minute" if span_s >= 50 else f"the last {span_s:.0f} s"
    detail = shares_text(shares, {"commit": f" ({rates})" if (rates := _rates(minute)) else ""})
    return f"waited {100 * sum(shares.values()):.1f} % of {when}" + (f": {detail}" if detail else "")


def _rates(minute: Mapping[str, Any]) -> str:
    read, committed = minute.get("read_per_s"), minute.get("committed_per_s")
    if read is None or committed is None:
        return ""
    return f"the trainer reads {read:.1f} steps/s, producers commit {committed:.1f}"


def wait_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Below the line of the readers: sums, who must act, the outlook, what is waited for now, and who was refused last."""
    minute = minute_of(status)
    if not minute:
        return
    seconds, counts = status["waits"]["seconds"], status["waits"]["count"]
    if counted := sum(counts.values()):
        by_cause = ", ".join(f"{value:.1f} s {cause}" for cause, value in _largest(seconds) if value >= _SHOWN)
        yield (
            f"waits    {sum(seconds.values()):.1f} s in {counted} waits so far, each reader's added up ({by_cause});"
            f" at least one waited in {status['waits']['blocked_s']:.1f} s"
        )
    if advice := advice_of(minute):
        yield f"act      {advice}"
    if outlook := _outlook(status, minute):
        yield f"outlook  {outlook}"
    where = f"; its log is {log}" if (log := status.get("log")) else ""
    if said := status.get("waiting_for"):
        yield f"now      {said}{where}"
    if refused := status.get("refused"):
        yield f"refused  {_refusal(refused[-1])}{where}"


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


def advice_of(minute: Mapping[str, Any]) -> str:
    """Who must act, and how, as the greatest cause of the last minute says; "" if nobody need."""
    cause, share = next(iter(_largest(minute["shares"])), ("", 0.0))
    return _ADVICE.get(cause, "") if share >= NOTABLE else ""


def _outlook(status: Mapping[str, Any], minute: Mapping[str, Any]) -> str:
    read, committed, ahead = minute.get("read_per_s"), minute.get("committed_per_s"), minute.get("ahead")
    if read is None or committed is None or not ahead or status.get("sealed") or read * _LIKE <= committed:
        return ""
    within = age_text(ahead / (read - committed))
    return f"at this pace the trainer reaches the frontier in {within} ({_rates(minute)})"


def _refusal(last: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(last["time"], UTC).strftime("%H:%M:%SZ")
    return f"step {last['step']} with {last['error']} at {when}: {last['why']}"


def finding(status: Mapping[str, Any]) -> tuple[str, str] | None:
    """(what, advice) for `stepfs doctor`; None where readers wait for nothing to speak of."""
    minute = minute_of(status)
    if not minute:
        return None
    said = status.get("waiting_for")
    advice = advice_of(minute) or (_ADVICE["commit"] if said else "")
    if not advice:
        return None
    log = f"; its log is {status['log']}" if status.get("log") else ""
    return f"alive, but its readers {waited_text(status)}" + (f"; {said}" if said else ""), advice + log
