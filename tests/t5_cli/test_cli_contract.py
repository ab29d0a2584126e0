"""What holds for every command: environment variables, help, versions, completion."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import forked
import pytest
import servers
import typer
from finished import ran
from lakes import SLICES, commit, stepfs
from programs import commands_of
from typer.testing import CliRunner

from stepfs.cli import program
from stepfs.cli.app import app
from stepfs_producer.cli.app import app as produce

COMMANDS = commands_of(app)
ALL = [*COMMANDS.values(), *commands_of(produce).values()]
# A name that a unit, a manifest or a pod may set is a promise. None destroys, and none is said of one call.
VARIABLES = {
    "checkpoint": "ENDPOINT_URL GROUP",
    "mount": "ALLOW_OTHER CACHE_DIR CACHE_SIZE CHECKPOINT_DIR ENDPOINT_URL GROUP LOG_FORMAT MEMORY MESH METRICS_ADDRESS METRICS_PORT NEAR "
    "NEXT_STEP POLL PREFETCH PRIME RANKS RECOVER SPARE STEPS WAIT WAIT_FOR_LAKE WORLD",
    "reclaim": "ENDPOINT_URL EVERY GRACE MAX_PERCENT",
    "replicate": "ENDPOINT_URL EVERY MEMORY",
    "run": "ENDPOINT_URL ENGINE LIMIT_STEPS LOG_FORMAT MAX_LEAD MAX_LIVE_BYTES MEMORY METRICS_ADDRESS METRICS_PORT PRODUCER_ID RAY_ADDRESS "
    "STEPS_PER_SECOND WORKERS",
    "text": "BATCH_SIZE ENDPOINT_URL EOS EXT LIMIT_STEPS LOG_FORMAT MEMORY PRODUCER_ID SEQ_LEN SHARD SLICES TOKENIZER_FILE WORKERS",
}


@pytest.mark.parametrize("command", ALL, ids=lambda each: each.name)
def test_options_are_explained_and_the_variables_are_those_that_are_promised(command):
    found = set()
    for parameter in command.params:
        assert parameter.help or parameter.name == "help", parameter.name
        if parameter.envvar:
            option = next(name for name in parameter.opts if name.startswith("--"))
            assert parameter.envvar == "STEPFS_" + option.removeprefix("--").replace("-", "_").upper()
            found.add(parameter.envvar.removeprefix("STEPFS_"))
    assert found - {"ENDPOINT_URL"} == set(VARIABLES.get(command.name, "").split()) - {"ENDPOINT_URL"}


def test_a_service_of_kubernetes_is_no_option(file_url, monkeypatch):
    """Of a service called stepfs-metrics: every pod of its namespace has this variable."""
    monkeypatch.setenv("STEPFS_METRICS_PORT", "tcp://10.0.0.7:9464")
    monkeypatch.setenv("STEPFS_GRACE_PORT", "tcp://10.0.0.7:9464")
    ended = stepfs("mount", file_url, "/nowhere/at/all")
    assert "METRICS" not in ended.err
    assert ended.code == 3, ended.err


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


TREE = Path(__file__).parents[2]


def unknown(names):
    return list(program.unknown(names, typer.Context(typer.main.get_command(app))))


def test_every_variable_that_is_read_is_known():
    read = set()
    for each in (app, produce):
        read |= {p.envvar for sub in commands_of(each).values() for p in sub.params if p.envvar}
    assert {"STEPFS_RANKS", "STEPFS_LIMIT_STEPS", "STEPFS_EVERY"} <= read
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        for file in (TREE / package).rglob("*.py"):
            read |= set(re.findall(r"environ(?:\.get\(|\[)\"(STEPFS_\w+)\"", file.read_text()))
    unit = (TREE / "scripts/deploy/stepfs@.service").read_text()
    read |= set(re.findall(r"\$\{(STEPFS_\w+)\}", unit))
    assert unknown(read | {"STEPFS_SSE", "STEPFS_SSE_KMS_KEY_ID"}) == []


def test_every_setting_that_is_no_option_is_read():
    sources = "".join(file.read_text() for file in (TREE / "fs/stepfs").rglob("*.py") if file.name != "program.py")
    sources += (TREE / "scripts/deploy/stepfs@.service").read_text()
    assert {name for name in program._SETTINGS if name not in sources} == set()


@pytest.mark.parametrize(
    ("name", "near"), [
        ("STEPFS_PREFECH", "STEPFS_PREFETCH"), ("STEPFS_GRUOP", "STEPFS_GROUP"),
        ("STEPFS_CACHE_DIRECTORY", "STEPFS_CACHE_DIR"), ("STEPFS_XYZZY_PLUGH_QUUX", None),
    ],
)  # fmt: skip
def test_the_nearest_name_is_offered(name, near):
    (line,) = unknown([name, "STEPFS_GROUP", "PATH", "MY_STEPFS_X"])
    assert line.startswith(f"{name} is set and means nothing")
    assert line.endswith(f"do you mean {near}?") if near else line.endswith("nothing")


def test_what_kubernetes_sets_for_a_service_is_not_meant():
    names = ["STEPFS_SERVICE_HOST", "STEPFS_SERVICE_PORT", "STEPFS_SERVICE_PORT_HTTP", "STEPFS_PORT"]
    names += ["STEPFS_PORT_9464_TCP", "STEPFS_PORT_9464_TCP_ADDR", "STEPFS_READER_SERVICE_HOST"]
    assert unknown(names) == []


def test_every_command_says_it_once_and_prints_the_same(file_url):
    assert stepfs("init", file_url, "--slices", 1).err == ""
    for command in (["ls", file_url, "--json"], ["status", file_url, "--json"], ["verify", file_url]):
        plain = stepfs(*command)
        warned = stepfs(*command, env={"STEPFS_GRUOP": "secret\x1b[31m"})
        assert (warned.code, warned.out) == (plain.code, plain.out)
        assert warned.err == "stepfs: STEPFS_GRUOP is set and means nothing; do you mean STEPFS_GROUP?\n"
    json.loads(stepfs("ls", file_url, "--json", env={"STEPFS_GRUOP": "x"}).out)
    done = CliRunner().invoke(produce, ["text", "--help"], env={"STEPFS_SLICE": "2"})
    assert done.stderr.count("do you mean STEPFS_SLICES?") == 1


def test_completion_says_nothing():
    done = CliRunner().invoke(
        app,
        [],
        prog_name="stepfs",
        env={
            "_STEPFS_COMPLETE": "complete_bash",
            "COMP_WORDS": "stepfs s",
            "COMP_CWORD": "1",
            "STEPFS_GRUOP": "x",
        },
    )
    assert done.stdout.split() == ["show", "status", "seal"]
    assert done.stderr == ""


STEPFS = Path(sysconfig.get_path("scripts")) / "stepfs"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.ran("stepfs", arguments, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "reason"),
    [
        (["init", "s3://no-such-bucket/x", "--slices", "1"], {}, 3, "create it first"),
        (["ls", f"s3://{servers.BUCKET}/x"], {"AWS_SECRET_ACCESS_KEY": "wrong"}, 4, "AWS_SECRET_ACCESS_KEY"),
        (["ls", f"s3://{servers.BUCKET}/x", "--endpoint-url", "http://127.0.0.1:1"], {}, 6, "127.0.0.1:1"),
    ],
    ids=["bucket", "secret", "unreachable"],
)
def test_what_a_server_refuses_is_one_line_and_a_code(seaweed, arguments, environment, code, reason):
    ended = run(*arguments, **environment)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("stepfs: ")
    assert reason in ended.stderr
    assert servers.SECRET_KEY not in ended.stderr


def test_the_store_that_lies_is_refused_by_init_and_by_doctor(rclone):
    url = f"s3://{servers.BUCKET}/liar"
    environment = {**rclone.environment(), "AWS_ENDPOINT_URL_S3": rclone.endpoint_url}
    for command in (["init", url, "--slices", "1"], ["doctor", url]):
        ended = run(*command, **environment)
        assert ended.returncode == 4, ended
        assert "the condition is ignored" in ended.stdout + ended.stderr


def test_watching_shows_what_is_committed_until_interrupted(file_url):
    stepfs("init", file_url, "--slices", SLICES)
    with subprocess.Popen(
        [STEPFS, "status", file_url, "--watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["frontier"] == -1
            commit(file_url, range(2))
            frontier = -1
            while frontier != 1:
                frontier = json.loads(process.stdout.readline())["frontier"]
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "")


def test_output_may_be_cut_off(file_url):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(3))
    done = ran(["bash", "-c", f'"{STEPFS}" ls "{file_url}" | true; echo "${{PIPESTATUS[0]}}"'], check=True)
    assert done.stdout.strip() in {"0", "141"}
    assert done.stderr == ""


def test_it_runs_without_a_home_and_without_a_terminal():
    done = ran(
        [sys.executable, "-c", "from stepfs.cli import main; main()", "--version"],
        env={"PATH": os.environ["PATH"]},
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.startswith("stepfs ")
