"""What `lake[step]` and `lake.follow()` give: a number that has the payloads of its step."""

from __future__ import annotations

from typing import NoReturn, Protocol, Self

from stepfs.errors import WrongTypeError


class Payloads(Protocol):
    """`stepfs.reader.lake.Lake`."""

    def read(self, step: int, rank: int, micro: int | None = None, file: str = "") -> memoryview: ...


class LakeStep(int):
    """A step of a lake: its number, and `step[rank]`, `step[rank, micro]` or `step[rank, micro, "pixels"]`, the bytes of a file.

    For a tensor of numbers write `int(step)`. It has no length: with one, `torch.tensor([step])` would
    read every rank and make numbers of its bytes.
    """

    _lake: Payloads

    def __new__(cls, lake: Payloads, number: int) -> Self:
        step = super().__new__(cls, number)
        step._lake = lake
        return step

    def __getitem__(self, place: int | tuple[int, int] | tuple[int, int, str]) -> memoryview:
        """The payload of a rank, or of (rank, micro-batch) where a rank has several; with a third part, a file beside it.

        Read-only, contiguous, verified, valid as long as it is held.

        `NoSuchStepError` for a rank, micro-batch or file that the lake does not have, `ReclaimedError` if the step has left the
        lake meanwhile, `CorruptError` for damaged bytes, `StoreUnreachableError` once the store did not deliver within
        `deadline_s`.
        """
        return self._lake.read(self, *place) if isinstance(place, tuple) else self._lake.read(self, place)

    def __len__(self) -> NoReturn:
        raise WrongTypeError(
            f"step {int(self)} is a number: `lake.world` counts its ranks, `int(step)` makes a plain one of it"
        )

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # elsewhere it is a number
