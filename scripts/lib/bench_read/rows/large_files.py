"""Large files, primed and unprimed, against the page cache and other mounts.

One lake serves all: a step is one file of each kind (raw, .npy, .pt, safetensors, .npy to be mapped), a round of
measuring is one step, so that every first read is the first. Within a round the sides take turns.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.bed import Bed, Mount, encoded
from bench.machine import MIB, touch_memory, until
from bench.probe import KINDS
from bench.report import Row, at_most, median
from bench_read.peers import Peers

READERS = tuple(KINDS)  # reader of rank r
RAW = 0
_TOUCHED_FILES = 16  # memory that is touched before a file is read


class Times:
    """Times of probes: 'side first', 'side second' → seconds, of the clock and of the reader's own CPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    def note(self, found: dict[str, Any]) -> None:
        for kept, taken in ((self.seconds, found["seconds"]), (self._cpu, found["cpu"])):
            for side, values in taken.items():
                for order, value in zip(("first", "second"), values, strict=True):
                    kept.setdefault(f"{side} {order}", []).append(value)

    def beside(self, ours: str, theirs: str) -> str:
        """The ratio by the reader's CPU time: a reader from page cache does nothing but compute and copy."""
        return f" (by CPU time {median(self._cpu[theirs]) / median(self._cpu[ours]):.2f})"


