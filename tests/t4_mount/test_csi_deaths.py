"""What a volume is when its plugin, holder or daemon dies or is silent, and what each call of kubelet answers then."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import servers
from csinode import READ_ONLY_MANY, Node, answer, daemon_of, fires, listing, mounted_below, shown
from realmount import PATIENCE_S, needs_resend, payload, until


def test_readers_do_not_see_that_the_plugin_is_killed(node, lake, tmp_path):
    target = tmp_path / "pod/mount"
    node.publish("v1", target, volume_context={"lake": lake})
    with (target / "step-000000000/rank-00000.bin").open("rb") as held:
        node.restart_plugin()
        assert held.read() == payload(0, 0)
        node.publish("v1", target, volume_context={"lake": lake})  # kubelet asks again
    node.unpublish("v1", target)
    assert mounted_below(tmp_path) == []


class Reader(threading.Thread):
    """Reads every file of two steps again and again, each opened anew and one that is held."""

    def __init__(self, target: Path) -> None:
        super().__init__(daemon=True)
        self.target, self.ended, self.rounds, self.trouble = target, threading.Event(), 0, ""
        self.start()

    def run(self) -> None:
        try:
            with (self.target / "step-000000000/rank-00000.bin").open("rb", buffering=0) as held:
                while not self.ended.is_set():
                    for step, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
                        descriptor = os.open(
                            self.target / f"step-{step:09d}/rank-{rank:05d}.bin", os.O_RDONLY | os.O_DIRECT
                        )
                        with os.fdopen(descriptor, "rb") as file:
                            assert file.read() == payload(step, rank)
                    held.seek(0)
                    assert held.read() == payload(0, 0)
                    assert len(os.listdir(self.target)) == 4
                    self.rounds += 1
        except (OSError, AssertionError) as error:
            self.trouble = repr(error)

    def goes_on(self) -> None:
        rounds = self.rounds
        until(lambda: bool(self.trouble) or self.rounds > rounds + 2, "the reader goes on")
        assert not self.trouble


@needs_resend
def test_readers_do_not_see_that_the_daemon_of_a_volume_is_killed(node, lake, tmp_path):
    killed, other = tmp_path / "pod/killed", tmp_path / "pod/other"
    for volume, target in (("v1", killed), ("v2", other)):
        node.publish(volume, target, volume_context={"lake": lake})
    readers = [Reader(killed), Reader(other)]
    for reader in readers:
        reader.goes_on()
    before, untouched = daemon_of(killed), daemon_of(other)
    os.kill(before, signal.SIGKILL)
    for reader in readers:
        reader.goes_on()
    assert (daemon_of(killed) != before, daemon_of(other)) == (True, untouched)
    node.publish("v1", killed, volume_context={"lake": lake})  # kubelet asks again: it is the same mount
    assert node.call("NodeGetVolumeStats", volume_id="v1", volume_path=str(killed)).volume_condition.abnormal is False
    for reader in readers:
        reader.goes_on()
        reader.ended.set()
        reader.join()
    for volume, target in (("v1", killed), ("v2", other)):
        node.unpublish(volume, target)
    assert mounted_below(tmp_path) == []


@pytest.mark.nightly
def test_a_volume_whose_holder_died_is_served_again_at_the_next_publish(node, lake, tmp_path):
    target = tmp_path / "pod/mount"
    node.publish("v1", target, volume_context={"lake": lake})
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    daemons = [
        pid for pid in processes if str(node.base) in _command_line(pid) and "stepfs.mount" in _command_line(pid)
    ]
    node.holder.kill()
    node.holder.wait()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once, as at the end of a container
        for pid in daemons:
            os.kill(pid, number)
    until(lambda: isinstance(listing(target), OSError), "the mount is dead")
    stats = node.call("NodeGetVolumeStats", volume_id="v1", volume_path=str(target))
    assert (stats.volume_condition.abnormal, len(stats.usage)) == (True, 1)
    fields = {"volume_id": "v1", "target_path": str(target), "volume_capability": READ_ONLY_MANY}
    node.refused(
        grpc.StatusCode.UNAVAILABLE,
        "is its container up?",
        "NodePublishVolume",
        volume_context={"lake": lake},
        **fields,
    )
    node.holder = node._start("holder")
    began = time.monotonic()
    while True:
        try:
            node.publish("v1", target, volume_context={"lake": lake})
            break
        except grpc.RpcError:
            assert time.monotonic() - began < PATIENCE_S
            time.sleep(0.1)
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.nightly
def test_a_daemon_that_is_silent_keeps_its_pods(node, lake, tmp_path):
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": lake})
    daemon = daemon_of(target)
    os.kill(daemon, signal.SIGSTOP)
    try:
        fields = {"volume_id": "v", "target_path": str(target), "volume_capability": READ_ONLY_MANY}
        silent = (grpc.StatusCode.UNAVAILABLE, "does not answer now", "NodePublishVolume")
        node.refused(*silent, volume_context={"lake": lake}, **fields)
        stats = node.call("NodeGetVolumeStats", volume_id="v", volume_path=str(target))
        assert (stats.volume_condition.abnormal, fires(stats)) == (True, False)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
    assert daemon_of(target) == daemon


class Looker(threading.Thread):
    """Lists a directory all the time, as a container may that starts just now, and notes each thing that it sees."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory, self.ended, self.seen = directory, threading.Event(), set[str]()
        self.start()

    def run(self) -> None:
        while not self.ended.is_set():
            self.seen.add(shown(self.directory))

    def end(self) -> set[str]:
        self.ended.set()
        self.join()
        return self.seen


