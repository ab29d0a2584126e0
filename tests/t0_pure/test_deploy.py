"""What `scripts/deploy` hands to other machines: judged by systemd, Kubernetes and a shell, as far as they are here."""

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

import nightly
import pytest
import typer
import yaml
from finished import ran
from programs import commands_of

from stepfs import __version__, errors
from stepfs.cli.app import app
from stepfs.csi.__main__ import parsed
from stepfs.csi.holder import SECRET
from stepfs.csi.node import OPTIONS
from stepfs_producer.cli.app import app as producer_app

DEPLOY = Path(__file__).parents[2] / "scripts/deploy"
BASE, EXAMPLE = DEPLOY / "kubernetes", DEPLOY / "kubernetes-example"
MANIFESTS = [
    DEPLOY / "ray.yaml",
    *(
        BASE / f"{name}.yaml"
        for name in ("daemonset", "sidecar", "reclaim", "replicate", "trainer", "accounts", "csi", "csi-volume")
    ),
]
MOUNT, RECLAIM, TIMER = "stepfs@.service", "stepfs-reclaim@.service", "stepfs-reclaim@.timer"
EXPOSURE_MAX = {MOUNT: 5.0, RECLAIM: 2.0}
OF_AWS = {"AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_PROFILE", "AWS_CA_BUNDLE"}
OF_OTHERS = {"trainer", "registrar", "liveness"}
FINAL = {
    kind.exit_code
    for kind in (errors.UsageError, errors.AbsentError, errors.RefusedError, errors.CorruptError, errors.FencedError)
}  # another start mends none of these

# Directives of [Service] that leave the mount namespace alone. One that is missing here belongs here only after a look
# at what it does to mounts: under a namespace of its own the daemon's mount would be seen by nobody.
KEEPS_THE_NAMESPACE = {
    "Type", "NotifyAccess", "Environment", "EnvironmentFile", "ExecReload", "ExecStartPre", "ExecStart",
    "TimeoutStopSec", "KillMode", "WatchdogSec", "FileDescriptorStoreMax",
    "Restart", "RestartSec", "RestartPreventExitStatus", "MemoryMax", "LimitNOFILE", "LimitCORE", "UMask",
    "NoNewPrivileges", "CapabilityBoundingSet", "DevicePolicy", "DeviceAllow", "SystemCallFilter",
    "SystemCallErrorNumber", "SystemCallArchitectures", "RestrictAddressFamilies", "RestrictNamespaces",
    "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute", "ProtectClock",
    "ProtectHostname",
}  # fmt: skip


