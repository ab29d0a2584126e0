"""Functions that need torch, or go with it; torch is imported only when one is called.

Public: the names of `__all__`. The rest serves `.pt` files in memory, and whether a package will do.
"""

from __future__ import annotations

import io
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

from stepfs.errors import MissingPackageError, UsageError, WrongTypeError
from stepfs.format.mesh import parse_mesh

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["by_source", "context_parallel_part", "coordinates", "dump", "micro_batches"]

# Older `weights_only` unpicklers can be made to run a file's code: CVE-2025-32434 (before 2.6), CVE-2026-24747
# (before 2.10). And 2.11 is the first that surely reads no values for the device "meta" (pytorch 170619).
_SAFE: Final = (2, 11)

_STACKED: Final = frozenset({"input_ids", "labels", "position_ids", "doc_ids"})
_OFFSETS: Final = "cu_seqlens_offsets"
_IGNORED: Final = -100
_TRUE: Final = "cu_seqlens_true"
_TAGS: Final = "tags"
_COUNTS: Final = "_counts"  # behind a column's name: its rows per span


def need(package: str, extra: str, what: str) -> None:
    """`MissingPackageError` if a package that an extra brings is not installed."""
    if find_spec(package) is None:
        raise MissingPackageError(
            f"{what} needs the package {package}, which is not installed: pip install 'stepfs[{extra}]'"
        )


def need_torch(what: str, *, for_foreign_files: bool = False) -> None:
    """`MissingPackageError` if torch is not installed, or too old for files that others wrote."""
    need("torch", "torch", what)
    installed = version("torch")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if for_foreign_files and (numbers is None or tuple(map(int, numbers.groups())) < _SAFE):
        raise MissingPackageError(
            f"{what} needs torch {'.'.join(map(str, _SAFE))} or newer, which unpickles safely; this is {installed}: "
            "pip install --upgrade 'stepfs[torch]'"
        )


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


def dump(obj: object) -> bytes:
    """An object as the bytes of a `.pt` file: uncompressed, so `torch.load(path, mmap=True)` maps its tensors.

    `MissingPackageError` if torch is not installed.
    """
    need_torch("stepfs.torch.dump")
    import torch  # noqa: PLC0415 (optional, and heavy)

    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def load(payload: bytes | bytearray | memoryview, device: str) -> object:
    """The object of a `.pt` file that anybody may have written; on the device "meta" its tensors have no values.

    `ValueError` for another file, `MissingPackageError` without a torch that runs no code of it.
    """
    need_torch("looking into .pt files", for_foreign_files=True)
    import torch  # noqa: PLC0415 (optional, and heavy)

    try:
        return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
    except Exception as error:  # torch raises whatever hostile bytes lead it to
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]  # without its advice to unpickle with code
        raise ValueError(reason.strip().partition("\n")[0].partition(". ")[0]) from error


def torch_bytes(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, object]) -> bytes:
    """A dict of tensors, then of plain values (those of JSON).

    The same bytes for the same values, in any process with the same torch: a pickle names an object that it has
    written before instead of repeating it, so facts are copied first, which makes equal objects distinct ones.
    """
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    tensors = {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}
    return dump({**tensors, **json.loads(json.dumps(facts))})


def holds_micro_batches(batch: object) -> bool:
    """Whether this is a decoded `.pt` or `.safetensors` of a plan, which `micro_batches` takes."""
    return isinstance(batch, Mapping) and {"input_ids", "cu_seqlens", _OFFSETS, "spans"} <= batch.keys()


