"""The servers the tests stand on come up, and go, on ports that nobody else is given."""

from __future__ import annotations

import random
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import faultproxy
import pytest
import servers
import trio

from stepfs.errors import StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.s3.s3_store import S3Store


@pytest.mark.parametrize("kind", ["seaweed", "rclone"])
def test_server_answers(kind, request):
    server = request.getfixturevalue(kind)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{server.plain_port}", timeout=10)
    refused.value.close()
    assert refused.value.code in {400, 403}  # unsigned requests are nobody's


def test_urls_are_fresh(lake_url, tmp_path):
    assert lake_url.startswith(("file:///", "s3://"))


async def test_a_held_proxy_is_a_hung_server(seaweed, s3_url, fault_proxy):
    store = S3Store(servers.BUCKET, "held", endpoint_url=fault_proxy.endpoint_url, data_timeout_s=0.2)
    fault_proxy.hold()
    with pytest.raises(StoreUnreachableError):
        await store.get("a")
    fault_proxy.release()
    assert await store.get("a") is None
    await store.aclose()


async def test_the_proxy_is_a_program_too(seaweed, s3_url):
    command = [sys.executable, faultproxy.__file__, str(seaweed.plain_port)]
    command += ["--seed", "7", "--probability", "500=0.5"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE, check=False))
        endpoint_url = (await process.stdout.receive_some()).decode().strip()
        assert endpoint_url.startswith("http://127.0.0.1:")
        store = S3Store(servers.BUCKET, "program", endpoint_url=endpoint_url)
        outcomes = [await store.create(f"log/{number}", b"x") for number in range(20)]
        assert set(outcomes) == {Put.CREATED, Put.UNKNOWN}
        await store.aclose()
        process.kill()


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
