"""The options of a run beside its plan, and those of a plan that a command makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from stepfs._internal.declared_option import Opt, declared
from stepfs.errors import UsageError
from stepfs.format.arguments import parse_size
from stepfs.store.api import StoreOptions

LimitSteps = Annotated[
    int | None,
    Opt("--limit-steps", "Stop when this producer id has N steps, earlier runs included.", "N", least=1),
]

AcceptChanges = Annotated[
    bool,
    Opt(
        "--accept-changes",
        "Continue although the plan is not the one that the lake's steps were made by. Otherwise a run shows the changes, and fences no one.",
        environ=False,
    ),
]


Memory = Annotated[  # bytes
    int | None,
    Opt(
        "--memory",
        "Bound on samples held ahead and steps under way (default: a quarter of the machine's or container's); `check` prints the least.",
        "8G",
        parse=parse_size,
    ),
]


@dataclass(frozen=True, slots=True)
class Workers:
    """How many at least, and at most."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(f"--workers {self}: use N or MIN:MAX, at least 1, and MAX not below MIN")

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def parse_workers(text: str) -> Workers:
    """`4`, or `2:8`."""
    least, colon, most = text.partition(":")
    try:
        return Workers(int(least), int(most if colon else least))
    except ValueError as error:
        raise UsageError(f"--workers {text}: use N or MIN:MAX, such as 4 or 2:8") from error


WorkersOfRun = Annotated[
    Workers | None,
    Opt(
        "--workers",
        "Processes that read, tokenise and build (default: one per CPU, or of a container's quota), and one spare per eight; MIN:MAX: as many as trainers need.",
        "N",
        parse=parse_workers,
    ),
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, beside its plan. `UsageError` for a value that makes no sense."""

    lake: str
    producer_id: Annotated[
        str,
        Opt(
            "--producer-id",
            "Name that a restart continues under. A second run with the same id fences the first.",
            "ID",
        ),
    ] = "plan"
    accept_changes: AcceptChanges = False
    workers: WorkersOfRun = None
    engine: Annotated[
        str,
        Opt(
            "--engine",
            "local: workers of this machine; ray: of a Ray cluster that runs already.",
            "NAME",
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Opt(
            "--ray-address",
            "The Ray cluster to use, which this machine is a node of; without it RAY_ADDRESS, or the one that runs here.",
            "HOST:PORT|auto",
        ),
    ] = None
    memory: Memory = None
    max_lead: Annotated[  # None or 0: no bound
        int | None,
        Opt(
            "--max-lead",
            "Wait when so many steps beyond the slowest group's need are committed; 0, or a lake without groups: never.",
            "STEPS",
            least=0,
        ),
    ] = 1000
    max_live_bytes: Annotated[
        int | None,
        Opt(
            "--max-live-bytes",
            "Wait while the lake's live steps would exceed this, such as 2T, until a reclaim has deleted some.",
            "SIZE",
            parse=parse_size,
        ),
    ] = None
    limit_steps: LimitSteps = None
    steps_per_second: Annotated[float | None, Opt("--steps-per-second", "Not faster than this.", "R")] = None
    seal: Annotated[
        bool, Opt("--seal", "Seal the lake when the plan is complete: no more steps come.", environ=False)
    ] = False
    fixed_shape: bool = False  # the lake's other plans must have rows of this plan's shape
    store_options: StoreOptions = field(default_factory=StoreOptions)
    metrics_port: Annotated[
        int | None,
        Opt(
            "--metrics-port",
            "Serve Prometheus metrics (/metrics, and /healthz).",
            "PORT",
            least=1,
            most=65535,
        ),
    ] = None
    metrics_address: Annotated[str, Opt("--metrics-address", "Address of the metrics port.", "ADDRESS")] = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.steps_per_second is not None and not self.steps_per_second > 0:
            raise UsageError(f"steps_per_second={self.steps_per_second}: use a number above 0")
        if self.engine not in {"local", "ray"}:
            raise UsageError(f"--engine {self.engine}: use local or ray")
        if self.ray_address is not None and self.engine != "ray":
            raise UsageError(f"--ray-address {self.ray_address} needs --engine ray")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The plan that a run of text gets, and where that run ends."""

    slices: Annotated[int | None, Opt("--slices", "Slices per step; needed to create the lake.", "N", least=1)] = None
    seq_len: Annotated[int, Opt("--seq-len", "Tokens per row.", "L", least=2)] = 1024
    batch_size: Annotated[int, Opt("--batch-size", "Rows per slice.", "B", least=1)] = 8
    tokenizer_file: Annotated[
        str | None,
        Opt("--tokenizer-file", "The model's tokenizer.json; without it, tokens are bytes.", "PATH"),
    ] = None
    eos: Annotated[
        str | None,
        Opt(
            "--eos",
            "The token of --tokenizer-file that ends a document, where the file does not say it; none: none.",
            "TOKEN",
        ),
    ] = None
    ext: Annotated[
        str | None,
        Opt("--ext", "Kind of file: .safetensors .npy .pt .tar .bin; .safetensors for a new lake.", ".EXT"),
    ] = None
    workers: WorkersOfRun = None
    memory: Memory = None
    limit_steps: LimitSteps = None
    accept_changes: AcceptChanges = False
    seal: Annotated[bool, Opt("--seal", "Seal the lake at the end of the text: no more steps come.", environ=False)] = (
        False
    )
    shard: Annotated[str, Opt("--shard", "Produce part I of N of the text, one process each.", "I/N")] = "0/1"
    producer_id: Annotated[
        str | None,
        Opt(
            "--producer-id",
            "Name that a restart continues under; from the shard by default. One live process per id.",
            "ID",
        ),
    ] = None


def keywords_of(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields from keywords as Python has them: values, or texts as on the command line. `TypeError` for an unknown one."""
    known = declared(options)
    for name in given.keys() - known.keys():
        raise TypeError(f"there is no option {name!r}; known: {', '.join(known)}")
    return {
        name: value if isinstance(value, kind) or option.parse is None else option.parse(str(value))
        for name, value in given.items()
        for kind, option in (known[name],)
    }
