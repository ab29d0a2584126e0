"""How a build reaches the package indexes from inside a root file system: as this machine does, and without a trace of it.

pip's settings here (an index of one's own, a certificate) hold there as well. What they name appears below /mnt: at its own
place it would be in the way of a package, such as ca-certificates, that replaces it. So does the resolver's file.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

BELOW: Final = "/mnt"
_RESOLVER: Final = "etc/resolv.conf"
_PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PATH: Final = re.compile(r"(?<!\S)(file://)?(/\S+)")  # no index of http, whose URL goes on with slashes


@dataclass(frozen=True, slots=True)
class Network:
    """`variables` of the commands, and `paths` of this machine that they name, as they are here."""

    variables: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()

    def remember(self, root: Path) -> None:
        """Give the root file system this machine's resolver."""
        (root / _RESOLVER).unlink(missing_ok=True)
        (root / _RESOLVER).write_bytes(Path("/", _RESOLVER).read_bytes())


def of_this_machine() -> Network:
    """The configuration and variables of pip, and the proxies."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = {}
    for line in sorted(listed.splitlines(), key=_is_variable):  # what comes later counts, as in pip
        key, _, value = line.partition("=")
        name = re.sub(r"^:env:\.|^[a-z]+\.", "", key)
        settings[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(shlex.split(value))
    settings.pop("PIP_CONFIG_FILE", None)  # what it says is in the settings
    named = [Path(path) for value in settings.values() for _, path in _PATH.findall(value)]
    # An index of one's own links to files beside its folder `simple`.
    whole = {path.parent if path.name == "simple" else path for path in named if path.exists()}
    paths = tuple(sorted(map(str, whole)))
    inside = {name: _PATH.sub(rf"\g<1>{BELOW}\g<2>", value) for name, value in settings.items()}
    return Network({**inside, **{name: os.environ[name] for name in _PROXIES if name in os.environ}}, paths)


def _is_variable(line: str) -> bool:
    """Variables count more than files, and old versions of pip list them first."""
    return line.startswith(":env:")
