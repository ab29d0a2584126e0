"""The node plugin of Kubernetes: kubelet's calls by gRPC, with real mounts."""

from __future__ import annotations

import errno
import json
import os
import signal
import urllib.request

import grpc
import pytest
import servers
from csinode import READ_ONLY_MANY, daemon_of, ended_with, fires, mounted_below
from prometheus_client.parser import text_string_to_metric_families
from realmount import PATIENCE_S, payload, until

from csi_sanity import controller as csi_sanity
from stepfs.csi.holder import ask
from stepfs.csi.messages import MESSAGES
from stepfs.mount.host import mount_table


def test_requests_are_read_as_the_specification_numbers_their_fields():
    """Bytes written by hand from csi.proto."""
    wire = bytes.fromhex("0a017622022f742a0612001a02080330013a060a016b12017642060a016c120175")
    request = MESSAGES["NodePublishVolumeRequest"].FromString(wire)
    assert (request.volume_id, request.target_path, request.readonly) == ("v", "/t", True)
    assert (dict(request.secrets), dict(request.volume_context)) == ({"k": "v"}, {"l": "u"})
    assert request.volume_capability.HasField("mount")
    assert request.volume_capability.access_mode.mode == 3
    response = MESSAGES["NodeGetVolumeStatsResponse"](
        usage=[{"total": 5, "used": 5, "unit": 1}], volume_condition={"abnormal": True}
    )
    assert response.SerializeToString().hex() == "0a0610051805200112020801"
    capability = MESSAGES["NodeGetCapabilitiesResponse"](capabilities=[{"rpc": {"type": 2}}])
    assert capability.SerializeToString().hex() == "0a040a020802"


def test_a_volume_from_publish_to_unpublish(node, lake, tmp_path):
    assert node.call("GetPluginInfo", "Identity").name == "stepfs.csi"
    assert node.call("Probe", "Identity").ready.value is True
    assert node.call("NodeGetInfo").node_id == "n1"
    assert {one.rpc.type for one in node.call("NodeGetCapabilities").capabilities} == {2, 4}
    one, other = tmp_path / "pods/a b/mount", tmp_path / "pods/2/mount"
    attributes = {"lake": lake, "group": "run", "ranks": "0", "csi.storage.k8s.io/pod.name": "trainer-0"}
    for target in (one, other, one):  # twice is once
        node.publish("v1", target, volume_context=attributes, readonly=False)  # of the pod: the volume is
        assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
    assert len(mounted_below(node.base)) == 1, "one daemon for both pods"
    with pytest.raises(OSError, match="Read-only") as caught:
        os.open(one / "new", os.O_WRONLY | os.O_CREAT)
    assert caught.value.errno == errno.EROFS
    stats = node.call("NodeGetVolumeStats", volume_id="v1", volume_path=str(one))
    assert stats.volume_condition.abnormal is False
    assert not fires(stats)
    node.unpublish("v1", one)
    assert not one.exists()
    assert (other / "step-000000001/rank-00001.bin").read_bytes() == payload(1, 1)
    node.unpublish("v1", other)
    node.unpublish("v1", other)  # of what is not there
    assert mounted_below(tmp_path) == []
    assert list(node.base.iterdir()) == []


def test_what_stands_before_csi_sanity_goes_on_to_the_plugin(node, lake, tmp_path):
    """Which asks for ReadWriteOnce, and takes its volumes from a controller."""
    endpoint = f"{tmp_path}/before.sock"
    server = csi_sanity.serve(endpoint, str(node.socket), lake)
    try:
        with grpc.insecure_channel(f"unix://{endpoint}") as channel:
            publish = channel.unary_unary(
                "/csi.v1.Node/NodePublishVolume", request_serializer=lambda request: request.SerializeToString()
            )
            once = {"mount": {}, "access_mode": {"mode": 1}}
            target = tmp_path / "target"
            asked = {"volume_id": "v", "target_path": str(target), "volume_context": {"lake": lake}}
            publish(MESSAGES["NodePublishVolumeRequest"](**asked, volume_capability=once), timeout=PATIENCE_S)
            assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
            with pytest.raises(grpc.RpcError, match="volume_id and an absolute"):
                publish(MESSAGES["NodePublishVolumeRequest"](), timeout=PATIENCE_S)
    finally:
        server.stop(None).wait()
    node.unpublish("v", target)


