"""A terminal: what a program that writes to it leaves on its screen, and every byte that it wrote."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sysconfig
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finished import PATIENCE_S

# Not `python -m`: where Ctrl-C comes inside an `exec`, as dataclasses are made, that ends by the signal whatever we say.
_SCRIPTS = Path(sysconfig.get_path("scripts"))
_CONTROL = re.compile(r"\x1b\[(\??)(\d*)[\d;]*([A-Za-z])|([\s\S])")


class Screen:
    """Of what rich sends it knows all, and refuses the rest."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cursor, self.other, self.scrolled, self.wrapped = True, False, 0, 0
        self._clear()

    def _clear(self) -> None:
        self._rows = [[" "] * self.width for _ in range(self.height)]
        self._x = self._y = 0

    @property
    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip()

    def feed(self, text: str) -> None:
        for question, number, command, letter in _CONTROL.findall(text):
            if letter:
                self._put(letter)
            elif question:
                assert number in {"25", "1049"}, number
                if number == "25":
                    self.cursor = command == "h"
                else:
                    self.other = command == "h"
                    self._clear()
            elif command == "A":
                self._y = max(0, self._y - int(number or 1))
            elif command == "K":
                self._rows[self._y] = [" "] * self.width
            elif command == "H":
                self._x = self._y = 0
            else:
                assert command == "m", command

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._x = 0
        elif letter == "\n":
            self._y += 1
            if self._y == self.height:
                self._rows = [*self._rows[1:], [" "] * self.width]
                self._y, self.scrolled = self._y - 1, self.scrolled + 1
        else:
            if self._x == self.width:
                self.wrapped += 1
                self._put("\r")
                self._put("\n")
            self._rows[self._y][self._x] = letter
            self._x += 1


class Terminal:
    """A command that has a terminal for its standard streams."""

    def __init__(
        self, words: Sequence[object], width: int = 80, height: int = 24, env: Mapping[str, str] | None = None
    ) -> None:
        self.screen, self.written, self._ours = Screen(width, height), b"", -1
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        inherited = {
            name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}
        }  # as pytest-xdist sets
        variables = {**inherited, "TERM": "xterm-256color", **(env or {})}
        self.process = subprocess.Popen(
            [_SCRIPTS / str(words[0]), *map(str, words[1:])], stdin=theirs, stdout=theirs, stderr=theirs, env=variables
        )
        os.close(theirs)

    def until(self, seen: Callable[[Screen], bool]) -> None:
        """Read until `seen` holds; an `AssertionError` with the screen if the command ends before."""
        while not seen(self.screen):
            assert self._read(), self.screen.text

    def ended(self, number: signal.Signals | None = None) -> int:
        """The exit code, once it has ended, if need be by a signal."""
        if number is not None:
            self.process.send_signal(number)
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait()

    def left_alone(self) -> int:
        """The exit code of a command whose terminal goes."""
        os.close(self._ours)
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE_S)
        assert ready, f"nothing more is written:\n{self.screen.text}"
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self.written += piece
        self.screen.feed(piece.decode(errors="replace"))
        return bool(piece)
