"""What `scripts/deploy` hands to other machines: checked by those who will read it, as far as they are here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from finished import ran
from programs import commands_of

from stepfs.cli.app import app

DEPLOY = Path(__file__).parents[2] / "scripts/deploy"
MANIFESTS = [DEPLOY / "kubernetes" / name for name in ("daemonset.yaml", "sidecar.yaml")]
UNIT = DEPLOY / "stepfs@.service"


def variables() -> set[str]:
    """Every STEPFS_… variable that some option of `stepfs` reads, and those that are read elsewhere."""
    options = {p.envvar for sub in commands_of(app).values() for p in sub.params if p.envvar}
    return {str(name) for name in options} | {"STEPFS_LOG_FORMAT", "STEPFS_LOG_DIR", "STEPFS_DEBUG"}


def unit() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_passes_systemds_own_check(tmp_path):
    """`systemd-analyze verify` where it is installed; what it would look at first, everywhere."""
    assert unit()["Type"] == ["notify"]
    assert int(unit()["WatchdogSec"][0]) >= 30  # three beats of the daemon's own
    (start,) = unit()["ExecStart"]
    program, *arguments = shlex.split(start)
    assert Path(program).is_absolute()
    assert arguments == ["mount", "${STEPFS_LAKE}", "${STEPFS_DIR}", "--foreground"]
    if shutil.which("systemd-analyze") is None:
        return
    stepfs = shutil.which("stepfs", path=sysconfig.get_path("scripts"))
    installed = tmp_path / "stepfs@node.service"
    installed.write_text(UNIT.read_text().replace(program, str(stepfs)))
    done = ran(
        ["systemd-analyze", "verify", "--man=no", str(installed)], env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    )
    said = [line for line in done.stderr.splitlines() if "stepfs@" in line]
    assert (done.returncode, said) == (0, [])


def test_parents_of_the_mount_point_are_for_everybody(tmp_path):
    """The unit's umask is for the cache and the log; a mount with --allow-other lies below what this makes."""
    (prepare,) = unit()["ExecStartPre"]
    command = shlex.split(prepare.removeprefix("-").replace("$$", "$"))
    directory = tmp_path / "a b" / "mnt"
    subprocess.run(command, check=True, env={**os.environ, "STEPFS_DIR": str(directory)}, umask=0o077)
    assert directory.parent.stat().st_mode & 0o777 == directory.stat().st_mode & 0o777 == 0o755


def test_the_unit_leaves_no_core():
    assert unit()["LimitCORE"] == ["0"]


def test_the_unit_does_not_restart_what_a_restart_cannot_help():
    from stepfs import errors  # noqa: PLC0415

    kinds = [
        errors.UsageError, errors.AbsentError, errors.RefusedError, errors.CorruptError, errors.FencedError,
    ]  # fmt: skip
    (listed,) = unit()["RestartPreventExitStatus"]
    assert {int(code) for code in listed.split()} == {kind.exit_code for kind in kinds}
    assert errors.StoreUnreachableError.exit_code not in {int(code) for code in listed.split()}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_the_shape_kubernetes_wants(manifest):
    for document in yaml.safe_load_all(manifest.read_text()):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_the_shape_check_can_fail():
    document = yaml.safe_load(MANIFESTS[0].read_text())
    document["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPropagtion"] = "Bidirectional"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_propagates_its_mount_bounds_its_memory_and_sets_only_what_exists(manifest):
    document = yaml.safe_load(manifest.read_text())
    pod = document["spec"]["template"]["spec"] if document["kind"] == "DaemonSet" else document["spec"]
    containers = pod.get("initContainers", []) + pod["containers"]
    (stepfs,) = [c for c in containers if c["name"] == "stepfs"]
    program = shlex.split(stepfs["command"][2].rpartition("exec ")[2])
    assert program[:2] == ["stepfs", "mount"]
    mount_point = Path(program[3])
    (shared,) = [v for v in stepfs["volumeMounts"] if v.get("mountPropagation") == "Bidirectional"]
    assert mount_point.is_relative_to(shared["mountPath"])
    assert stepfs["securityContext"]["privileged"]  # which Bidirectional asks for
    assert stepfs["resources"]["limits"]["memory"]
    assert stepfs["lifecycle"]["preStop"]["exec"]["command"] == ["stepfs", "unmount", str(mount_point)]
    assert str(mount_point) in " ".join(stepfs["livenessProbe"]["exec"]["command"])
    assert {e["name"] for e in stepfs["env"] if e["name"].startswith("STEPFS_")} <= variables()
    assert not any("KEY" in e["name"] or "SECRET" in e["name"] for e in stepfs["env"])
    for trainer in (c for c in containers if c is not stepfs):
        seen = [v for v in trainer["volumeMounts"] if v["name"] == shared["name"]]
        assert [v["mountPropagation"] for v in seen] == ["HostToContainer"]


