"""A command inside a message, quoted so that it can be pasted into a shell.

Every message that offers a command with a path, a URL or a name goes through `command`: a mount point may be called
`it's a run`, and advice that breaks there may clear, or create, another directory. A test looks for messages that do not.
"""

from __future__ import annotations

import shlex
from typing import Final

_REST: Final = "…"  # the reader fills it in


def command(*words: object) -> str:
    """The words as one shell command. `…` stands for what the reader adds and is left as it is."""
    return " ".join(word if word == _REST else shlex.quote(word) for word in map(str, words))
