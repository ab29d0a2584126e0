"""The tensors of `.pt` files that strangers wrote, read in a process that they may take down.

A pickle of 1 MiB can ask for any memory and any time, also from an unpickler that runs no code. So commands that look
at other people's lakes read it in a child with limits on both. The child answers in JSON; a file that ends it is
reported as unreadable, and the next file gets a new child. One child serves all files, since torch takes a second to
import.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from struct import Struct
from typing import IO, Any, Final, Self

from stepfs.format.payload.arrays import ArrayInfo, PayloadArrays
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.torch.need import need_torch
from stepfs.torch.table import torch_arrays

_SIZES: Final = Struct("<QQQ")  # bytes of the head, of the tail, of the payload
_MEMORY_BYTES_MAX: Final = 1 << 30  # beside torch itself
_FILE_SECONDS_MAX: Final = 5  # of CPU time


class TorchProcess:
    """Calls `torch_arrays` in a child, which ends with the context. Threads may share it.

    `MissingPackageError` at the first call if there is no torch that will do.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._end()

    def __call__(self, excerpt: Excerpt) -> PayloadArrays:
        with self._turn:
            line = _asked(self._started(), excerpt)
            if not line:
                raise UnreadablePayloadError(f"ended the process that looked into it ({_ending(self._end())})")
        answer = json.loads(line)
        if "problem" in answer:
            raise UnreadablePayloadError(answer["problem"])
        arrays = [ArrayInfo(**{**each, "shape": tuple(each["shape"])}) for each in answer["arrays"]]
        return PayloadArrays(tuple(arrays), answer["facts"])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            need_torch("looking into .pt files", for_foreign_files=True)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "stepfs.torch.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._child

    def _end(self) -> int:
        """The child's exit code, negative for a signal. Its pipes are closed."""
        assert self._child is not None
        child, self._child = self._child, None
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        return child.wait()


def _asked(child: subprocess.Popen[bytes], excerpt: Excerpt) -> bytes:
    """The child's answer; empty if it ended instead."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(_SIZES.pack(len(excerpt.head), len(excerpt.tail), excerpt.length))
        child.stdin.write(excerpt.head)
        child.stdin.write(excerpt.tail)
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    line = child.stdout.readline()
    return line if line.endswith(b"\n") else b""


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(source: IO[bytes], answers: IO[bytes]) -> None:
    """The child: an answer for each question, until there are no more."""
    import torch  # noqa: F401, PLC0415 (its memory is not the file's)

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while sizes := source.read(_SIZES.size):
        head, tail, length = _SIZES.unpack(sizes)
        excerpt = Excerpt(memoryview(source.read(head)), memoryview(source.read(tail)), length)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + _FILE_SECONDS_MAX, -1))
        answers.write(json.dumps(_answer(excerpt)).encode() + b"\n")
        answers.flush()


def _answer(excerpt: Excerpt) -> dict[str, Any]:
    try:
        found = torch_arrays(excerpt)
    except UnreadablePayloadError as error:
        return {"problem": str(error)}
    return asdict(found)


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
