"""The server of a torture run behind a fault proxy: SeaweedFS, which survives kill -9 on its ports and directory; Azurite and
the double of Google, which keep too much in memory for that and are not killed, nor is one that TEST_S3_SERVER names.
With TEST_S3_SERVER=tls the proxy speaks TLS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import cloudservers
import servers
from certificates import Certificate
from cloudservers import CloudServer

from bench.machine import program
from torture.processes import spawn

_CONFIGURE = "fs.configure -locationPrefix=/buckets/ -fsync -apply\n"
_PORTS = 7  # S3, master, volume, filer, admin, S3 with TLS; the proxy
_PROXY_READY_S = 30.0


class Server:
    """A server and, if any trouble is asked for, the proxy in front of it. A context manager. `store`: s3, gs or az."""

    def __init__(
        self, directory: Path, *, seed: int, probabilities: str, durable: bool = True, store: str = "s3"
    ) -> None:
        self._store = store
        self._directory = directory
        self._seed = seed
        self._probabilities = probabilities
        self._ours = store == "s3" and servers.CHOSEN in {"", "tls"}
        self._durable = durable and self._ours
        self._ports = servers.free_ports(_PORTS)
        self._stack = ExitStack()
        self._running = ExitStack()
        self._server: servers.S3Server | CloudServer | None = None
        self._certificate: Certificate | None = None
        self._proxy: subprocess.Popen[bytes] | None = None
        self.back_at: float | None = None
        self.counts = directory.parent / "proxy-counts.json"

    def __enter__(self) -> Self:
        self._stack.callback(lambda: self._running.close())  # noqa: PLW0108 - the one that runs by then
        try:
            self._start()
            if self._durable:
                self._make_durable()
            if self._probabilities:
                self._start_proxy()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environment(self) -> dict[str, str]:
        """What clients need: the proxy's address where there is one."""
        assert self._server is not None
        if not self._proxy:
            return self._server.environment()
        scheme = "https" if self._certificate else "http"
        return self._server.environment(f"{scheme}://127.0.0.1:{self._ports[6]}")

    def url(self) -> str:
        assert self._server is not None
        return f"{self._server.home}/torture"

    def alive(self) -> bool:
        return self._server is not None

    def may_be_killed(self) -> bool:
        return self.alive() and self._ours

    def kill(self, now: float, back_in_s: float) -> None:
        assert self._server is not None
        os.killpg(self._server.process.pid, signal.SIGKILL)
        self._server.process.wait()
        self._running.close()
        self._server, self.back_at = None, now + back_in_s

    def tend(self, now: float) -> None:
        """Start it again when that is due; returns when it answers."""
        if self.back_at is not None and now >= self.back_at:
            self.back_at = None
            self._start()
        if self._server is not None and self._server.process.poll() is not None:
            raise RuntimeError(f"the server ended by itself, see {self._directory}/server.log")
        if self._proxy is not None and self._proxy.poll() is not None:
            raise RuntimeError(f"the fault proxy ended by itself, see {self._directory.parent}/proxy.log")

    def be_honest(self) -> None:
        """No more trouble from the proxy."""
        if self._proxy is not None:
            self._proxy.send_signal(signal.SIGUSR1)

    def _start(self) -> None:
        self._running = ExitStack()
        if self._store == "s3":
            self._server = self._running.enter_context(servers.chosen(self._directory, ports=self._ports[:6]))
            self._certificate = self._server.certificate
        else:
            start = cloudservers.google if self._store == "gs" else cloudservers.azurite
            self._server = self._running.enter_context(start(self._directory, port=self._ports[0]))

    def _make_durable(self) -> None:
        """Without this SeaweedFS acknowledges before the bytes are on the disk."""
        _, master, _, filer, *_ = self._ports
        command = [
            servers.program("weed"), "shell", f"-master=127.0.0.1:{master}", f"-filer=127.0.0.1:{filer}",
        ]  # fmt: skip
        done = subprocess.run(command, input=_CONFIGURE, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0 or '"fsync":true' not in "".join(done.stdout.split()):
            raise RuntimeError(f"weed shell: {done.stdout[-500:]} {done.stderr[-500:]}")

    def _start_proxy(self) -> None:
        assert self._server is not None
        log = self._directory.parent / "proxy.log"
        words = [
            str(self._server.plain_port), str(self.counts), "--port", str(self._ports[6]), "--seed", str(self._seed),
        ]  # fmt: skip
        if self._certificate:
            words += ["--certificate", str(self._certificate.public), str(self._certificate.private)]
        words += ["--probabilities", self._probabilities]
        self._proxy = spawn(program("torture.proxy", *words), log)
        self._stack.callback(self._proxy.wait)
        self._stack.callback(self._proxy.kill)
        deadline = time.monotonic() + _PROXY_READY_S
        while not self.counts.exists():
            if self._proxy.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the fault proxy did not start: {log.read_text()[-1000:]}")
            time.sleep(0.05)
