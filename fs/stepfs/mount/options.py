"""The options of one mount: parsed, checked, frozen, and sent to the daemon's process as JSON.

They contain no credentials: these come from the AWS chain in the environment, which the daemon inherits.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from stepfs.declared_option import Opt
from stepfs.format.arguments import parse_duration, parse_interval, parse_log_format, parse_size
from stepfs.mount.redact import redact_url
from stepfs.view.ranks import parse_ranks, parse_steps

DEADLINE_S: Final = 300.0


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _absolute_name(text: str) -> str:
    return str(Path(text).absolute())


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Every option of `stepfs mount`. Sizes in bytes, times in seconds, steps half-open."""

    lake: str
    directory: Path
    ranks: Annotated[
        tuple[int, ...] | None,
        Opt(
            "--ranks", "Ranks of this node: their files are fetched ahead. It hides nothing.", "0-7", parse=parse_ranks
        ),
    ] = None
    world: Annotated[
        int | None, Opt("--world", "Show N ranks, of which several read the same; a multiple of the lake's ranks.", "N")
    ] = None
    mesh: Annotated[
        str | None,
        Opt(
            "--mesh",
            "Show the ranks of this device mesh, slowest dimension first; dp, fsdp, ddp and hsdp choose the files.",
            "pp=2,dp=4,tp=2",
        ),
    ] = None
    steps: Annotated[
        range | None,
        Opt(
            "--steps",
            "Show exactly steps A to B-1 from the start; opening one that is not committed yet waits.",
            "A:B",
            parse=parse_steps,
        ),
    ] = None
    wait_s: Annotated[
        float | None,
        Opt(
            "--wait",
            "Opening a file of a step that is not committed yet waits that long for it, instead of ENOENT.",
            "SECONDS",
            parse=parse_duration,
        ),
    ] = None
    wait_for_lake_s: Annotated[
        float | None,
        Opt(
            "--wait-for-lake",
            "Wait that long for a lake that does not exist yet, instead of exit code 3.",
            "SECONDS",
            parse=parse_duration,
        ),
    ] = None
    show_last: Annotated[int | None, Opt("--show-last", "List only the newest N steps.", "N", least=1)] = None
    list_latest: Annotated[
        bool, Opt("--list-latest", "List `latest`, too: programs that walk then read the newest step twice.")
    ] = False
    group: Annotated[str | None, Opt("--group", "The training run that reads here.", "NAME")] = None
    checkpoint_dir: Annotated[  # a directory, or a path with {N} in it
        str | None,
        Opt(
            "--checkpoint-dir", "Record the trainer's checkpoints from its own directory.", "DIR", parse=_absolute_name
        ),
    ] = None
    next_step: Annotated[str, Opt("--next-step", "Which step a checkpoint with counter N resumes at.", "EXPR")] = "N"
    memory_bytes: Annotated[
        int | None,
        Opt(
            "--memory-size",
            "For slices in memory, page cache included (default: a quarter of what is free, beyond 8G a sixteenth).",
            "8G",
            parse=parse_size,
        ),
    ] = None
    cache_dir: Annotated[
        Path | None,
        Opt(
            "--cache-dir",
            "Keep fetched slices on this disk, too; the next mount after a crash adopts them.",
            "DIR",
            parse=_absolute,
        ),
    ] = None
    cache_bytes: Annotated[
        int | None,
        Opt(
            "--cache-size",
            "For slices on the disk of --cache-dir (default: 8G); without one, the same as --memory-size.",
            "8G",
            parse=parse_size,
        ),
    ] = None
    near: Annotated[
        str | None,
        Opt(
            "--near",
            "Read slices from here first: a replica, or any place with the lake's objects, as trusted as the lake.",
            "PLACE",
        ),
    ] = None
    prefetch_steps: Annotated[
        int | None, Opt("--prefetch", "Steps to fetch ahead; 0 fetches nothing ahead.", "STEPS", least=0)
    ] = None
    prime: Annotated[bool, Opt("--prime/--no-prime", "Push fetched steps into the kernel's page cache.")] = True
    poll_s: Annotated[
        float,
        Opt("--poll", "Shortest interval between two looks at the log.", "100ms", parse=parse_interval, given="100ms"),
    ] = 0.1
    metrics_port: Annotated[
        int | None, Opt("--metrics-port", "Serve Prometheus /metrics, and /healthz.", "PORT", least=1, most=65535)
    ] = None
    metrics_address: Annotated[
        str, Opt("--metrics-address", "Serve them on this address (0.0.0.0: on all).", "ADDRESS")
    ] = "127.0.0.1"
    recover: Annotated[
        bool, Opt("--recover/--no-recover", "Serve on after the daemon was killed; else readers get errors.")
    ] = True
    log_format: Annotated[
        str,
        Opt("--log-format", "text, or json: one object a line, with step, slice, rank.", "FORMAT", parse_log_format),
    ] = "text"
    allow_other: Annotated[bool, Opt("--allow-other", "Let other users read, too.")] = False
    endpoint_url: Annotated[
        str | None,
        Opt(
            "--endpoint-url",
            "S3-compatible server to use instead of what the AWS settings say (AWS_ENDPOINT_URL_S3, profile).",
            "URL",
        ),
    ] = None
    deadline_s: float = DEADLINE_S

    @property
    def watched_dir(self) -> str | None:
        """The checkpoint directory, if it is this mount that watches it: with `--ranks`, the one with rank 0."""
        return self.checkpoint_dir if not self.ranks or 0 in self.ranks else None

    def to_json(self) -> str:
        """The options as text, for the pipe to the daemon."""
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.steps is not None:
            body["steps"] = [self.steps.start, self.steps.stop]
        return json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in body.items()})

    @classmethod
    def from_json(cls, text: str) -> MountOptions:
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
