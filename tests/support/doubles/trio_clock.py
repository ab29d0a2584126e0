"""Wall time that follows trio's clock: deterministic under `MockClock`."""

from __future__ import annotations

import trio

_SIMULATED_EPOCH_MS = 1_700_000_000_000


class TrioClock:
    """A `stepfs._internal.clock.Clock`."""

    def now_ms(self) -> int:
        return _SIMULATED_EPOCH_MS + int(trio.current_time() * 1000)