def micro_batches(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The micro-batches of a rank's file, decoded: each with `input_ids` [1, tokens] and `cu_seqlens` of its own.

    As a lake made with `output: {files: micro_batches}` holds them (producer/PAYLOADS.md). The arrays of tokens are views.
    Takes torch tensors or numpy arrays; values of other names are in each. `WrongTypeError` for a batch that no plan made.
    """
    if not holds_micro_batches(batch):
        raise WrongTypeError(
            f"a {type(batch).__name__} without {_OFFSETS} and spans is no decoded .pt or .safetensors of a plan;"
            " for other files make one of each micro-batch: output.files: micro_batches"
        )
    from stepfs._internal.compact_arrays import expand  # noqa: PLC0415 - numpy is heavy

    batch = expand(batch)
    offsets = batch[_OFFSETS].tolist()
    numbers = batch["spans"][:, 0].tolist()  # in order
    return [_one(batch, micro, offsets, numbers) for micro in range(len(offsets) - 1)]


def by_source(loss: Any, batch: Mapping[str, Any], sources: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """By source: the sum of the loss over its learned tokens, and their number; both are scalars to be summed over ranks.

    `loss`: a tensor [micro, tokens] of each token's loss, as `cross_entropy(…, reduction="none")` gives it. `batch`: a
    decoded file of a plan, or one of its `micro_batches`. `sources`: names in place of numbers, where the batch has none, as
    that of a `.safetensors`. Sources without a learned token are left out.
    """
    if not holds_micro_batches(batch):
        raise WrongTypeError(f"a {type(batch).__name__} without spans is no decoded .pt or .safetensors of a plan")
    import torch  # noqa: PLC0415 (optional, and heavy)

    from stepfs._internal.compact_arrays import expand  # noqa: PLC0415 - numpy is heavy

    full = expand(batch)
    spans, labels = full["spans"].to(loss.device), full["labels"].to(loss.device)
    if loss.shape != labels.shape:
        raise UsageError(
            f"a loss of shape {tuple(loss.shape)} for labels of {tuple(labels.shape)}: give one value a token"
        )
    first = torch.searchsorted(spans[:, 0].contiguous(), torch.arange(len(labels), device=loss.device))
    learned = labels != _IGNORED
    span = (full["doc_ids"].to(loss.device).clamp(min=0) + first[:, None])[learned]
    of = spans[span, 3]
    names = sources or full.get("sources", ())
    found = {}
    for number in of.unique().tolist():
        mine = of == number
        found[names[number] if number < len(names) else str(number)] = loss[learned][mine].sum(), mine.sum()
    return found


def context_parallel_part(batch: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The part of one micro-batch that context rank `rank` of `ranks` reads: of each document, cut into 2 · ranks pieces,
    the pieces `rank` and 2 · ranks - 1 - rank, so that all ranks attend to equally many tokens.

    Takes a micro-batch of `micro_batches`, whose plan aligns documents (`pack: {align: mesh}`). Arrays of tokens are cut,
    other values stay: attention between ranks wants `cu_seqlens` of the whole. `UsageError` where a document is no multiple
    of 2 · ranks tokens.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"context rank {rank} of {ranks}: count from 0")
    bounds = batch["cu_seqlens"].tolist()
    pieces = 2 * ranks
    if len(batch["input_ids"]) != 1 or any(bound % pieces for bound in bounds):
        raise UsageError(
            f"give one micro-batch whose documents are multiples of {pieces} tokens: micro_batches(batch)[0] of a plan with "
            f"pack: {{align: {pieces}}}"
        )
    import numpy as np  # noqa: PLC0415

    begins, sizes = np.array(bounds[:-1]), np.diff(bounds) // pieces
    starts = np.stack([begins + sizes * rank, begins + sizes * (pieces - 1 - rank)], 1).ravel()
    each = np.repeat(sizes, 2)
    places = np.arange(each.sum()) + np.repeat(starts - (np.cumsum(each) - each), each)
    return {name: value[:, places] if name in _STACKED else value for name, value in batch.items()}


def _one(batch: Mapping[str, Any], micro: int, offsets: list[int], numbers: list[int]) -> dict[str, Any]:
    first, last = offsets[micro], offsets[micro + 1]
    begin, end = bisect_left(numbers, micro), bisect_left(numbers, micro + 1)
    spans = batch["spans"][begin:end] + 0  # a copy
    spans[:, 0] = 0
    own = {
        "cu_seqlens": batch["cu_seqlens"][first:last],
        _OFFSETS: batch[_OFFSETS][micro : micro + 2] - first,
        "spans": spans,
    }
    if _TRUE in batch:
        own[_TRUE] = batch[_TRUE][first:last]
    if isinstance(batch.get(_TAGS), list):  # of a `.pt`; else a column of that name
        own[_TAGS] = batch[_TAGS][begin:end]
    own |= {name: batch[name][micro : micro + 1] for name in _STACKED & batch.keys()}
    for name, counts in batch.items():
        if name.endswith(_COUNTS):
            own[name] = counts[begin:end]
            rows = slice(int(counts[:begin].sum()), int(counts[:end].sum()))
            own |= {column: batch[column][rows] for column in {name.removesuffix(_COUNTS)} & batch.keys()}
    return {name: own.get(name, value) for name, value in batch.items()}
