"""Ctrl-C before a command's own code runs: the process ends by the signal and prints nothing."""

from __future__ import annotations

import signal
import sys

import pytest
from programs import ran

# SIGINT comes at the import of a module, as from a hurried hand.
INTERRUPTED = """
import signal, sys
class Hand:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Hand())
signal.signal(signal.SIGINT, {handler})
from {package}.cli import main
sys.argv = {argv!r}
main()
"""


def interrupted(package, module, argv, *, handler="signal.default_int_handler"):
    code = INTERRUPTED.format(package=package, module=module, argv=argv, handler=handler)
    return ran([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("package", "module", "argv"),
    [
        ("stepfs", "typer", ["stepfs", "--help"]),
        ("stepfs", "stepfs.cli.failure", ["stepfs", "ls", "file:///nothing"]),
        ("stepfs", "stepfs.cli.commands.ls", ["stepfs", "ls", "file:///nothing"]),
        ("stepfs_producer", "typer", ["stepfs-produce", "--help"]),
        ("stepfs_producer", "stepfs_producer.cli.text", ["stepfs-produce", "--help"]),
    ],
)
def test_an_interrupt_while_loading_prints_nothing(package, module, argv):
    done = interrupted(package, module, argv)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_once_the_command_runs_it_is_exit_130():
    done = interrupted("stepfs", "stepfs.lake.log.reader", ["stepfs", "ls", "file:///nothing"])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_that_is_ignored_stays_ignored():
    done = interrupted("stepfs", "typer", ["stepfs", "--version"], handler="signal.SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stepfs ")
