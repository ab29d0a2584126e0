"""A check for unknown STEPFS_… variables: a misspelt one would be ignored silently, and the default used.

The names stand here, not in the options, because each of the two commands must know those of the other. A test
compares this list with the variables that they read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Final

from stepfs.cli.columns import printable
from stepfs.cli.failure import say

_PREFIX: Final = "STEPFS_"
_NAMES: Final = """
    ACCEPT_CHANGES ALLOW_OTHER BATCH_SIZE BESIDE BUNDLE CACHE_DIR CACHE_SIZE CHECKPOINT CHECKPOINT_DIR
    CHECK_PAYLOAD COMPARE CONTENT CP DEBUG DIR DROP DRY_RUN ENDPOINT_URL ENGINE EVERY EXT FILE FOREGROUND
    FROM_PAYLOAD GRACE GROUP HOLDOUT INPUT JSON KEEP LAKE LIMIT_STEPS LIST_LATEST LOG_DIR LOG_FORMAT MAX_LEAD
    MAX_LIVE_BYTES MAX_PERCENT MEMORY MEMORY_SIZE MESH METRICS_ADDRESS METRICS_PORT MICRO MICRO_BATCHES NEW_GROUP NEXT_STEP
    NO_SOURCES ORPHANS PAYLOAD_SCHEMA PLAN_DIR POLL PREFETCH PRIME PRODUCER_ID RANK RANKS RAY_ADDRESS RECORD
    REPAIR RESUMED RETIRE REWIND SCHEMA SEAL SEQ_LEN SHARD SHOW_LAST SKIP SLICES SOURCE SSE SSE_KMS_KEY_ID
    STEP STEPS STEPS_PER_SECOND TEXT TO TOKENIZER TOKENIZER_FILE UNTIL
    UNTIL_DAMAGE WAIT WATCH WORKERS WORLD
"""
KNOWN: Final = frozenset(_PREFIX + name for name in _NAMES.split())
# Kubernetes sets these for a service called stepfs, or stepfs-something.
_SERVICE: Final = re.compile(r"STEPFS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def warn_of_unknown() -> None:
    """Print a line on stderr for each unknown variable; call it once per command."""
    for line in unknown(os.environ):
        say(f"stepfs: {printable(line)}")


def unknown(names: Iterable[str]) -> Iterator[str]:
    """A message for each unknown name, with the nearest known one. Values are not shown."""
    for name in sorted(names):
        if name.startswith(_PREFIX) and name not in KNOWN and not _SERVICE.fullmatch(name):
            from difflib import get_close_matches

            near = get_close_matches(name, KNOWN, n=1)
            yield f"{name} is set and means nothing" + (f"; do you mean {near[0]}?" if near else "")
