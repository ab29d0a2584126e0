"""Mistakes that a package index, or a user, would find in the files: metadata, missing and foreign modules."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Final

from packaging.metadata import ExceptionGroup as InvalidMetadataGroup
from packaging.metadata import Metadata

from stepfs.errors import StepfsError

_ROOTS: Final = {
    "stepfs": "fs/stepfs",
    "stepfs/schemas": "fs/schemas",
    "stepfs_producer": "producer/stepfs_producer",
}


def inspect(sdist: Path, wheel: Path) -> Metadata:
    """Check both; returns the metadata that they share. `StepfsError` names the mistake."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        text = archive.read(f"{info}/METADATA")
    with tarfile.open(sdist) as archive:
        top = f"{sdist.name.removesuffix('.tar.gz')}/"
        sources = {member.name.removeprefix(top) for member in archive.getmembers() if member.isfile()}
        stored = archive.extractfile(f"{top}PKG-INFO")
        if stored is None or stored.read() != text:
            raise StepfsError(f"{sdist.name} and {wheel.name} differ in their metadata")
    _compare(names, sources, info, wheel.name)
    try:
        metadata = Metadata.from_email(text, validate=True)
    except InvalidMetadataGroup as group:
        raise StepfsError(f"metadata: {'; '.join(map(str, group.exceptions))}") from group
    for field in ("summary", "description", "license_expression", "requires_python"):
        if not getattr(metadata, field):
            raise StepfsError(f"metadata: no {field}; pyproject.toml must have it")
    return metadata


def _compare(names: set[str], sources: set[str], info: str, wheel: str) -> None:
    """The wheel holds every file of the packages in the sdist, and nothing else but its own records."""
    expected = {
        f"{package}/{source.removeprefix(f'{root}/')}"
        for package, root in _ROOTS.items()
        for source in sources
        if source.startswith(f"{root}/")
    }
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    if foreign := sorted(names - expected):
        raise StepfsError(f"{wheel} holds what does not belong there: {', '.join(foreign[:5])}")
    if missing := sorted(expected - names):
        raise StepfsError(f"{wheel} lacks {', '.join(missing[:5])}")
