"""scripts/deploy/Dockerfile as data. There is one description of the image, so that two ways to build it cannot differ.

Only the instructions and forms that the file uses are known; any other is refused with its line.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field

from stepfs.errors import UsageError


@dataclass(frozen=True, slots=True)
class Run:
    """A shell command."""

    command: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of the context, or of an earlier stage."""

    sources: tuple[str, ...]
    target: str
    stage: str | None = None


@dataclass(slots=True)
class Stage:
    """One FROM: the Debian suite, what is done to it, and how the image is started."""

    suite: str
    name: str | None = None
    steps: list[Run | Copy] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def parse(text: str) -> list[Stage]:
    """The stages in order; the last one is the image. `UsageError` names the line that is not understood."""
    stages: list[Stage] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        try:
            if instruction == "FROM":
                stages.append(_from(rest))
            else:
                _apply(stages[-1], instruction, rest)
        except (ValueError, IndexError) as error:
            raise UsageError(
                f"Dockerfile:{number}: scripts/image does not understand `{line}` ({error})"
            ) from None
    return stages


def _from(rest: str) -> Stage:
    image, *name = rest.split()
    distribution, _, tag = image.partition(":")
    suite, _, variant = tag.partition("-")
    if (
        (distribution, variant) != ("debian", "slim")
        or not suite
        or (name and (len(name) != 2 or name[0] != "AS"))
    ):
        raise ValueError("only `debian:SUITE-slim [AS NAME]`")
    return Stage(suite, name[1] if name else None)


def _apply(stage: Stage, instruction: str, rest: str) -> None:
    if rest.endswith("\\"):
        raise ValueError("one line per instruction")
    match instruction:
        case "RUN":
            stage.steps.append(Run(rest))
        case "COPY":
            stage.steps.append(_copy(rest))
        case "ENV":
            stage.variables.update([_pair(rest)])
        case "LABEL":
            stage.labels.update([_pair(rest)])
        case "USER":
            stage.user = _user(rest)
        case "WORKDIR":
            stage.directory = rest
        case "ENTRYPOINT":
            stage.entrypoint = _words(rest)
        case "CMD":
            stage.command = _words(rest)
        case _:
            raise ValueError("unknown instruction")


def _copy(rest: str) -> Copy:
    words = shlex.split(rest)
    of = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
    if len(words) < 2 or any(word.startswith("--") for word in words):
        raise ValueError("only `COPY [--from=STAGE] SOURCE… TARGET`")
    return Copy(tuple(words[:-1]), words[-1], of)


def _pair(rest: str) -> tuple[str, str]:
    name, equals, value = rest.partition("=")
    if not equals or " " in rest or "$" in rest:
        raise ValueError("only NAME=VALUE, without variables")
    return name, value


def _user(rest: str) -> str:
    if rest.count(":") != 1 or not all(part.isdecimal() for part in rest.split(":")):
        raise ValueError("only UID:GID, which Kubernetes can compare with root")
    return rest


def _words(rest: str) -> list[str]:
    words = json.loads(rest)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("only a JSON list of strings")
    return words
