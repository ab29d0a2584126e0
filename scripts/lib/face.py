"""The public face: commands, options, variables, plan keys, Python names, JSON documents, metrics, file names.

    .venv/bin/python scripts/lib/face.py            compares it with fs/schemas/face.json, exit code 8 if it differs
    .venv/bin/python scripts/lib/face.py --write    writes it, once CHANGELOG.md says what changed

A name that stands there is a promise (fs/SEMANTICS.md, "Versions"). Each changes only together with the changelog: the file
keeps the digest of the one that it was written beside.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import typer

import stepfs
import stepfs_producer
from api_page import page
from stepfs import announce, errors, payload
from stepfs.cli.app import app
from stepfs.csi.node import OPTIONS
from stepfs.data.counters import METRICS
from stepfs.format.ids import JSON_SCHEMA
from stepfs.mount import metrics
from stepfs.mount.fuse import control
from stepfs_producer.cli.app import app as produce
from stepfs_producer.plan.file.schema import json_schema
from stepfs_producer.run import metrics as run_metrics

ROOT: Final = Path(__file__).parents[2]
FACE: Final = ROOT / "fs/schemas/face.json"
CHANGELOG: Final = ROOT / "CHANGELOG.md"


def face() -> dict[str, Any]:
    """Names alone, in the order of the alphabet; no text that only people read."""
    return {
        "commands": {name: _commands(program) for name, program in (("stepfs", app), ("stepfs-produce", produce))},
        "csi_attributes": sorted({"lake", *OPTIONS}),
        "documents": {
            path.stem: _fields(json.loads(path.read_text()))
            for path in sorted(FACE.parent.glob("*.json"))
            if path != FACE
        },
        "exit_codes": {
            name: kind.exit_code
            for name, kind in sorted(vars(errors).items())
            if inspect.isclass(kind) and issubclass(kind, errors.StepfsError)
        },
        "json_schema": JSON_SCHEMA,
        "metrics": _metrics(),
        "mount_files": sorted(name.decode() for name in (*control.FILES, *control.DIRECTORIES)),
        "plan_keys": _fields(json_schema()),
        "python": sorted({*re.findall(r"^#### `(.+?)`?$", page(), re.MULTILINE), *_names()}),
    }


def changed() -> list[str]:
    """A line for each part that is not as it is kept."""
    kept, found = json.loads(FACE.read_text()), face()
    return [f"{part}: {_difference(kept.get(part), found[part])}" for part in found if kept.get(part) != found[part]]


def _difference(kept: object, found: object) -> str:
    one, other = (set(json.dumps(each, indent=1, sort_keys=True).splitlines()) for each in (kept, found))
    lines = [f"- {line.strip()}" for line in sorted(one - other)] + [
        f"+ {line.strip()}" for line in sorted(other - one)
    ]
    return "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")


def _commands(program: Any) -> dict[str, Any]:
    group = typer.main.get_command(program)
    context = typer.Context(group, info_name=group.name)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}  # type: ignore[attr-defined]
    return {
        name: {
            "arguments": [one.make_metavar(context) for one in command.params if one.param_type_name == "argument"],
            "options": {
                "/".join([*one.opts, *one.secondary_opts]): one.envvar
                for one in command.params
                if one.param_type_name == "option"
            },
        }
        for name, command in sorted(commands.items())
    }


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of a JSON Schema: its objects with the names of their fields, those that are required marked."""
    found: dict[str, Any] = {}

    def walk(one: object, place: str) -> None:
        if isinstance(one, list):
            for each in one:
                walk(each, place)
        elif isinstance(one, dict):
            required = one.get("required", ())
            for name, field in (one.get("properties") or {}).items():
                found[f"{place}{name}"] = name in required
                walk(field, f"{place}{name}.")
            for key in ("items", "additionalProperties", "anyOf", "oneOf"):
                walk(one.get(key), place)
            for name, each in (one.get("$defs") or {}).items():
                walk(each, f"#{name}.")

    walk(schema, "")
    return dict(sorted(found.items()))


def _metrics() -> list[str]:
    named = {f"stepfs_{name}" for name in metrics.GAUGES} | {f"stepfs_data_{name}" for name in METRICS.values()}
    named |= {*re.findall(r'"(stepfs_[a-z_]+)"', inspect.getsource(metrics))}
    return sorted(
        named
        | {f"stepfs_produce_{name}" for name in re.findall(r'_PREFIX \+ "([a-z_]+)"', inspect.getsource(run_metrics))}
    )


def _names() -> list[str]:
    declared = [(module, module.__all__) for module in (stepfs, stepfs.torch, stepfs_producer)]
    defined = [
        (module, [name for name, one in vars(module).items() if name[0] != "_" and _is_of(module, one)])
        for module in (announce, errors, payload)
    ]
    return [f"{module.__name__}.{name}" for module, names in (*declared, *defined) for name in names]


def _is_of(module: ModuleType, one: object) -> bool:
    return getattr(one, "__module__", None) == module.__name__


def main(arguments: list[str]) -> int:
    beside = hashlib.sha256(CHANGELOG.read_bytes()).hexdigest()[:16]
    if arguments == ["--write"]:
        if FACE.exists() and not changed():
            return 0
        if FACE.exists() and json.loads(FACE.read_text())["changelog"] == beside:
            sys.stderr.write("face: the face changes, and CHANGELOG.md does not: write there what changes, first\n")
            return 4
        FACE.write_text(json.dumps({"changelog": beside, **face()}, indent=1, sort_keys=True) + "\n")
        return 0
    lines = changed()
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return errors.DifferentError.exit_code if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
