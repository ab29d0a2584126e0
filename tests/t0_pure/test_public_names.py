"""The public faces of both packages, and what importing and `--help` load: counted in modules, which is exact, not in seconds."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from finished import ran

import stepfs
import stepfs_producer
from api_page import page

FACES = [stepfs, stepfs_producer]


@pytest.mark.parametrize("face", ["stepfs", "stepfs_producer"])
def test_a_face_alone_loads_next_to_nothing(face):
    loaded = all_modules_after(f"import {face}")
    assert not {name.partition(".")[0] for name in loaded} & (HEAVY | {"trio", "msgpack"})
    ours = {name for name in loaded if name.partition(".")[0] in {"stepfs", "stepfs_producer"}}
    assert len(ours) <= 4, ours


@pytest.mark.parametrize(
    "names",
    [
        "stepfs.CheckpointHook, stepfs.StreamState, stepfs.ShuffledSteps",
        "stepfs.Lake, stepfs.StepDataset",
        "stepfs.torch.dump",
    ],
)
def test_a_public_name_of_readers_loads_neither_torch_nor_numpy(names):
    assert not modules_after(f"import stepfs\n{names}") & HEAVY


def test_a_producer_loads_no_plan():
    loaded = all_modules_after("import stepfs_producer\nstepfs_producer.Producer")
    assert "stepfs_producer.plan.part" not in loaded


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_is_there_once_under_its_name(face):
    for name in face.__all__:
        assert getattr(face, name) is getattr(face, name)
        assert name in dir(face)
    assert sorted(face.__all__, key=str.lower) == sorted(set(face.__all__), key=str.lower)


@pytest.mark.parametrize("face", FACES)
def test_type_checkers_see_the_names_that_there_are(face):
    """They read the imports under TYPE_CHECKING; programs get what `__all__` lists."""
    tree = ast.parse(Path(face.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seen) <= set(face.__all__) | set(getattr(face, "_MODULES", ()))
    for name, home in seen.items():
        assert getattr(face, name) is getattr(import_module(home), name), name
    eager = {"__version__", "Fenced", "Sealed"}
    assert set(face.__all__) - set(seen) <= eager


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_name_is_an_attribute_error_and_an_import_error(face):
    with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'Lakes'"):
        face.Lakes  # noqa: B018
    with pytest.raises(ImportError, match="Lakes"):
        exec(f"from {face.__name__} import Lakes", {})


def test_the_page_names_every_public_name():
    made = page()
    for package in (stepfs, stepfs_producer):
        for name in package.__all__:
            assert re.search(rf"\b{name}\b", made), name


HEAVY = {"torch", "boto3", "botocore", "pyfuse3", "numpy", "tokenizers", "safetensors", "ray", "obstore"}


def modules_after(script: str) -> set[str]:
    """The top-level ones."""
    return {name.partition(".")[0] for name in all_modules_after(script)}


def all_modules_after(script: str) -> set[str]:
    program = f"import sys\n{script}\nprint(' '.join(sys.modules), file=sys.stderr)"
    done = ran([sys.executable, "-c", program], check=True)
    return set(done.stderr.split())


def test_the_core_imports_nothing_heavy():
    modules = (
        "stepfs, stepfs.errors, stepfs.training, stepfs.shuffled_steps, stepfs.lake.identity, stepfs.lake.log.reader",
        "stepfs.view.tree, stepfs.lake.verify.data, stepfs_producer",
    )
    assert not modules_after(f"import {', '.join(modules)}") & HEAVY


HELP = "try:\n    {module}.main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_of_stepfs_loads_not_even_the_event_loop(arguments):
    script = f"import stepfs.cli\nsys.argv = ['x', *{arguments!r}]\n" + HELP.format(module="stepfs.cli")
    loaded = modules_after(script)
    assert not loaded & (HEAVY | {"trio", "msgpack", "rich"})
    assert len(loaded) < 200, "help takes 0.2 s with about 110 top-level modules, most of them the interpreter's"


def helps(module: str, *commands: str) -> str:
    """A script that asks for the help of one after the other."""
    one = "    " + HELP.format(module=module).replace("\n", "\n    ")
    return f"import {module}\nfor command in {commands}:\n    sys.argv = ['x', *command.split(), '--help']\n{one}"


def test_help_of_stepfs_produce_is_light():
    script = helps("stepfs_producer.cli", "", "text", "check", "simulate")
    assert not modules_after(script) & (HEAVY | {"rich", "yaml"})


def test_help_of_a_command_is_as_light():
    script = helps("stepfs.cli", "init", "ls", "status", "verify", "doctor", "mount", "unmount")
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
    assert not modules_after("import stepfs.mount.daemon.session") & {"prometheus_client", "http", "wsgiref"}


def test_the_command_that_starts_a_daemon_loads_no_event_loop_and_no_codec(tmp_path):
    absent = str(tmp_path / "absent")
    script = (
        "import stepfs.cli, stepfs.cli.commands.mount, stepfs.checkpoints.formats, stepfs._internal.limits, stepfs.mount.launch\n"
        f"sys.argv = ['stepfs', 'mount', 'file:///nowhere', {absent!r}]\n"
        "try:\n    stepfs.cli.main()\nexcept SystemExit as end:\n    assert end.code == 3, end.code"
    )
    loaded = modules_after(script)
    assert not loaded & (HEAVY | {"trio", "msgpack", "crc32c", "rich"})
