"""The manifest of a plan run by a Ray of its own: its shape, its image, and that its commands are ones that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import kubernetes_validate
import typer
import yaml

from stepfs import __version__, errors
from stepfs_producer.cli.app import app

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
