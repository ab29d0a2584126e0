"""What other programs answered: the files that they write, and the records that they read of them, in a zip a program.

A case is a call of the program, which writes files and returns the records that it reads there, and the source of a plan. A
push compares our records with the kept answers; the nightly asks the programs again. To keep the answers anew, where they
are installed: `cd tests/t0_pure; PYTHONPATH=../support:../simulator python -m their_answers datasets`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from sourced import blocks

from stepfs.errors import StepfsError
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.run.prepare import source_specs
from stepfs_producer.sources.record import Kind, unpacked

REFUSED = "refused"
_ANSWERS = "answers.json"


@dataclass(frozen=True)
class Case:
    """`ask` writes files below a directory and returns what the program reads there: records, or REFUSED. `source`: of a plan;
    without a `text_field` its records are whole. `refused`: where ours says why, and theirs may read something.
    """

    ask: Callable[[Path], Any]
    source: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


def program(name: str) -> Any:
    """The module of a program that is there at night alone."""
    return import_module(name)


def asked(case: Case, directory: Path) -> Any:
    """The program's answer, as JSON has it."""
    directory.mkdir(parents=True)
    return json.loads(json.dumps(case.ask(directory), default=printed, ensure_ascii=False))


def printed(value: object) -> str | list[Any]:
    """What JSON has no room for, as ours prints it; bytes by their numbers."""
    return list(value) if isinstance(value, bytes) else str(value)


def keep(path: Path, cases: Mapping[str, Case]) -> None:
    """Ask the program, and keep its files and answers."""
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        here = Path(temporary)
        answers = {name: asked(case, here / name) for name, case in cases.items()}
        for file in sorted(one for name in cases for one in (here / name).rglob("*") if one.is_file()):
            archive.write(file, file.relative_to(here))
        archive.writestr(_ANSWERS, json.dumps(answers, ensure_ascii=False, indent=0))


def kept(path: Path, name: str, directory: Path) -> Any:
    """The kept answer; its files are below `directory` then."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.startswith(f"{name}/"):
                archive.extract(member, directory)
        return json.loads(archive.read(_ANSWERS))[name]


def ours(case: Case, directory: Path) -> Any:
    """Our records of the same files; an error by its line."""
    source = {"epochs": 1, "shuffle": "none", **case.source}
    source["files"] = str(directory / source.get("files", ""))
    if not {"text_field", "chat"} & source.keys() and source["format"] != "text":
        source["transform"] = "json:loads"
    plan = parsed_plan(
        {"output": {"mesh": "dp=1", "sequence_length": 8}, "tokenizer": _TOKENIZER, "sources": {"a": source}}
    )
    found = []
    try:
        for block in blocks(source_specs(plan)["a"]):
            records = block.records
            for index in range(len(records)):
                data = bytes(records.part(index, index + 1).data.values)
                whole = records.kind in {Kind.FIELDS, Kind.JSON}
                value = (
                    {"bad": records.bad[index]} if index in records.bad else unpacked(data) if whole else data.decode()
                )
                found.append(value)
    except StepfsError as error:
        return str(error)
    return json.loads(json.dumps(found, default=printed, ensure_ascii=False))


def compare(case: Case, answer: Any, directory: Path) -> None:
    """Equal records, or both refuse; what only ours refuses says so in the case."""
    mine = ours(case, directory)
    if case.refused:
        assert isinstance(mine, str), mine
        assert case.refused in mine
    elif answer == REFUSED:
        assert isinstance(mine, str) or any("bad" in one for one in mine if isinstance(one, dict)), mine
    else:
        assert mine == answer


_TOKENIZER = {"kind": "huggingface", "file": "tokenizer.json"}  # which is not opened


if __name__ == "__main__":
    for name in sys.argv[1:]:
        cases = import_module(f"test_against_{name}")  # as a module, whose functions `datasets` can name
        keep(cases.KEPT, cases.CASES)