def killed(target: Path) -> None:
    """The daemon of a volume with `recover: "false"`."""
    os.kill(daemon_of(target), signal.SIGKILL)
    until(lambda: shown(target) == "ENOTCONN", "the mount is dead")


# State of the target → what publish, stats and unpublish answer, and what the target shows after publish. Kubelet takes
# every error but UNAVAILABLE and ABORTED as final, and forgets a volume that it had published.
WELL, LATER = ("OK", "steps", "OK", "OK"), ("UNAVAILABLE", "ENOTCONN", "ABNORMAL", "OK")


STATES = {
    "dead": WELL,
    "dead, no holder": LATER,
    "another volume": ("ALREADY_EXISTS", "steps", "NOT_FOUND", "FAILED_PRECONDITION"),
}


MORE_STATES = {
    "a foreign mount": ("ALREADY_EXISTS", "EMPTY", "NOT_FOUND", "FAILED_PRECONDITION"),
    "never published, no holder": ("UNAVAILABLE", "EMPTY", "NOT_FOUND", "OK"),
    "alive, another secret": WELL,
    "dead, its other pod was served again with other attributes": WELL,
    "dead, the lake is gone": LATER,
    "never published": WELL,
    "alive": WELL,
    "alive, other attributes": WELL,
    "alive, the lake is gone": WELL,
    "alive, no holder": WELL,
    "dead twice": WELL,
    "dead, other attributes": WELL,
    "dead, another secret": LATER,
    "dead, unknown attributes": LATER,
    "dead, the lake is damaged": LATER,
    "another volume, dead": ("ALREADY_EXISTS", "ENOTCONN", "NOT_FOUND", "FAILED_PRECONDITION"),
    "never published, the lake is gone": ("NOT_FOUND", "EMPTY", "NOT_FOUND", "OK"),
    "never published, another secret": ("INVALID_ARGUMENT", "EMPTY", "NOT_FOUND", "OK"),
}


def brought(state: str, node: Node, lake: str, target: Path, other: Path) -> dict[str, object]:
    """What kubelet publishes at `target`, which has come into this state."""
    fields: dict[str, object] = {"volume_context": {"lake": lake, "recover": "false"}}
    changed = {"volume_context": {"lake": lake, "rank" if "unknown" in state else "ranks": "1"}}
    if state == "a foreign mount":
        target.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", str(target)], check=True)
    elif "never" not in state:
        node.publish("w" if "another volume" in state else "v", target, **fields)
    if "its other pod" in state:
        node.publish("v", other, **fields)
    for _ in range(2 if "twice" in state else "dead" in state):
        if shown(target) == "ENOTCONN":
            node.publish("v", target, **fields)
        killed(target)
    if "its other pod" in state:
        node.publish("v", other, **changed)
    elif "attributes" in state:
        fields = changed
    return fields | ({"secrets": {"username": "somebody"}} if "secret" in state else {})


