"""`stepfs reclaim --every` as a service: it outlives a store that is away, also when it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import servers


def test_it_starts_while_the_store_is_away_and_stops_when_told():
    endpoint = f"http://127.0.0.1:{servers.free_port_of_nobody()}"
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with subprocess.Popen(
        [
            *(sys.executable, "-c", "from stepfs.cli import main; main()"),
            *("reclaim", "s3://bucket/run", "--endpoint-url", endpoint, "--every", "0.1"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr is not None
        for _ in range(2):
            assert "trying again in 0.1 s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130
