"""What every side of the comparison can do, and what a kill -9 of its server took."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.machine import SCRIPTS


@dataclass(frozen=True, slots=True)
class Losses:
    """Of the payloads that the server had acknowledged when it was killed: how many, and how many are not there."""

    acknowledged: int
    lost: int

    @classmethod
    def of(cls, acknowledged: Iterable[int], found: Iterable[int]) -> Losses:
        wanted = set(acknowledged)
        return cls(len(wanted), len(wanted - set(found)))

    def __str__(self) -> str:
        return f"{self.lost} of {self.acknowledged}"


class Side(Protocol):
    """A lake on a server, or a broker. `running` comes first, on an empty directory."""

    name: str
    settings: str
    note: str

    @property
    def version(self) -> str: ...

    def running(self, directory: Path) -> AbstractContextManager[None]: ...

    def rate(self, size: int, count: int) -> float:
        """Bytes per second, from the first append to the last acknowledgement."""
        ...

    def latencies(self, size: int, count: int, gap_s: float) -> list[float]:
        """Seconds from append to the end of the read, a payload each `gap_s`."""
        ...

    def losses(self, size: int, count: int) -> Losses:
        """The server is killed after `count` acknowledgements, and started again."""
        ...


def read_until_killed(command: list[str], count: int, kill: Callable[[], None]) -> list[int]:
    """What a publisher says was acknowledged, a number a line; the server is killed after `count` of them."""
    acknowledged = []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS / "lib"), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        try:
            for line in publisher.stdout:
                acknowledged.append(int(line))
                if len(acknowledged) == count:
                    kill()
                    publisher.terminate()  # one that would try again for minutes
        finally:
            publisher.kill()
    if len(acknowledged) < count:
        raise RuntimeError(f"the publisher ended after {len(acknowledged)} payloads")
    return acknowledged