def spoil(state: str, node: Node, directory: Path) -> None:
    """What is gone around the node."""
    if "lake is" in state:
        (directory / "lake.msgpack").rename(directory / "before")
    if "damaged" in state:
        (directory / "lake.msgpack").write_bytes(b"rotten")
    if "no holder" in state:
        node.holder.kill()
        node.holder.wait()


@pytest.mark.parametrize("state", [*STATES, *(pytest.param(one, marks=pytest.mark.nightly) for one in MORE_STATES)])
def test_each_call_in_every_state(state, node, lake, tmp_path):
    target, other = tmp_path / "pod/mount", tmp_path / "pod2/mount"
    fields = brought(state, node, lake, target, other)
    spoil(state, node, tmp_path / "lake")
    publish, shows, stats, unpublish = (STATES | MORE_STATES)[state]
    looker = Looker(target)
    for _ in range(2):
        assert (answer(node, "NodePublishVolume", "v", target, **fields), shown(target)) == (publish, shows)
    assert answer(node, "NodeGetVolumeStats", "v", target) == stats
    empty = "EMPTY" in looker.end()
    assert not empty or shows == "EMPTY" or "never" in state, "a container that starts meanwhile has no steps for good"
    for _ in range(2):
        assert answer(node, "NodeUnpublishVolume", "v", target) == unpublish
    assert target.exists() == (unpublish != "OK")
    if unpublish == "OK" and "no holder" not in state:
        node.unpublish("v", other)
        assert mounted_below(node.base) == []


@pytest.mark.nightly
def test_a_container_that_follows_the_hosts_mounts_is_served_again_without_a_restart(node, lake, tmp_path):
    """As with mountPropagation: HostToContainer. And a target that dies again and again has two mounts at most."""
    pods, target = tmp_path / "pods", tmp_path / "pods/1/mount"
    pods.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(pods)], check=True)
    subprocess.run(["mount", "--make-shared", str(pods)], check=True)
    fields = {"volume_context": {"lake": lake, "recover": "false"}}
    node.publish("v", target, **fields)
    data = tmp_path / "data"
    data.mkdir()
    follows = 'mount --bind "$0" "$1" && mount --make-rslave "$1" && echo begun && exec sleep infinity'
    command = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", follows, str(target), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "begun\n"
        inside = Path(f"/proc/{container.pid}/root{data}")
        for _ in range(3):
            killed(target)
            assert shown(inside) == "ENOTCONN"
            node.publish("v", target, **fields)
            assert (shown(target), shown(inside), mounted_below(target)) == ("steps", "steps", [str(target)] * 2)
        container.kill()
    node.unpublish("v", target)
    assert mounted_below(tmp_path) == [str(pods)]


def hanging_threads(pid: int) -> int:
    """Those that wait for a file system."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found += any(word in (task / "wchan").read_text() for word in ("fuse", "request_wait"))
    return found


@pytest.mark.nightly
def test_a_silent_mount_costs_the_plugin_one_thread(node, lake, tmp_path):
    free_port, target = servers.free_port_of_nobody(), tmp_path / "target"
    node.more = [f"--metrics-port={free_port}", "--metrics-address=127.0.0.1"]
    node.restart_plugin()
    node.publish("v", target, volume_context={"lake": lake})
    daemon = daemon_of(target)
    os.kill(daemon, signal.SIGSTOP)
    try:
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=PATIENCE_S) as answered:
                assert answered.read() == b""
        assert answer(node, "NodeGetVolumeStats", "v", target) == "ABNORMAL"
        assert answer(node, "NodePublishVolume", "v", target, volume_context={"lake": lake}) == "UNAVAILABLE"
        assert hanging_threads(node.plugin.pid) == 1
    finally:
        os.kill(daemon, signal.SIGCONT)
    until(lambda: answer(node, "NodeGetVolumeStats", "v", target) == "OK", "it answers again")
