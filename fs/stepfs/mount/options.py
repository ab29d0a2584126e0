"""The options of one mount: parsed, checked, frozen, and sent to the daemon's process as a map.

They contain no credentials: these come from the AWS chain in the environment, which the daemon inherits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from stepfs._internal.declared_option import Opt, declared
from stepfs.errors import RefusedError, command
from stepfs.format.arguments import parse_duration, parse_interval, parse_log_format, parse_size
from stepfs.mount.redact import redact_url
from stepfs.view.ranks import parse_ranks, parse_steps

DEADLINE_S: Final = 300.0

# What a replacement cannot change, and why: the others it may.
_FIXED: Final = {
    "lake": "its readers' names would mean other bytes",
    "allow_other": "the kernel was told when it was mounted",
    **dict.fromkeys(("world", "mesh", "steps"), "its readers' names would mean other bytes"),
}


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
            "--memory",
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
            "For slices on the disk of --cache-dir (default: 8G).",
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
    spare: Annotated[
        bool,
        Opt("--spare/--no-spare", "Keep an idle daemon (30 MB), so that after a kill the next one serves in 0.2 s."),
    ] = False
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

    def to_map(self) -> dict[str, Any]:
        """The options for another process, also of another version. `fixed`: those that one must not leave out."""
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        body["fixed"] = [f.name for f in dataclasses.fields(self) if f.name in _FIXED and body[f.name] != f.default]
        if self.steps is not None:
            body["steps"] = [self.steps.start, self.steps.stop]
        return {name: str(v) if isinstance(v, Path) else v for name, v in body.items()}

    @classmethod
    def from_map(cls, body: Mapping[str, Any]) -> tuple[MountOptions, list[str]]:
        """The options, absent ones with their defaults; and the names of those that this version does not have. `RefusedError`
        if what readers see depends on one of these.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if lacking := sorted({*body.get("fixed", ())} - known):
            first = command("stepfs", "unmount", body["directory"])
            raise RefusedError(
                f"{body['directory']}: mounted with {', '.join(lacking)}, which this stepfs does not have: its readers' names "
                f"would mean other bytes; upgrade stepfs, or `{first}` first"
            )
        given = {name: value for name, value in body.items() if name in known}
        for name in ("directory", "cache_dir"):
            given[name] = None if given.get(name) is None else Path(given[name])
        if given.get("steps") is not None:
            given["steps"] = range(*given["steps"])
        if given.get("ranks") is not None:
            given["ranks"] = tuple(given["ranks"])
        return cls(**given), sorted(body.keys() - known - {"fixed"})

    def typed(self) -> dict[str, str | bool | None]:
        """By their flags, as they may be typed again, without credentials; null: not given. Names and forms that users see, and
        so another version's, too: those of the fields are no one's but ours.
        """
        options = declared(MountOptions).items()
        return {
            option.flag.partition("/")[0].removeprefix("--"): _typed(getattr(self, name))
            for name, (_, option) in options
        }


def merged(before: MountOptions, wanted: MountOptions, given: Collection[str]) -> tuple[MountOptions, list[str]]:
    """The options of a mount whose daemon is replaced, and a line for each that changes.

    A replacement is an upgrade, not a new wish: what is not named in `given` stays as it was. `RefusedError`.
    """
    named = {"lake", *given} & {field.name for field in dataclasses.fields(MountOptions)}
    change = {name: getattr(wanted, name) for name in sorted(named) if not _same(name, before, wanted)}
    for name, why in _FIXED.items():
        if name in change:
            was, now = (_shown(name, options) for options in (before, wanted))
            first = command("stepfs", "unmount", before.directory)
            raise RefusedError(f"{before.directory}: mounted with {was}, not {now}: {why}; `{first}` first")
    after = dataclasses.replace(before, **change)
    return after, [f"{_shown(name, after)} (was {_shown(name, before)})" for name in change]


def _same(name: str, before: MountOptions, wanted: MountOptions) -> bool:
    was, now = getattr(before, name), getattr(wanted, name)
    return was == now or (name == "lake" and was.rstrip("/") == now.rstrip("/"))


def _shown(name: str, options: MountOptions) -> str:
    """As it would be typed."""
    value, option = getattr(options, name), declared(MountOptions).get(name)
    if option is None:
        return redact_url(str(value))
    flag = option[1].flag
    if isinstance(value, bool):
        on, _, off = flag.partition("/")
        return on if value else off or f"no {on}"
    return f"no {flag}" if value is None else f"{flag} {_typed(value)}"


def _typed(value: object) -> str | bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, range):
        return f"{value.start}:{value.stop}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}s" if isinstance(value, float) else redact_url(str(value))
