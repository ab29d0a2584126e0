"""What importing and `--help` may load: counted in modules, which is exact, not in seconds, which is not."""

from __future__ import annotations

import sys

import pytest
from finished import ran

HEAVY = {"torch", "boto3", "botocore", "pyfuse3", "numpy", "tokenizers", "safetensors", "ray", "obstore"}


def modules_after(script: str) -> set[str]:
    """The top-level ones."""
    return {name.partition(".")[0] for name in all_modules_after(script)}


def all_modules_after(script: str) -> set[str]:
    program = f"import sys\n{script}\nprint(' '.join(sys.modules), file=sys.stderr)"
    done = ran([sys.executable, "-c", program], check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "module", [
        "stepfs", "stepfs.errors", "stepfs.training", "stepfs.shuffled_steps", "stepfs.lake.identity",
        "stepfs.lake.log.reader", "stepfs.view.tree", "stepfs.lake.verify.lake", "stepfs_producer",
    ],
)  # fmt: skip
def test_the_core_imports_nothing_heavy(module):
    assert not modules_after(f"import {module}") & HEAVY


HELP = "try:\n    {module}.main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_of_stepfs_loads_not_even_the_event_loop(arguments):
    script = f"import stepfs.cli\nsys.argv = ['x', *{arguments!r}]\n" + HELP.format(module="stepfs.cli")
    loaded = modules_after(script)
    assert not loaded & (HEAVY | {"trio", "msgpack", "rich"})
    assert len(loaded) < 200, "help takes 0.2 s with about 110 top-level modules, most of them the interpreter's"


@pytest.mark.parametrize("arguments", [["--help"], ["text", "--help"], ["check", "--help"], ["simulate", "--help"]])
def test_help_of_stepfs_produce_is_light(arguments):
    script = f"import stepfs_producer.cli\nsys.argv = ['x', *{arguments!r}]\n"
    assert not modules_after(script + HELP.format(module="stepfs_producer.cli")) & (HEAVY | {"rich", "yaml"})


@pytest.mark.parametrize("command", ["init", "ls", "status", "verify", "doctor", "mount", "unmount"])
def test_help_of_a_command_is_as_light(command):
    script = f"import stepfs.cli\nsys.argv = ['stepfs', {command!r}, '--help']\n" + HELP.format(module="stepfs.cli")
    assert not modules_after(script) & (HEAVY | {"trio"})


def test_a_command_on_a_directory_loads_no_other_store_no_second_parser_and_no_other_command(tmp_path, monkeypatch):
    monkeypatch.delenv("STEPFS_GRACE")  # for a variable of another command all are asked
    lake = (tmp_path / "lake").as_uri()
    script = f"import stepfs.cli\nsys.argv = ['stepfs', 'init', {lake!r}, '--slices', '2']\n"
    loaded = all_modules_after(script + HELP.format(module="stepfs.cli"))
    assert "trio" in loaded
    assert not loaded & (HEAVY | {"pydantic"})  # as typer would from 0.29 on: 0.2 s of 0.5
    commands = {name for name in loaded if name.startswith("stepfs.cli.commands.")}
    assert commands == {"stepfs.cli.commands.init"}


def test_a_mount_loads_a_server_of_metrics_only_when_it_serves_some():
    assert not modules_after("import stepfs.mount.session") & {"prometheus_client", "http", "wsgiref"}


def test_the_command_that_starts_a_daemon_loads_no_event_loop_and_no_codec(tmp_path):
    absent = str(tmp_path / "absent")
    script = (
        "import stepfs.cli, stepfs.cli.commands.mount, stepfs.checkpoints.formats, stepfs.limits, stepfs.mount.daemon\n"
        f"sys.argv = ['stepfs', 'mount', 'file:///nowhere', {absent!r}]\n"
        "try:\n    stepfs.cli.main()\nexcept SystemExit as end:\n    assert end.code == 3, end.code"
    )
    loaded = modules_after(script)
    assert not loaded & (HEAVY | {"trio", "msgpack", "crc32c", "rich"})
