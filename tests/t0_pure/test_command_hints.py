"""Commands in messages are quoted for a shell: no message puts a value into a command by itself."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfs.errors import command

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("fs", "producer") for path in (ROOT / top).rglob("*.py"))
_VALUE = "\0"
_PROGRAMS = r"(?:stepfs|stepfs-produce|umount|fusermount3|mkdir|chmod|chown|rm|mv|kill|ls|cat)"
# A program and words of a command right before a value, in backquotes or after a colon.
_BY_HAND = re.compile(rf"(?:`|: |^|\|\| ){_PROGRAMS} (?:[\w@%+=:,./…|-]+ )*[\w@%+=:,./-]*{_VALUE}")
_BY_PERCENT = re.compile(rf"`{_PROGRAMS} [^`]*%[sdr]")


def by_hand(source: str) -> Iterator[str]:
    """Messages of a module that put a value into a command without `command`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            values = (part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
            text = "".join(map(str, values))
            if _BY_HAND.search(text):
                yield text.replace(_VALUE, "{}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _BY_PERCENT.search(node.value):
            yield node.value


@pytest.mark.parametrize(
    "message", [
        'f"{a}: unmount it with `stepfs unmount {a}`"',
        'f"run `fusermount3 -uz {a}` as its owner"', 'f"mkdir -p {a}"', 'f"as root: chmod u+s {a}"',
        'f"`umount -f {a} || umount -l {a}`"',
        'f"do this: stepfs fork {a}@{b} NEW --skip {c}"', 'log("`stepfs checkpoint %s 4`", a)',
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(message: str) -> None:
    assert list(by_hand(message))


def test_the_search_lets_other_messages_be() -> None:
    assert not list(by_hand("f\"`{command('stepfs', 'unmount', a)}`; stepfs {version}: {a} mount -> {b}\""))


def test_no_message_quotes_by_hand() -> None:
    assert len(SOURCES) > 200
    found = {str(path.relative_to(ROOT)): list(by_hand(path.read_text())) for path in SOURCES}
    found.pop("fs/stepfs/cli/app.py")  # `stepfs {version}`
    found.pop("producer/stepfs_producer/cli/app.py")
    found.pop("fs/stepfs/data/announced_orders.py")  # what is hashed
    assert {path: messages for path, messages in found.items() if messages} == {}


@pytest.mark.parametrize("word", ["/a b", "it's", "$(reboot)", "-x", "", "ü", "a`b", "…b"])
def test_a_word_comes_back_whole(word: str) -> None:
    assert shlex.split(command("stepfs", "unmount", word)) == ["stepfs", "unmount", word]


def test_what_the_reader_fills_in_is_left_as_it_is() -> None:
    assert command("stepfs", "init", "file:///a b", "…") == "stepfs init 'file:///a b' …"
