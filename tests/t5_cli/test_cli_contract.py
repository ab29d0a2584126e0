"""What holds for every command: environment variables, help, versions, completion."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from finished import ran
from lakes import stepfs
from programs import commands_of

from stepfs.cli.app import app
from stepfs_producer.cli.app import app as produce

COMMANDS = commands_of(app)
ALL = [*COMMANDS.values(), *commands_of(produce).values()]
NO_VARIABLE = {"help", "version"}
# STEPFS_RANKS is what a mount's node reads, STEPFS_STEPS what it shows.
OF_ANOTHER_MEANING = {("init", "ranks"), ("simulate", "steps"), ("replay", "steps"), ("replay", "ranks")}


@pytest.mark.parametrize("command", ALL, ids=lambda each: each.name)
def test_every_option_has_its_environment_variable_and_is_explained(command):
    for parameter in command.params:
        assert parameter.help or parameter.name == "help", parameter.name
        if parameter.param_type_name != "option" or parameter.name in NO_VARIABLE:
            continue
        if (command.name, parameter.name) in OF_ANOTHER_MEANING:
            assert parameter.envvar is None
            continue
        option = next(name for name in parameter.opts if name.startswith("--"))
        expected = "STEPFS_" + option.removeprefix("--").replace("-", "_").upper()
        assert parameter.envvar == expected, option


def test_an_unknown_option_is_a_usage_error():
    ended = stepfs("ls", "--no-such-option")
    assert ended.code == 2
    assert "--no-such-option" in ended.err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_empty_word_is_never_a_name(command):
    """A variable that is not set would otherwise be the current directory."""
    arguments = [each for each in COMMANDS[command].params if each.param_type_name == "argument"]
    for place, argument in enumerate(arguments):
        if argument.type.name == "text":
            ended = stepfs(command, *["file:///nowhere"] * place, "")
            assert (ended.code, ended.out) == (2, ""), argument.name
            assert "is empty" in ended.err, argument.name


@pytest.mark.parametrize(("package", "command"), [("stepfs", "stepfs"), ("stepfs_producer", "stepfs-produce")])
def test_each_package_says_its_version_and_runs_as_a_module(package, command):
    version = importlib.import_module(package).__version__
    assert version == importlib.metadata.version("stepfs")
    ended = ran([sys.executable, "-m", package, "--version"], check=True)
    assert ended.stdout == f"{command} {version}\n"


def test_exit_codes_are_in_the_help():
    assert "6 store unreachable" in " ".join(stepfs("--help").out.split())


def test_without_arguments_it_helps():
    ended = stepfs()
    assert "Commands:" in ended.out + ended.err


def completing(program: str, **variables: str) -> str:
    env = {"PATH": os.environ["PATH"], **variables}
    path = Path(sysconfig.get_path("scripts")) / program
    done = ran([path], env=env, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("stepfs mount --cache-", ["--cache-dir", "--cache-size"]),
        ("stepfs-produce ch", ["check"]),
        ("stepfs-produce check --no-s", ["--no-sources"]),
    ],
)
def test_words_are_completed(words, expected):
    program, *more = words.split()
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    shown = completing(program, **{variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(more))})
    assert shown.split() == expected


def test_a_shell_is_given_something_to_source():
    assert "_STEPFS_COMPLETE=complete_" in completing("stepfs", _STEPFS_COMPLETE="source_bash")
