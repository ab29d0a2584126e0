"""Wall time behind one interface, so that a whole cluster can run under trio's virtual clock.

Wall time is informative only: it stamps commits (file mtimes) and never decides anything in the protocol.
Intervals and deadlines use `trio.current_time` and `trio.sleep`, which `trio.testing.MockClock` replaces.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds since 1970; may step backwards, callers must not rely on order."""

    def now_ms(self) -> int: ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000