@pytest.mark.parametrize("policy", sorted((DEPLOY / "policies").glob("*.json")), ids=lambda path: path.stem)
def test_a_policy_names_only_what_stepfs_stores(policy):
    for statement in json.loads(policy.read_text())["Statement"]:
        assert statement["Effect"] == "Allow"
        assert all(re.fullmatch(r"s3:[A-Za-z]+", action) for action in statement["Action"])
        assert all(r.startswith("arn:aws:s3:::BUCKET") for r in statement["Resource"])
        writes = {"s3:PutObject", "s3:DeleteObject"} & set(statement["Action"])
        assert not writes or all(r.count("/") >= 2 for r in statement["Resource"])  # never the whole lake


# What mount(8) calls, and the `stepfs` it must become.
CALLS = [
    (["s3://b/r", "/m", "-o", "rw"], ["mount", "s3://b/r", "/m", "--daemon"]),
    (
        ["s3://b/r", "/m", "-s", "-n", "-v", "-o", "ro,_netdev,nofail,x-systemd.requires=a.service,group=g,wait=300"],
        ["mount", "s3://b/r", "/m", "--daemon", "--group=g", "--wait=300"],
    ),
    (
        ["l", "/m", "-o", "user,nosuid,nodev,noexec,noatime,nodiratime,relatime,no-prime"],
        ["mount", "l", "/m", "--daemon", "--no-prime"],
    ),
    (
        ["l", "/m x", "-t", "stepfs", "-o", 'allow_other,ranks="0-3,8",mesh="pp=2,dp=4",poll=1s'],
        ["mount", "l", "/m x", "--daemon", "--allow-other", "--ranks=0-3,8", "--mesh=pp=2,dp=4", "--poll=1s"],
    ),
    (["l", "/m", "-o", "group=$(id) *"], ["mount", "l", "/m", "--daemon", "--group=$(id) *"]),
]


@pytest.mark.parametrize(("arguments", "expected"), CALLS)
def test_the_mount_helper_translates(arguments, expected, tmp_path):
    stand_in = tmp_path / "stepfs"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    assert json.loads(helper(arguments, stand_in).stdout) == expected


@pytest.mark.parametrize(
    ("arguments", "code"), [
        (["l"], 1), (["l", "/m", "-x"], 1), (["l", "/m", "-o", 'ranks="0,1'], 1), (["l", "/m", "-f"], 0),
        (["l", "/m"], 32),
    ],
)  # fmt: skip
def test_the_mount_helpers_exit_status_is_mount_8s(arguments, code, tmp_path):
    stand_in = tmp_path / "stepfs"
    stand_in.write_text("#!/bin/sh\nexit 4\n")
    stand_in.chmod(0o755)
    assert helper(arguments, stand_in).returncode == code


def helper(arguments, stand_in):
    return ran([str(DEPLOY / "mount.stepfs"), *arguments], env={"STEPFS": str(stand_in), "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_with_a_scrape_port_serves_it_outside_of_the_pod(manifest):
    text = manifest.read_text()
    assert ("name: STEPFS_METRICS_PORT" in text) == ("name: STEPFS_METRICS_ADDRESS" in text)


def pods():
    for manifest in MANIFESTS:
        document = yaml.safe_load(manifest.read_text())
        is_set = document["kind"] == "DaemonSet"
        yield document, document["spec"]["template"]["spec"] if is_set else document["spec"]


def test_daemons_see_the_processes_that_wait():
    for _, pod in pods():
        assert pod.get("hostPID") or pod.get("shareProcessNamespace")


def test_no_variable_of_a_service_is_taken_for_an_option():
    assert all(pod["enableServiceLinks"] is False for _, pod in pods())


def test_a_daemon_set_replaces_no_mount_by_itself_and_runs_on_tainted_gpu_nodes():
    ((document, pod),) = [(d, p) for d, p in pods() if d["kind"] == "DaemonSet"]
    assert document["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert "nvidia.com/gpu" in {toleration["key"] for toleration in pod["tolerations"]}


@pytest.mark.parametrize(
    ("file", "option"), [("stepfs@.service", "STEPFS_ALLOW_OTHER=1"), ("mount.stepfs", "`allow_other`")]
)
def test_what_trainers_of_other_users_need_is_said(file, option):
    comments = [line for line in (DEPLOY / file).read_text().splitlines() if line.startswith("#")]
    assert any(option in line for line in comments)
