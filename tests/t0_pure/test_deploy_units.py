"""The systemd units and Ray's manifest: sandboxed where they can be, in shape, and of commands that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from finished import ran

from stepfs import __version__, errors
from stepfs_producer.cli.app import app

DEPLOY = Path(__file__).parents[2] / "scripts/deploy"
MOUNT, RECLAIM, TIMER = "stepfs@.service", "stepfs-reclaim@.service", "stepfs-reclaim@.timer"
EXPOSURE_MAX = {MOUNT: 5.0, RECLAIM: 2.0}

# Directives of [Service] that leave the mount namespace alone. One that is missing here belongs here only after a look
# at what it does to mounts: under a namespace of its own the daemon's mount would be seen by nobody.
KEEPS_THE_NAMESPACE = {
    "Type", "NotifyAccess", "EnvironmentFile", "ExecStartPre", "ExecStart", "TimeoutStopSec", "KillMode", "WatchdogSec",
    "Restart", "RestartSec", "RestartPreventExitStatus", "MemoryMax", "LimitNOFILE", "LimitCORE", "UMask",
    "NoNewPrivileges", "CapabilityBoundingSet", "DevicePolicy", "DeviceAllow", "SystemCallFilter",
    "SystemCallErrorNumber", "SystemCallArchitectures", "RestrictAddressFamilies", "RestrictNamespaces",
    "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute", "ProtectClock",
    "ProtectHostname",
}  # fmt: skip


def sections(unit: str) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        if line.startswith("["):
            settings = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.append((name, value))
    return found


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert shutil.which("systemd-analyze"), "scripts/setup installs it"
    return ran(["systemd-analyze", *map(str, arguments)], env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"})


def test_nothing_gives_the_mount_a_namespace_of_its_own():
    names = {name for name, _ in sections(MOUNT)["Service"]}
    assert names <= KEEPS_THE_NAMESPACE


@pytest.mark.parametrize("unit", EXPOSURE_MAX)
def test_a_unit_is_hardened(unit):
    said = analyze("security", "--offline=true", DEPLOY / unit).stdout
    (exposure,) = re.findall(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert float(exposure) <= EXPOSURE_MAX[unit]


def test_systemd_finds_no_mistake_in_reclaim_and_its_timer(tmp_path):
    for unit in (RECLAIM, TIMER):
        text = (DEPLOY / unit).read_text()
        stepfs = shutil.which("stepfs", path=sysconfig.get_path("scripts"))
        (tmp_path / unit.replace("@", "@run")).write_text(text.replace("/usr/local/bin/stepfs", str(stepfs)))
    done = analyze("verify", "--man=no", *sorted(tmp_path.iterdir()))
    said = [line for line in done.stderr.splitlines() if "stepfs" in line]
    assert (done.returncode, said) == (0, [])


def test_reclaim_runs_once_with_credentials_of_its_own():
    service = dict(sections(RECLAIM)["Service"])
    assert service["Type"] == "oneshot"
    assert shlex.split(service["ExecStart"])[1:] == ["reclaim", "${STEPFS_LAKE}"]
    (mounts,) = [value for name, value in sections(MOUNT)["Service"] if name == "EnvironmentFile"]
    assert service["EnvironmentFile"] != mounts
    assert service["CapabilityBoundingSet"] == ""
    timer = dict(sections(TIMER)["Timer"])
    assert {"OnBootSec", "OnUnitInactiveSec"} <= set(timer), "runs never overlap, however long one takes"


MANIFEST = Path(__file__).parents[2] / "scripts/deploy/ray.yaml"
SERVICE, JOB, NODES = yaml.safe_load_all(MANIFEST.read_text())


def container(document: dict) -> dict:
    (found,) = document["spec"]["template"]["spec"]["containers"]
    return found


def test_it_has_the_shape_kubernetes_wants() -> None:
    for document in (SERVICE, JOB, NODES):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_all_run_one_image_and_know_one_token() -> None:
    assert {container(one)["image"] for one in (JOB, NODES)} == {f"registry.example/stepfs:{__version__}"}
    assert container(JOB)["envFrom"] == container(NODES)["envFrom"]


def test_the_command_has_the_options_that_it_is_given() -> None:
    line = container(JOB)["command"][2].rpartition("exec ")[2]
    words = shlex.split(line.replace("$STEPFS_LAKE", "file:///lake").replace("$POD_IP", "10.0.0.4"))
    assert words[:2] == ["stepfs-produce", "run"]
    command = typer.main.get_group(app).commands["run"]
    given = command.make_context("run", words[2:]).params
    assert (given["engine"], given["ray_address"], given["workers"]) == ("ray", "10.0.0.4:6379", "2:16")


def test_nodes_look_for_the_head_where_it_is() -> None:
    port = re.search(r"--head --port=(\d+)", str(container(JOB)["command"]))
    assert port is not None
    assert f"--address={SERVICE['metadata']['name']}:{port[1]} " in str(container(NODES)["command"])
    assert SERVICE["spec"]["selector"].items() <= JOB["spec"]["template"]["metadata"]["labels"].items()


def test_an_ending_that_another_start_cannot_mend_is_final() -> None:
    kinds = [
        errors.UsageError, errors.AbsentError, errors.RefusedError, errors.CorruptError, errors.FencedError,
    ]  # fmt: skip
    (rule,) = JOB["spec"]["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == {kind.exit_code for kind in kinds}
    assert rule["onExitCodes"]["containerName"] == container(JOB)["name"]