def test_an_attribute_that_is_given_twice_is_the_later_one():
    """As protobuf has it; kubectl refuses such a volume before."""
    wire = bytes.fromhex("42060a016c120175" * 2 + "42060a016c120177")
    assert dict(MESSAGES["NodePublishVolumeRequest"].FromString(wire).volume_context) == {"l": "w"}


def test_attributes_are_options_of_mount(node, lake, tmp_path):
    given = {
        "cache-dir": str(tmp_path / "cache"), "cache-size": "64M", "near": f"file://{tmp_path}/near", "prefetch": "3", "prime": "false",
        "recover": "true", "memory": "64M",
    }  # fmt: skip
    node.publish("v", tmp_path / "target", volume_context={"lake": lake} | given)
    options = json.loads((tmp_path / "target/.stepfs/config.json").read_text())
    typed = {"cache-size": "67108864", "memory": "67108864", "prime": False, "recover": True}
    assert {name: options["options"][name] for name in given} == given | typed
    assert list((tmp_path / "cache").iterdir()) != []


@pytest.mark.nightly
def test_the_plugin_serves_the_metrics_of_all_volumes(node, lake, tmp_path):
    free_port = servers.free_port_of_nobody()
    node.more = [f"--metrics-port={free_port}", "--metrics-address=127.0.0.1"]
    node.restart_plugin()
    for volume in ("v1", "v2"):
        node.publish(volume, tmp_path / volume, volume_context={"lake": lake, "recover": "false"})

    def scraped() -> dict[str, dict[str, float]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=PATIENCE_S) as answer:
            found = text_string_to_metric_families(answer.read().decode())
        return {family.name: {sample.labels["instance"]: sample.value for sample in family.samples} for family in found}

    metrics = scraped()
    assert metrics["stepfs_frontier_step"] == {"n1/v1": 2, "n1/v2": 2}
    assert set(metrics["stepfs_fetch_seconds"]) == set(metrics["process_resident_memory_bytes"]) == {"n1/v1", "n1/v2"}
    os.kill(daemon_of(tmp_path / "v1"), signal.SIGKILL)
    until(lambda: set(scraped()["stepfs_frontier_step"]) == {"n1/v2"}, "a dead mount has no metrics")


@pytest.mark.nightly
def test_the_holder_logs_what_it_is_asked_for(other_node, lake, tmp_path):
    node = other_node(STEPFS_LOG_FORMAT="json")
    node.publish("v", tmp_path / "target", volume_context={"lake": lake})
    node.unpublish("v", tmp_path / "target")
    ended_with(node, grpc.StatusCode.NOT_FOUND, "is not a lake", volume_context={"lake": f"{lake}-none"})
    lines = [json.loads(line) for line in (tmp_path / "holder.log").read_text().splitlines()]
    assert {line["logger"] for line in lines} == {"stepfs.csi.holder"}
    assert lines[0]["message"] == f"starts the daemons of volumes, as {tmp_path}/holder.sock asks"
    told = [(line["level"], line["message"].partition(" ")[0], line["message"]) for line in lines[1:]]
    assert [(level, verb) for level, verb, _ in told] == [
        ("INFO", "mount"), ("INFO", "mount"), ("INFO", "unmount"), ("INFO", "unmount"), ("INFO", "mount"), ("WARNING", "mount"),
    ]  # fmt: skip
    assert told[0][2].endswith(": begins")
    assert ": done after" in told[1][2]
    assert "exit code 3 after" in told[-1][2]
    assert "is not a lake" in told[-1][2]
    log = json.loads((tmp_path / "plugin.log").read_text().splitlines()[1])["message"].rpartition(" ")[2]
    assert (tmp_path / "log" / log).exists()


