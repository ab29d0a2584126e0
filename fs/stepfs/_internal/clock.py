"""Wall time behind one interface, so that a whole cluster can run under trio's virtual clock.

Wall time is informative only: it stamps commits (file mtimes) and never decides anything in the protocol.
Intervals and deadlines use `trio.current_time` and `trio.sleep`, which `trio.testing.MockClock` replaces.
"""

import time
from typing import Final, Protocol

_QUIET_MS: Final = 60_000  # a producer with a commit within this time is shown as live


class Clock(Protocol):
    """Milliseconds since 1970; may step backwards, callers must not rely on order."""

    def now_ms(self) -> int: ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def age_text(seconds: float) -> str:
    """A span of time in at most two units."""
    minutes = int(seconds) // 60
    if not minutes:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def state_text(newest_ms: int, now_ms: int, *, retired: bool) -> str:
    """A producer's state: the log does not show whether its process runs, only the time of its last commit."""
    if retired:
        return "retired"
    age_ms = now_ms - newest_ms
    return "live" if age_ms < _QUIET_MS else f"quiet for {age_text(age_ms / 1000)}"