class Large:
    """The stages that read large files."""

    def __init__(self, bed: Bed, peers: Peers) -> None:
        self._bed = bed
        self._peers = peers
        self._size = bed.plan.file_bytes
        self._rounds = range(bed.plan.rounds)
        self._random = random.Random(0)

    @cached_property
    def url(self) -> str:
        """The lake, and the same files for the peers and on the local file system."""
        self._bed.report.say("making the lake of large files")
        self.local.mkdir()
        url = self._bed.lake("large", len(READERS), self._batches())
        peers = [(f"large/{number:02d}.bin", self._raw(number)) for number in self._rounds]
        self._peers.hold("large", peers)
        return url

    @cached_property
    def local(self) -> Path:
        return self._bed.directory / "local"

    def _raw(self, number: int) -> bytes:
        return encoded("raw", self._size, number)

    def _batches(self) -> Iterator[list[bytes]]:
        for number in self._rounds:
            batch = [encoded(KINDS[reader], self._size, number + 100 * rank) for rank, reader in enumerate(READERS)]
            batch[RAW] = self._raw(number)
            if number == 0:
                for reader, body in zip(READERS, batch, strict=True):
                    (self.local / f"{reader}.bin").write_bytes(body)
            yield batch

    @contextmanager
    def primed_mount(self, number: int, rank: int) -> Iterator[Mount]:
        """A mount that pushed one file into the page cache a moment ago, as it does for a trainer that comes to it:
        some machines take away pages that rest for seconds (`bench_report.machine`).
        """
        touch_memory(_TOUCHED_FILES * self._size)
        options = ["--steps", f"{number}:{number + 1}", "--ranks", f"{rank}", "--prefetch", "1"]
        with self._bed.mounted(self.url, *options) as mount:
            if not mount.primed(1):
                self._bed.report.say(f"NOT primed: {mount.data()}")
            yield mount

    def primed(self) -> None:
        """First and second read of a raw file by a fresh process, and by the loaders of several kinds."""
        assert self.url
        report = self._bed.report
        reads, resident, times = [], [], Times()
        with ExitStack() as stack:
            mounts = {peer.name: stack.enter_context(peer.mounted()) for peer in self._peers.all}
            for number in self._rounds:
                with self.primed_mount(number, RAW) as mount:
                    before = mount.requests()
                    found = self._round(mount, mounts, number)
                    reads.append(mount.spent(before).get("read", 0))
                resident.append(found["resident stepfs"] / self._size)
                times.note(found)
        self._loaders()
        speed = self._bed.speeds("primed", times.seconds, self._size)
        report.figures["primed resident share"] = resident
        first, what = speed["stepfs first"], "first read of a primed file"
        beside = times.beside("stepfs first", "stepfs second")
        self._bed.ratio(0.9, what, first, "its second", speed["stepfs second"], beside=beside)
        whole = [count for count, share in zip(reads, resident, strict=True) if share == 1]
        text = f"{len(whole)} of {len(reads)} files were whole just before ({min(resident):.2%})"
        report.add(at_most(0, "READ upcalls of it", f"{sum(whole)}", text, sum(whole), ""))
        for bound, order in ((10, "first"), (0.9, "second")):
            best = self._peers.best(speed, f" {order}")
            beside = times.beside("stepfs first", f"{best} second") if order == "second" else ""
            theirs = speed[f"{best} {order}"]
            self._bed.ratio(bound, what, first, f"best peer's {order}: {best}", theirs, beside=beside)
        for peer in self._peers.all:
            text = f"{speed[f'{peer.name} first']:,.0f} / {speed[f'{peer.name} second']:,.0f} MB/s"
            report.add(Row(f"{peer.name}: first / second read", text))

    def _round(self, mount: Mount, mounts: dict[str, Path], number: int) -> dict[str, Any]:
        paths = {"stepfs": str(mount.path(number, RAW)), "ext4": self._cached("raw")}
        paths |= {name: str(peer / f"large/{number:02d}.bin") for name, peer in mounts.items()}
        return self._bed.probe(kind="raw", paths=self._shuffled(paths), resident=["stepfs"])

    def _loaders(self) -> None:
        tmpfs = self._in_tmpfs()
        for rank, reader in enumerate(READERS):
            times = Times()
            for number in self._rounds:
                with self.primed_mount(number, rank) as mount:
                    paths = {"primed": str(mount.path(number, rank)), "ext4": self._cached(reader)}
                    paths |= {"tmpfs": str(tmpfs / f"{reader}.bin")} if tmpfs else {}
                    times.note(self._bed.probe(kind=reader, paths=self._shuffled(paths)))
            speed = self._bed.speeds(f"loader {reader}", times.seconds, self._size)
            first, cached = speed["primed first"], speed["ext4 first"]
            if reader in {"safetensors", "memmap"}:
                what, again = f"{reader}: mapped, every page touched", speed["primed second"]
                beside = times.beside("primed first", "primed second")
                self._bed.ratio(0.9, what, first, "second touch", again, beside=beside)
                text = f"ext4 {cached:,.0f} MB/s"
                self._bed.report.add(Row(f"{what}, against ext4", f"{first:,.0f} MB/s", text, first / cached))
            else:
                what = f"{'plain 1 MiB reads' if reader == 'raw' else reader} of a primed file"
                beside = times.beside("primed first", "ext4 first")
                self._bed.ratio(0.85, what, first, "ext4, cached", cached, beside=beside)
                if tmpfs:
                    small = speed["tmpfs first"]
                    text = f"{small:,.0f} MB/s"
                    self._bed.report.add(Row("limit of it: tmpfs, pages of 4 KiB like FUSE's", "", text, first / small))

    def _in_tmpfs(self) -> Path | None:
        """The files once more, where the page cache has no large folios either: that is what ext4 is faster by."""
        shm = Path("/dev/shm")
        if not shm.is_dir() or shutil.disk_usage(shm).free < 2 * len(READERS) * self._size:
            return None
        copy = shm / self._bed.directory.name
        self._bed.stack.callback(shutil.rmtree, copy, ignore_errors=True)
        return Path(shutil.copytree(self.local, copy, dirs_exist_ok=True))

    def unprimed(self) -> None:
        """From the daemon's memory through the kernel, with the mount's tuning."""
        assert self.url
        times = Times()
        total = self._size * len(self._rounds)
        options = ["--no-prime", "--ranks", f"{RAW}", "--prefetch", str(len(self._rounds))]
        budget = total * 3 // 2 // MIB + 256
        touch_memory(4 * total)
        with self._bed.mounted(self.url, *options, "--memory", f"{budget}M") as mount:
            if not until(lambda: mount.data()["bytes_fetched"] >= total, 120):
                self._bed.report.say("NOT everything could be fetched ahead")
            for number in self._rounds:
                paths = {"stepfs": str(mount.path(number, RAW)), "ext4": self._cached("raw")}
                times.note(self._bed.probe(kind="raw", paths=self._shuffled(paths)))
        speed = self._bed.speeds("unprimed", times.seconds, self._size)
        what, first, cached = "unprimed, in daemon memory", speed["stepfs first"], speed["ext4 first"]
        self._bed.ratio(0.45, what, first, "its pages, cached", speed["stepfs second"])
        text = f"{cached:,.0f} MB/s"
        self._bed.report.add(Row(f"{what}, against ext4", f"{first:,.0f} MB/s", text, first / cached))

    def _cached(self, reader: str) -> str:
        """The same kind of file on the local file system, in its page cache."""
        path = self.local / f"{reader}.bin"
        path.read_bytes()
        return str(path)

    def limits(self) -> None:
        """The limit of any file system on this machine."""
        assert self.url
        found = [self._bed.probe(kind="raw", paths={"ext4": self._cached("raw")}) for _ in self._rounds]
        cached = median([each["seconds"]["ext4"][1] for each in found])
        copy = _copy_s(self._size)
        self._bed.report.figures["limits"] = {"memory copy s": copy, "ext4 page cache s": cached}
        self._bed.report.add(
            Row("limit: memory copy", f"{self._size / 1e6 / copy:,.0f} MB/s"),
            Row("limit: page cache of the local file system", f"{self._size / 1e6 / cached:,.0f} MB/s"),
        )

    def _shuffled(self, paths: dict[str, str]) -> dict[str, str]:
        return dict(self._random.sample(list(paths.items()), len(paths)))


def _copy_s(size: int) -> float:
    source, target = bytearray(b"\1" * size), bytearray(b"\2" * size)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return median(seconds)
