"""The trainer's node: a peer's mounts, behind the slowed store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import servers

from bench.bed import Bed
from bench.machine import cpu_s, family
from bench.peer_mounts import JuiceFS, PeerMount, Rclone
from bench_train.peers.catalogue import Peer


@dataclass(frozen=True, slots=True)
class Node:
    """Where the data is shown, by which process; '' and 0 for libraries that fetch for themselves."""

    mount: str = ""
    pid: int = 0
    ready_s: float = 0.0

    def pids(self) -> list[int]:
        return family(self.pid) if self.pid else []

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids()))

    @classmethod
    def of(cls, mount: PeerMount) -> Node:
        return cls(str(mount.directory), mount.pid, mount.ready_s)


class Nodes:
    """Nodes for one run of the benchmark; a mount that cannot be had raises `NotInstalledError`."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._juicefs: JuiceFS | None = None
        self._mounts: dict[str, Callable[[str, str], AbstractContextManager[Node]]] = {
            "": self._bare,
            "stepfs": self._stepfs,
            "juicefs": self._through_juicefs,
            "rclone": self._through_rclone,
        }

    def node(self, peer: Peer, place: str, endpoint_url: str) -> AbstractContextManager[Node]:
        """A node whose caches are empty."""
        return self._mounts[peer.mount](place, endpoint_url)

    @contextmanager
    def writer(self, peer: Peer) -> Iterator[str]:
        """The mount that data is written through, if this peer's must be; beside the slowed store."""
        if peer.mount != "juicefs":
            yield ""
            return
        with self._juice().mounted() as mount:
            yield str(mount.directory)

    @contextmanager
    def _bare(self, place: str, endpoint_url: str) -> Iterator[Node]:
        del place, endpoint_url
        yield Node()

    @contextmanager
    def _stepfs(self, place: str, endpoint_url: str) -> Iterator[Node]:
        with self._bed.mounted(f"s3://{servers.BUCKET}/{place}", "--endpoint-url", endpoint_url) as mount:
            yield Node(str(mount.directory), mount.pid, mount.ready_s)

    @contextmanager
    def _through_juicefs(self, place: str, endpoint_url: str) -> Iterator[Node]:
        del place
        with self._juice().mounted(endpoint_url) as mount:
            yield Node.of(mount)

    @contextmanager
    def _through_rclone(self, place: str, endpoint_url: str) -> Iterator[Node]:
        del place
        with Rclone(self._bed, "off", prefix="").mounted(endpoint_url) as mount:
            yield Node.of(mount)

    def _juice(self) -> JuiceFS:
        if self._juicefs is None:
            self._juicefs = JuiceFS(self._bed)
        return self._juicefs
