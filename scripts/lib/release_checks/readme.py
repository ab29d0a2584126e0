"""The links of README.md for a page that stands elsewhere, such as a package index: relative ones behind a base, in place.

python readme.py https://SERVER/OWNER/NAME/blob/TAG README.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def rebased(text: str, base: str) -> str:
    """Absolute links and anchors stay; of a picture the bytes are wanted, not the page about it."""
    return _LINK.sub(
        lambda one: f"{one[1]}[{one[2]}]({base.rstrip('/')}/{one[3]}{'?raw=true' if one[1] else ''})", text
    )


if __name__ == "__main__":
    _base, _name = sys.argv[1:]
    Path(_name).write_text(rebased(Path(_name).read_text(encoding="utf-8"), _base), encoding="utf-8")
