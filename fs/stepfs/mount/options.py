"""The options of one mount: parsed, checked, frozen, and sent to the daemon's process as JSON.

They contain no credentials: these come from the AWS chain in the environment, which the daemon inherits.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs.data.fetch.concurrency import CONNECTIONS_MAX
from stepfs.redact import redact_url
from stepfs.store.options import StoreOptions

DEADLINE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Every option of `stepfs mount`. Sizes in bytes, times in seconds, steps half-open."""

    lake: str
    directory: Path
    endpoint_url: str | None = None
    ranks: tuple[int, ...] | None = None  # a hint for prefetching; hides nothing
    world: int | None = None
    mesh: str | None = None
    steps: range | None = None
    wait_s: float | None = None
    stat_waits: bool = False  # under `steps`: names and attributes of future steps wait, too
    group: str | None = None
    cache_dir: Path | None = None
    cache_bytes: int | None = None  # on disk under `cache_dir`; without one, in memory
    memory_bytes: int | None = None
    prefetch_steps: int | None = None
    connections: int = CONNECTIONS_MAX  # concurrent GETs of data, at most
    poll_s: float = 0.1
    show_last: int | None = None
    checkpoint_dir: str | None = None  # a directory, or a path with {N} in it
    next_step: str = "N"
    trust_checkpoints: bool = False  # record checkpoints that no reader has reached, too
    allow_other: bool = False
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    prime: bool = True
    deadline_s: float = DEADLINE_S

    @property
    def store_options(self) -> StoreOptions:
        """How this mount reaches its stores."""
        return StoreOptions(self.endpoint_url, self.connections)

    def to_json(self) -> str:
        """The options as text, for the pipe to the daemon."""
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.steps is not None:
            body["steps"] = [self.steps.start, self.steps.stop]
        return json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in body.items()})

    @classmethod
    def from_json(cls, text: str) -> MountOptions:
        """Inverse of `to_json`."""
        body = json.loads(text)
        for name in ("directory", "cache_dir"):
            body[name] = None if body[name] is None else Path(body[name])
        body["steps"] = None if body["steps"] is None else range(*body["steps"])
        body["ranks"] = None if body["ranks"] is None else tuple(body["ranks"])
        return cls(**body)

    def redacted(self) -> dict[str, object]:
        """The options as `.stepfs/config.json` may show them."""
        body: dict[str, object] = json.loads(self.to_json())
        body["lake"] = redact_url(self.lake)
        body["endpoint_url"] = None if self.endpoint_url is None else redact_url(self.endpoint_url)
        return body
