"""A command inside a message, quoted so that it can be pasted into a shell.

Every message that offers a command with a path, a URL or a name uses `command`: a mount point may be called
`it's a run`, and unquoted advice might then clear, or create, another directory. A test searches for messages without
it.
"""

from __future__ import annotations

import shlex
from typing import Final

_REST: Final = "…"  # the reader fills it in


def command(*words: object) -> str:
    """The words as one shell command. `…` stands for a part that the reader adds and stays unquoted."""
    return " ".join(word if word == _REST else shlex.quote(word) for word in map(str, words))
