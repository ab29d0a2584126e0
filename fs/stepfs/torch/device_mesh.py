"""A trainer's own device mesh as stepfs names ranks, so that a program names neither rank nor size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepfs.errors import UsageError
from stepfs.format.mesh import parse_mesh


class DeviceMesh(Protocol):
    """`torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


def coordinates(device_mesh: DeviceMesh) -> tuple[int, int]:
    """This process's data rank, and the number of data ranks, in a mesh with named dimensions.

        rank, ranks = stepfs.torch.coordinates(device_mesh)
        dataset = StepDataset(url, rank=rank, mesh=f"dp={ranks}", start=stream.next_step)

    Names decide as in `stepfs mount --mesh`: dimensions dp, fsdp, ddp, hsdp, dp_… are data, ranks that differ in others
    alone get the same number. `UsageError` for a mesh without names, or with one of unknown meaning.
    """
    names, here = device_mesh.mesh_dim_names, device_mesh.get_coordinate()
    if names is None:
        raise UsageError("the device mesh has no names; give init_device_mesh mesh_dim_names such as ('dp', 'tp')")
    if here is None:
        raise UsageError("this process is no part of the device mesh")
    try:
        mesh = parse_mesh(",".join(f"{name}={size}" for name, size in zip(names, device_mesh.shape, strict=True)))
    except ValueError as error:
        raise UsageError(f"device mesh {names}: {error}") from error
    return mesh.reader_at(here)[0], mesh.data_ranks