def service_of(unit: str) -> dict[str, str]:
    lines = (DEPLOY / unit).read_text().partition("[Service]\n")[2].partition("\n[")[0].splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def documents() -> list[tuple[str, dict]]:
    return [(path.stem, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def containers(document: dict) -> list[dict]:
    spec = document.get("spec", {})
    for name in ("jobTemplate", "template"):
        spec = spec[name]["spec"] if name in spec else spec
    return [*spec.get("initContainers", []), *spec.get("containers", [])]


@pytest.mark.parametrize("unit", EXPOSURE_MAX)
def test_systemd_finds_no_mistake_in_a_unit_and_it_is_hardened(unit, tmp_path):
    assert shutil.which("systemd-analyze"), "scripts/setup installs it"
    stepfs = shutil.which("stepfs", path=sysconfig.get_path("scripts"))
    for name in (MOUNT, RECLAIM, TIMER):
        text = (DEPLOY / name).read_text()
        (tmp_path / name.replace("@", "@run")).write_text(text.replace("/usr/local/bin/stepfs", str(stepfs)))
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    done = ran(["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir())], env=environment)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "stepfs" in line]) == (0, [])
    said = ran(["systemd-analyze", "security", "--offline=true", str(DEPLOY / unit)], env=environment).stdout
    (exposure,) = re.findall(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert float(exposure) <= EXPOSURE_MAX[unit]


def test_the_mounts_unit_keeps_the_namespace_and_is_not_restarted_in_vain():
    service = service_of(MOUNT)
    assert set(service) <= KEEPS_THE_NAMESPACE
    assert shlex.split(service["ExecStart"])[1:] == ["mount", "${STEPFS_LAKE}", "${STEPFS_DIR}", "--foreground"]
    assert shlex.split(service["ExecReload"])[1:] == ["mount", "${STEPFS_LAKE}", "${STEPFS_DIR}", "--replace"]
    assert service["NotifyAccess"] == "main", "the keeper speaks for its daemons"
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == FINAL
    assert service_of(RECLAIM)["EnvironmentFile"] != service["EnvironmentFile"], "each has its own credentials"


def test_parents_of_the_mount_point_are_for_everybody(tmp_path):
    """The unit's umask is for the cache and the log; a mount with --allow-other lies below what this makes."""
    command = shlex.split(service_of(MOUNT)["ExecStartPre"].removeprefix("-").replace("$$", "$"))
    directory = tmp_path / "a b" / "mnt"
    subprocess.run(command, check=True, env={**os.environ, "STEPFS_DIR": str(directory)}, umask=0o077)
    assert directory.parent.stat().st_mode & 0o777 == directory.stat().st_mode & 0o777 == 0o755


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["ray", "daemonset", "sidecar", "reclaim", "replicate", "trainer", "accounts", "csi", "csi-volume"]
)
def test_kubernetes_accepts_a_manifest(name):
    nightly.needs("kubernetes_validate")
    import kubernetes_validate  # noqa: PLC0415

    found = [document for of, document in documents() if of == name]
    for document in found:
        kubernetes_validate.validate(document, "1.30", strict=True)
        stepfs = [one["image"] for one in containers(document) if one["name"] not in OF_OTHERS]
        assert set(stepfs) <= {f"registry.example/stepfs:{__version__}{'-ray' * (name == 'ray')}"}
    wrong = {**found[0], "metadata": {"nmae": "x"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


@pytest.mark.nightly
@pytest.mark.parametrize("directory", [BASE, EXAMPLE], ids=["base", "example"])
def test_kubernetes_accepts_what_kustomize_builds(directory):
    """By kubectl where it is installed; what it would join must be there everywhere."""
    nightly.needs("kubernetes_validate")
    import kubernetes_validate  # noqa: PLC0415

    page = yaml.safe_load((directory / "kustomization.yaml").read_text())
    assert all((directory / name).exists() for name in page["resources"])
    if shutil.which("kubectl"):
        for document in yaml.safe_load_all(ran(["kubectl", "kustomize", str(directory)], check=True).stdout):
            kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("name", ["daemonset", "sidecar"])
def test_a_mount_in_a_pod_is_seen_by_its_trainer_and_ends_with_it(name):
    ((_, document),) = [found for found in documents() if found[0] == name]
    (stepfs,) = [one for one in containers(document) if one["name"] == "stepfs"]
    program = shlex.split(stepfs["command"][2].rpartition("exec ")[2].replace("$STEPFS_GROUP", "run"))
    assert program[:2] == ["stepfs", "mount"]
    (shared,) = [volume for volume in stepfs["volumeMounts"] if volume.get("mountPropagation") == "Bidirectional"]
    assert Path(program[3]).is_relative_to(shared["mountPath"])
    words = " ".join(stepfs["lifecycle"]["preStop"]["exec"]["command"]).replace("$STEPFS_GROUP", "run")
    assert f"stepfs unmount {program[3]}" in words.replace('"', "")
    for probe in ("startupProbe", "livenessProbe"):
        assert program[3] in " ".join(stepfs[probe]["exec"]["command"]).replace("$STEPFS_GROUP", "run")
    if name == "daemonset":  # its trainers are pods of their own
        assert stepfs["resources"]["requests"] == stepfs["resources"]["limits"], "Guaranteed"
    for trainer in (one for one in containers(document) if one is not stepfs):
        seen = [volume for volume in trainer["volumeMounts"] if volume["name"] == shared["name"]]
        assert [volume["mountPropagation"] for volume in seen] == ["HostToContainer"]


def test_every_variable_of_a_manifest_is_one_that_stepfs_reads():
    read = {parameter.envvar for command in commands_of(app).values() for parameter in command.params}
    read |= {"STEPFS_LOG_FORMAT", "STEPFS_LOG_DIR", "STEPFS_DEBUG", "STEPFS_LAKE"} | OF_AWS
    lines = (BASE / "stepfs.env").read_text().splitlines()
    values = {line.removeprefix("# ").partition("=")[0] for line in lines if re.match(r"(# )?[A-Z_0-9]+=", line)}
    given = {
        variable["name"]
        for _, document in documents()
        for one in containers(document)
        for variable in one.get("env", [])
    }
    assert values <= read
    assert {name for name in given if name.startswith("STEPFS_")} <= read
    used = {
        name for of, document in documents() if of != "ray" for name in re.findall(r"\$\(?(STEPFS_\w+)", str(document))
    }
    assert used <= values
    assert not any("SECRET" in name or "KEY" in name for name in values)


def test_a_secret_gives_a_container_keys_by_name_and_no_other_variable():
    """Who edits it may not set LD_PRELOAD, PYTHONPATH or AWS_CONFIG_FILE in a container with more rights."""
    keys = {name for name in SECRET if re.search("_KEY(_ID)?$|_TOKEN$", name) and not name.startswith("STEPFS")}
    taken: dict[str, set[str]] = {}
    for of, document in documents():
        for one in containers(document):
            assert not any("secretRef" in source for source in one.get("envFrom", [])), of
            for variable in one.get("env", []):
                if (place := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    assert place["key"] == variable["name"]
                    assert place.get("optional", False) == (variable["name"] in keys)
                    taken.setdefault(f"{of} {one['name']}", set()).add(variable["name"])
                else:
                    assert "SECRET" not in variable["name"]
                    assert "KEY" not in variable["name"]
    alike = dict.fromkeys(["daemonset stepfs", "sidecar stepfs", "reclaim reclaim", "replicate replicate"], keys)
    assert taken == alike | dict.fromkeys(["ray produce", "ray node"], keys | {"RAY_AUTH_TOKEN"})


def test_the_command_of_the_ray_job_is_one_and_its_final_endings_are_final():
    job = next(document for of, document in documents() if of == "ray" and document["kind"] == "Job")
    line = containers(job)[0]["command"][2].rpartition("exec ")[2]
    words = shlex.split(line.replace("$STEPFS_LAKE", "file:///lake").replace("$POD_IP", "10.0.0.4"))
    assert words[:2] == ["stepfs-produce", "run"]
    given = typer.main.get_group(producer_app).commands["run"].make_context("run", words[2:]).params
    assert (given["engine"], given["ray_address"], given["workers"]) == ("ray", "10.0.0.4:6379", "2:16")
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == FINAL


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


def test_the_drivers_pod_runs_what_the_volume_names():
    (driver, daemons), (volume, *_) = (
        [document for of, document in documents() if of == name] for name in ("csi", "csi-volume")
    )
    assert volume["spec"]["csi"]["driver"] == driver["metadata"]["name"] == "stepfs.csi"
    assert driver["spec"]["volumeLifecycleModes"] == ["Persistent"], "attributes name places of the node: an admin's"
    assert set(volume["spec"]["csi"]["volumeAttributes"]) <= {"lake", *OPTIONS}
    holder, plugin = containers(daemons)[:2]
    for container in (holder, plugin):
        words = container["command"]
        module = words.index("stepfs.csi")
        assert words[module - 2 : module] == ["python", "-m"]
        given = parsed(words[module + 1 :])
        places = {one["mountPath"]: one.get("mountPropagation") for one in container["volumeMounts"]}
        assert places[given.base] == "Bidirectional"
        assert str(Path(given.holder).parent) in places
    assert str(Path(given.endpoint).parent) in places
    monitors = {
        one["metadata"]["name"]: one["spec"] for one in yaml.safe_load_all((BASE / "podmonitor.yaml").read_text())
    }
    assert monitors["stepfs-csi"]["selector"]["matchLabels"] == daemons["spec"]["template"]["metadata"]["labels"]
    (endpoint,) = monitors["stepfs-csi"]["podMetricsEndpoints"]
    assert {"name": endpoint["port"], "containerPort": given.metrics_port} in plugin["ports"]
    assert endpoint["honorLabels"], "the plugin names the volumes: an instance each"


def test_the_manual_has_every_attribute_of_a_volume():
    page = (
        (DEPLOY.parents[1] / "fs/OPERATIONS.md")
        .read_text()
        .partition("`stepfs help mount` says: ")[2]
        .partition(". ")[0]
    )
    assert re.findall(r"`([a-z-]+)`", page) == ["lake", *OPTIONS]


def test_the_manual_has_every_name_that_the_secret_of_a_volume_may_have():
    page = (DEPLOY.parents[1] / "fs/OPERATIONS.md").read_text().partition("* The Secret of ")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`([A-Z0-9_]+)`", page)) == sorted(SECRET)
