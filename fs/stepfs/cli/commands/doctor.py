"""`stepfs doctor`: the problems of this machine, its mounts and a lake, each with a remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, printable
from stepfs.cli.failure import say
from stepfs.cli.options import EndpointUrl, Json, not_empty
from stepfs.cli.target import is_lake, opened_store, origin_stores
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepfs.doctor.machine import Finding


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(metavar="LAKE|DIR", help="A lake or a mount point to look at as well.", callback=not_empty),
    ] = None,
    bundle: Annotated[
        str | None,
        Opt(
            "--bundle",
            "Also write all that helps to understand this machine's mounts into one file, without credentials.",
            "FILE.tar.gz",
        ),
    ] = None,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Find out why it does not work here.

    Checks the environment, the mounts on this machine and a lake's store, and names a remedy for each problem. Mounts
    other than LAKE's or DIR's fail nothing. A lake's store is probed with a few small objects, which are deleted again.
    """
    from stepfs.doctor.machine import Level

    findings = _check_machine(target)
    if target is not None and is_lake(target):
        findings += _check_lake(target, StoreOptions(endpoint_url))
    lines = list(_lines(findings))
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    typer.echo(_document(findings, len(failed)) if as_json else "\n".join(lines))
    if bundle is not None:
        from stepfs.doctor.bundle import write_bundle

        write_bundle(Path(bundle), "".join(f"{line}\n" for line in lines))
    if failed:
        say(f"{len(failed)} of {len(findings)} checks failed")
        raise typer.Exit(max(finding.exit_code for finding in failed))


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{finding.level:4}  {finding.subject:{width}}  {printable(finding.detail)}"
        if finding.remedy:
            yield f"{'':4}  {'':{width}}  → {finding.remedy}"


def _document(findings: Sequence[Finding], failed: int) -> str:
    rows = [
        {"level": str(one.level), "subject": one.subject, "detail": one.detail, "remedy": one.remedy}
        for one in findings
    ]
    return json_text({"failed": failed, "findings": rows})


def _check_machine(target: str | None) -> list[Finding]:
    from stepfs.doctor import machine

    is_root = os.geteuid() == 0
    return [
        *machine.check_python(),
        machine.check_pyfuse3(),
        machine.check_fuse_device(),
        machine.check_fusermount(is_root=is_root),
        *machine.check_mtab(is_root=is_root),
        machine.check_rights(is_root=is_root),
        *machine.check_kernel(),
        machine.check_memory(),
        *machine.check_mounts(target),
        *([] if target is None or is_lake(target) else [machine.check_directory(Path(target))]),
    ]


def _check_lake(lake: str, store_options: StoreOptions) -> list[Finding]:

    from stepfs.doctor.lakes import check_lake

    async def found() -> list[Finding]:
        async with opened_store(lake, store_options) as store, origin_stores(store, store_options) as origins:
            return [finding async for finding in check_lake(store, origins)]

    return interruption.run(found)
