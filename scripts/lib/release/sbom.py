"""The bill of materials of a release, in CycloneDX' JSON: what the wheel brings along, in the versions it is tested with.

The graph is read off the installed packages of .venv, whose versions must be those of constraints.lock.txt. What only an
extra brings has the scope `optional`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stepfs.errors import StepfsError

_PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Graph:
    """Name of a package → the names that it needs; and which are there without any extra."""

    needs: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    required: set[str] = field(default_factory=set)
    _followed: set[tuple[str, str, bool]] = field(default_factory=set)

    def follow(self, name: str, requirements: Iterable[Requirement], extra: str, *, required: bool) -> None:
        """Add what `name` needs under one of its extras, or without ("")."""
        if (name, extra, required) in self._followed:
            return
        self._followed.add((name, extra, required))
        for requirement in requirements:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            child = canonicalize_name(requirement.name)
            self.needs[name].add(child)
            if required:
                self.required.add(child)
            for one in ("", *requirement.extras):
                self.follow(child, _requirements_of(child), one, required=required)


def write_sbom(metadata: Metadata, wheel: Path, lock: Path, epoch: int, directory: Path) -> Path:
    """Write NAME-VERSION.cdx.json. `StepfsError` if the installed packages are not the pinned ones."""
    graph, root = Graph(), metadata.name
    declared = metadata.requires_dist or []
    graph.follow(root, declared, "", required=True)
    for extra in metadata.provides_extra or []:
        graph.follow(root, declared, extra, required=False)
    pins: dict[str, str] = {
        canonicalize_name(name): version for name, version in _PIN.findall(lock.read_text())
    }
    names = sorted(set().union(*graph.needs.values()) - {root})
    found = {name: _component(name, pins, required=name in graph.required) for name in names}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found[root] = Component(
        name=root,
        version=str(metadata.version),
        type=ComponentType.APPLICATION,
        purl=PackageURL("pypi", name=root, version=str(metadata.version)),
        bom_ref=root,
        licenses=[LicenseExpression(str(metadata.license_expression))],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    bom = Bom(components=[found[name] for name in names])
    bom.metadata.component = found[root]
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, digest)
    for name, component in found.items():
        bom.register_dependency(
            component, [found[child] for child in sorted(graph.needs[name] - {root, name})]
        )
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise StepfsError(f"the bill of materials is not valid: {problem}")
    path = directory / f"{root}-{metadata.version}.cdx.json"
    path.write_text(text)
    return path


def _requirements_of(name: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        raise StepfsError(f"{name} is not installed here: run scripts/setup") from None


def _component(name: str, pins: dict[str, str], *, required: bool) -> Component:
    metadata = importlib.metadata.metadata(name)
    version = metadata["Version"].partition("+")[0]  # any build of torch satisfies the pin
    if pins.get(name) != version:
        pinned = pins.get(name, "no version")
        raise StepfsError(
            f"{name} {version} is installed, and constraints.lock.txt has {pinned}: run scripts/setup"
        )
    (expression,) = metadata.get_all("License-Expression") or [None]
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref=name,
        scope=ComponentScope.REQUIRED if required else ComponentScope.OPTIONAL,
        licenses=[LicenseExpression(expression)] if expression else [],
    )
