"""The Kustomize base: its parts fit together, its values are variables that stepfs reads, and its image is ours."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from finished import ran
from test_deploy import variables

from stepfs import __version__

BASE = Path(__file__).parents[2] / "scripts/deploy/kubernetes"
EXAMPLE = BASE.parent / "kubernetes-example"
OF_AWS = {"AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_PROFILE", "AWS_CA_BUNDLE"}


def load(directory: Path) -> dict:
    return yaml.safe_load((directory / "kustomization.yaml").read_text())


def values() -> dict[str, str]:
    lines = [line for line in (BASE / "stepfs.env").read_text().splitlines() if line]
    shown = [re.sub(r"^# (?=[A-Z_0-9]+=)", "", line) for line in lines]  # commented ones must exist as well
    return dict(line.split("=", 1) for line in shown if not line.startswith("#"))


def containers(document: dict) -> list[dict]:
    spec = document["spec"]
    for name in ("jobTemplate", "template"):
        spec = spec[name]["spec"] if name in spec else spec
    return [*spec.get("initContainers", []), *spec["containers"]]


def manifests() -> dict[str, dict]:
    found = {name: yaml.safe_load((BASE / name).read_text()) for name in load(BASE)["resources"]}
    return {**found, "sidecar.yaml": yaml.safe_load((BASE / "sidecar.yaml").read_text())}


def test_the_base_and_the_example_name_what_exists():
    assert (EXAMPLE / load(EXAMPLE)["resources"][0]).resolve() == BASE
    (made,), (merged,) = load(BASE)["configMapGenerator"], load(EXAMPLE)["configMapGenerator"]
    assert made["envs"] == ["stepfs.env"]
    assert (merged["name"], merged["behavior"]) == (made["name"], "merge")
    assert not EXAMPLE.is_relative_to(BASE), "kustomize calls that a cycle"
    refs = {
        kind: {source[kind]["name"] for document in manifests().values() for container in containers(document)
               for source in container.get("envFrom", []) if kind in source}
        for kind in ("configMapRef", "secretRef")
    }  # fmt: skip
    assert refs["configMapRef"] == {made["name"]}
    told = (BASE / "kustomization.yaml").read_text()
    assert refs["secretRef"] == set(re.findall(r"secret generic (\S+)", told))


def test_values_are_variables_that_are_read():
    changed = dict(literal.split("=", 1) for literal in load(EXAMPLE)["configMapGenerator"][0]["literals"])
    assert {"STEPFS_LAKE", "STEPFS_GROUP", "STEPFS_RANKS"} <= set(changed) <= set(values())
    assert set(values()) <= variables() | OF_AWS | {"STEPFS_LAKE"}
    for name, document in manifests().items():
        used = set(re.findall(r"\$\(?(STEPFS_\w+)", str(document)))
        assert used <= set(values()), name
    assert not any("SECRET" in name or "KEY" in name for name in values())


def test_every_manifest_runs_the_image_of_this_version():
    named = {
        container["image"]
        for document in manifests().values()
        for container in containers(document)
        if container["name"] != "trainer"
    }
    assert named == {f"registry.example/stepfs:{__version__}"}
    (image,) = load(EXAMPLE)["images"]
    assert {f"{image['name']}:{image['newTag']}"} == named


def test_only_what_mounts_has_privileges():
    (job,) = containers(manifests()["reclaim.yaml"])
    assert job["args"] == ["reclaim", "$(STEPFS_LAKE)"]
    assert job["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = manifests()["reclaim.yaml"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert manifests()["reclaim.yaml"]["spec"]["concurrencyPolicy"] == "Forbid"
    for name in ("daemonset.yaml", "sidecar.yaml"):
        (mount,) = [c for c in containers(manifests()[name]) if c["name"] == "stepfs"]
        assert mount["securityContext"]["runAsUser"] == 0, "the image has another user, who may not allow others"


@pytest.mark.parametrize("directory", [BASE, EXAMPLE], ids=["base", "example"])
def test_kubernetes_accepts_what_kustomize_builds(directory):
    """By kubectl where it is installed; the manifests that it would join, everywhere."""
    documents = list(manifests().values())
    if shutil.which("kubectl"):
        done = ran(["kubectl", "kustomize", str(directory)], check=True)
        documents = list(yaml.safe_load_all(done.stdout))
    assert {"CronJob", "DaemonSet"} < {document["kind"] for document in documents}
    for document in documents:
        kubernetes_validate.validate(document, "1.30", strict=True)
