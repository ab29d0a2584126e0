"""What stands before the installed commands on PATH, for the pages that are followed, does what they do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sysconfig

import pytest
from loadedpath import loaded_commands
from test_cli_process import STEPFS
from test_produce_text import PROGRAM


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    with loaded_commands(tmp_path_factory.mktemp("path") / "bin") as directory:
        yield directory


@pytest.mark.parametrize(
    "words",
    [
        [STEPFS, "ls", "lake.of.nobody"],  # names a file: URL, made of the directory it runs in
        [STEPFS, "--version"],
        [PROGRAM, "run", "plan.yaml", "file:///nowhere", "--nonsense"],
    ],
    ids=["a-url", "version", "usage"],
)
def test_a_command_prints_and_ends_as_the_installed_one_does(commands, tmp_path, words):
    env = {**os.environ, "STEPFS_NOBODY_KNOWS": "1"}  # said on stderr: the environment is the one of now
    found = []
    for directory in (commands, sysconfig.get_path("scripts")):
        command = [f"{directory}/{os.path.basename(words[0])}", *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False, timeout=100)
        found.append((done.returncode, done.stdout, done.stderr))
    assert found[0] == found[1]
    assert found[0][1] + found[0][2]


def test_python_runs_a_text_and_ends_with_its_code(commands):
    text = "import sys\nif __name__ == '__main__':\n    print(sys.argv, input())\n    sys.exit(7)"
    done = subprocess.run(
        [f"{commands}/python", "-c", text, "a"], input="said", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "['-c', 'a'] said\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_one_behind_it_too(commands, number):
    text = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()"
    with subprocess.Popen([f"{commands}/python", "-c", text], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        behind = os.pidfd_open(int(front.stdout.readline()))
        front.send_signal(number)
        assert front.stdout.read() == "", "the pipe is closed when both are gone"
        assert front.wait() == -number
    assert select.select([behind], [], [], 60)[0], "it runs on"
    os.close(behind)
