"""A proxy that gives a store the bandwidth and the latency of a network. Prints its URL; ends with its input.

Each line of its input is answered with what clients were sent so far, as JSON.

    python -m bench.slow_store UPSTREAM_PORT BYTES_PER_S LATENCY_S

One token bucket for all connections, taken in turns of 128 KiB, so that parallel GETs share the bandwidth as they do on
a link. Bytes go through `splice`, from socket to pipe to socket: a proxy that copied them would compete for the cores
with what is measured. Every message of the client waits for `LATENCY_S` before it goes on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Final

CHUNK: Final = 128 << 10


class TokenBucket:
    """Bytes per second for everybody together; an idle store saves up for `burst_s` at most."""

    def __init__(self, bytes_per_s: float, *, burst_s: float = 0.005) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._free_at = 0.0
        self.taken_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, size: int, now: float) -> float:
        """When `size` bytes may go. In order of the calls."""
        with self._lock:
            self.taken_bytes += size
            self._free_at = max(self._free_at, now - self._burst_s) + size / self._bytes_per_s
            return self._free_at

    def take(self, size: int) -> None:
        """Wait until `size` bytes may go."""
        now = time.monotonic()
        pause_s = self.reserve(size, now) - now
        if pause_s > 0:
            time.sleep(pause_s)


def requests(client: socket.socket, store: socket.socket, latency_s: float) -> None:
    """What the client sends, a little later."""
    try:
        while data := client.recv(CHUNK):
            time.sleep(latency_s)
            store.sendall(data)
        store.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def answers(client: socket.socket, store: socket.socket, bucket: TokenBucket) -> None:
    """What the store sends, as fast as the bucket allows."""
    source, sink = os.pipe()
    try:
        while size := os.splice(store.fileno(), sink, CHUNK):
            bucket.take(size)
            while size:
                size -= os.splice(source, client.fileno(), size)
        client.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    finally:
        os.close(source)
        os.close(sink)


def serve(client: socket.socket, port: int, latency_s: float, bucket: TokenBucket) -> None:
    with client, socket.create_connection(("127.0.0.1", port)) as store:
        for each in (client, store):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asking = threading.Thread(target=requests, args=(client, store, latency_s), daemon=True)
        asking.start()
        answers(client, store, bucket)
        client.close()  # lets the other direction go
        asking.join(1)


def main() -> None:
    port, bytes_per_s, latency_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    bucket = TokenBucket(bytes_per_s)
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)

    def accept() -> None:
        while True:
            client, _ = listening.accept()
            threading.Thread(target=serve, args=(client, port, latency_s, bucket), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps({"sent_bytes": bucket.taken_bytes}), flush=True)


if __name__ == "__main__":
    main()
