"""The training job, equal for all peers: its data, an order to the process that runs a part of it, the duties of a peer.

An adapter is a module with three functions, which run in the peer's own environment:

    imports()            imports the library, so that its seconds are not those of the first batch
    write(order)         stores the data set the way this peer wants it, under `order.place`
    train(order, state)  opens it and returns a `Stream`; `state` is None, or the result of `Stream.state` before a kill

What the process outside needs to know of a peer (packages, a mount, how it resumes) is in `catalogue`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Batch = tuple[Any, Any]  # ids and contents of its samples: tensors, or arrays

TEXT = "text"
IMAGES = "images"
KINDS = (TEXT, IMAGES)


@dataclass(frozen=True, slots=True)
class Data:
    """`batches` batches of `batch` samples of a kind, in training order. Sample `i` has id `i`."""

    kind: str
    directory: str  # of the corpus that samples are made of
    batches: int
    batch: int

    @property
    def samples(self) -> int:
        return self.batches * self.batch


@dataclass(frozen=True, slots=True)
class Order:
    """The order to one process of a peer. Travels as JSON."""

    peer: str
    do: str  # 'write' or 'train'
    data: Data
    bucket: str
    place: str  # a prefix in the bucket
    mount: str = ""  # where the peer's mount shows it
    cache: str = ""  # a directory on the local disk that this peer may fill
    workers: int = 2
    compute_s: float = 0.0  # per batch
    seconds_max: float = 0.0  # stop after that time; 0: never
    save_at: int = 0  # save the state after so many batches; 0: never
    kill_at: int = 0  # ask to be killed after so many; 0: never
    state: str = ""  # the file of the state
    resume: bool = False
    journal: str = ""  # the file that gets a line of JSON per batch

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Order:
        found: dict[str, Any] = json.loads(text)
        return cls(**found | {"data": Data(**found["data"])})


class Stream(Protocol):
    """An epoch of a peer, from its beginning or from a saved state."""

    def batches(self) -> Iterator[Batch]: ...

    def state(self) -> object:
        """Where to continue after the batch that came last; pickled. None if the library has no such thing."""
        ...


class LoaderStream:
    """The `Stream` of a loader that keeps a state of its own."""

    def __init__(self, loader: Any, state: Any) -> None:
        self._loader = loader
        if state is not None:
            loader.load_state_dict(state)

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> object:
        return self._loader.state_dict()


class Adapter(Protocol):
    """The module of a peer."""

    def imports(self) -> None: ...

    def write(self, order: Order) -> None: ...

    def train(self, order: Order, state: Any) -> Stream: ...