@pytest.mark.nightly
def test_a_request_in_the_middle_of_another_is_told_and_one_that_was_given_up_leaves_nothing(node, lake, tmp_path):
    target = tmp_path / "target"
    os.kill(node.holder.pid, signal.SIGSTOP)
    call = node.channel.unary_unary(
        "/csi.v1.Node/NodePublishVolume",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=MESSAGES["NodePublishVolumeResponse"].FromString,
    )
    request = MESSAGES["NodePublishVolumeRequest"](
        volume_id="v", target_path=str(target), volume_capability=READ_ONLY_MANY, volume_context={"lake": lake}
    )
    given_up = call.future(request, timeout=PATIENCE_S)
    until(lambda: list(node.base.glob("*/volume.json")) != [], "the publish is under way")
    given_up.cancel()  # as kubelet does after two minutes
    node.refused(grpc.StatusCode.ABORTED, "is not done", "NodeUnpublishVolume", volume_id="v", target_path=str(target))
    assert node.call("Probe", "Identity").ready.value is True
    os.kill(node.holder.pid, signal.SIGCONT)
    until(lambda: mount_table.mount_at(target) is not None, "what kubelet has given up is published")
    node.unpublish("v", target)
    assert (mounted_below(tmp_path), list(node.base.iterdir())) == ([], [])


@pytest.mark.nightly
def test_a_volume_behind_a_link_with_a_strange_name(node, lake, tmp_path):
    """kubelet's directory may be a link; a volumeHandle may be any text."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "kubelet").symlink_to("disk")
    volume, target = "a/../b\n\u2603 " * 200, tmp_path / "kubelet/pods/1/mount"
    for _ in range(2):
        node.publish(volume, target, volume_context={"lake": lake})
    assert len(mounted_below(tmp_path / "disk")) == 1
    node.call("NodeGetVolumeStats", volume_id=volume, volume_path=str(target))
    node.publish(volume, target, volume_context={"lake": lake, "group": "g"})
    assert "stays as it is: group is None, not 'g'" in (tmp_path / "plugin.log").read_text()
    node.unpublish(volume, target)
    assert (mounted_below(tmp_path), list(node.base.iterdir())) == ([], [])


@pytest.mark.nightly
def test_what_nobody_uses_any_more_ends_with_the_next_unpublish(node, lake, tmp_path):
    """A reader that outlived its pod; a daemon that came after the pod had gone; a directory from before a reboot."""
    target = tmp_path / "target"
    node.publish("read", target, volume_context={"lake": lake})
    with (target / "step-000000000/rank-00000.bin").open("rb") as held:
        node.unpublish("read", target)
        assert mounted_below(target) == []
        assert held.read() == payload(0, 0)
    for name in ("late", "rebooted"):
        (node.base / name / "mnt").mkdir(parents=True)
        (node.base / name / "volume.json").write_text(json.dumps({"volume": name, "arguments": []}))
    assert ask(tmp_path / "holder.sock", ["mount", lake, str(node.base / "late/mnt")], {})[0] == 0
    assert len(mounted_below(node.base)) == 2
    target.mkdir()  # kubelet cleans up after a reboot
    node.unpublish("other", target)
    assert (mounted_below(tmp_path), list(node.base.iterdir()), target.exists()) == ([], [], False)


@pytest.mark.nightly
def test_attributes_from_before_a_reboot_do_not_count(node, lake, tmp_path):
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": lake})
    (state,) = node.base.glob("*/volume.json")
    text = state.read_text().replace(lake, "s3://gone/run")
    node.unpublish("v", target)
    (state.parent / "mnt").mkdir(parents=True)
    state.write_text(text)
    node.publish("v", target, volume_context={"lake": lake})
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
