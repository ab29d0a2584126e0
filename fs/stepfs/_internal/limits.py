"""The memory and the CPUs that this process may use, according to the kernel and its cgroup: read, never guessed.

A container sees the host's MemAvailable and cores; it is killed at its own limit, and stands still beyond its quota.
All count: cgroup v2 and v1, every ancestor. Clean page cache is not counted as used, because the kernel takes it back by itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY_BYTES_MIN: Final = 64 << 20  # several blocks: less cannot fetch in parallel
_DEFAULT_SHARE: Final = 4  # of the available memory, up to the usual size
_DEFAULT_USUAL: Final = 8 << 30
_LARGE_SHARE: Final = 16  # of what is available beyond: the trainer's own loaders and checkpoints grow, too
_DEFAULT_MAX: Final = 64 << 30
_LOCAL_RANKS: Final = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")  # torchrun's first
_V1_BASES: Final = {"memory": ("memory",), "cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu")}
_UNLIMITED: Final = 1 << 60  # v1 writes "unlimited" as a number near 2⁶³


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of this machine and of this cgroup, in bytes."""

    limit: int  # the machine's memory or the tightest cgroup limit above us
    available: int  # until reclaim of anything but clean page cache
    stall_percent: float  # share of the last 10 s in which some task waited for memory (PSI), 0 if unknown


def default_memory_bytes(memory: Memory) -> int:
    """The default budget: a quarter of the available memory up to 8 GiB, and a sixteenth of the memory beyond.

    At most 64 GiB; 8 GiB if the kernel gives no number.
    """
    if memory.available >= _UNLIMITED // 1024 * 1024:
        return _DEFAULT_USUAL
    beyond = max(0, memory.available - _DEFAULT_USUAL * _DEFAULT_SHARE) // _LARGE_SHARE
    usual = min(_DEFAULT_USUAL, memory.available // _DEFAULT_SHARE)
    return max(MEMORY_BYTES_MIN, min(_DEFAULT_MAX, usual + beyond))


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The tightest limit of our memory cgroup and of those above it; None without one."""
    limit = min((bound for bound, _ in _cgroup_bounds(root)), default=_UNLIMITED)
    return limit if limit < _UNLIMITED else None


def read_memory(root: Path = Path("/")) -> Memory:
    """Read /proc and /sys under `root`. A file that a kernel does not offer counts as unlimited."""
    meminfo = _fields(root / "proc/meminfo")
    limit = meminfo.get("MemTotal:", _UNLIMITED // 1024) * 1024
    available = meminfo.get("MemAvailable:", limit // 1024) * 1024
    for bound, used in _cgroup_bounds(root):
        if bound < _UNLIMITED:
            limit = min(limit, bound)
            available = min(available, max(0, bound - used))
    pressures = [directory / "memory.pressure" for directory, _ in reversed(_cgroups(root, "memory"))]
    pressures.append(root / "proc/pressure/memory")
    return Memory(limit, available, next((p for p in map(_stall, pressures) if p is not None), 0.0))


def _cgroup_bounds(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes used) of each cgroup."""
    return [_bounds(directory, v2=v2) for directory, v2 in _cgroups(root, "memory")]


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may keep busy: those it may run on, or its smallest quota, rounded up."""
    quotas = [_quota(directory, v2=v2) for directory, v2 in _cgroups(root, "cpu")]
    return min([len(os.sched_getaffinity(0)), *(-(-quota // period) for quota, period in quotas if quota and period)])


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Trainer processes on this machine, as torchrun, Slurm or Open MPI say; 1 if none does."""
    given = (environment.get(name, "") for name in _LOCAL_RANKS)
    return next((int(text) for text in given if text.isdecimal() and int(text)), 1)


def _quota(directory: Path, *, v2: bool) -> tuple[int, int]:
    """Microseconds of CPU in each period; 0 without a quota."""
    if not v2:
        return _number(directory / "cpu.cfs_quota_us", 0), _number(directory / "cpu.cfs_period_us", 0)
    quota, _, period = _text(directory / "cpu.max").strip().partition(" ")
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (0, 0)


def _cgroups(root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Our cgroup of a controller and its ancestors, outermost first: (directory, is v2)."""
    found: list[tuple[Path, bool]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, v2 = root / "sys/fs/cgroup", True
        elif controller in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / name for name in _V1_BASES[controller]]
            base, v2 = next((one for one in bases if one.is_dir()), bases[0]), False
        else:
            continue
        here = base
        found.append((here, v2))
        for part in path.strip("/").split("/"):
            here /= part
            if part and part != ".." and here.is_dir():
                found.append((here, v2))
    return found


def _bounds(directory: Path, *, v2: bool) -> tuple[int, int]:
    limits = ("memory.max", "memory.high") if v2 else ("memory.limit_in_bytes",)
    names = ("active_file", "inactive_file", "file_dirty") if v2 else ("active_file", "inactive_file", "dirty")
    stat = _fields(directory / "memory.stat")
    active, inactive, dirty = (stat.get(name if v2 else f"total_{name}", 0) for name in names)
    used = _number(directory / ("memory.current" if v2 else "memory.usage_in_bytes"), 0)
    return min(_number(directory / name) for name in limits), max(0, used - max(0, active + inactive - dirty))


def _stall(path: Path) -> float | None:
    for word in _text(path).partition("\n")[0].split():
        name, _, value = word.partition("=")
        if name == "avg10":
            return float(value)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, absent: int = _UNLIMITED) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else absent


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
