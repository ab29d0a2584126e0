"""Ports of test servers: no two processes that run tests are given the same one."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import servers

TAKES = """
import random, sys, servers
random.SystemRandom = lambda: random.Random(int(sys.argv[1]))
print(*servers.free_ports(5), flush=True)
sys.stdin.read()
"""


def test_two_processes_that_would_pick_the_same_ports_get_different_ones(monkeypatch):
    with subprocess.Popen(
        [sys.executable, "-c", TAKES, "7"],
        cwd=Path(servers.__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        theirs = other.stdout.readline().split()
        monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(7))
        ours = servers.free_ports(5)
        assert len(theirs) == 5
        assert not set(theirs) & set(map(str, ours))
