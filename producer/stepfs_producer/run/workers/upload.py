"""Makes and uploads a step in a worker, under its ticket; only its descriptor returns.

The store is opened once per worker, from the lake's URL and options; credentials are those of the worker's own
environment, and never in a task. It lives in a loop of its own, which the first upload starts: trio takes a worker as long
to load as all the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from stepfs.errors import UsageError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Epoch
from stepfs.format.tgb import Descriptor
from stepfs.store.api import StoreOptions
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans
from stepfs_producer.run.workers.tasks import make_step

if TYPE_CHECKING:
    from stepfs._internal.background import BackgroundLoop
    from stepfs.store.api import Store


@dataclass(frozen=True, slots=True)
class Destination:
    """The incarnation that steps are uploaded for, and its lake's place."""

    url: str
    options: StoreOptions
    identity: LakeIdentity
    producer_id: str
    epoch: Epoch


def put_step(
    spec: PayloadSpec, step: StepSpans, destination: Destination, ticket: Ticket, *groups: SampleGroup
) -> Descriptor:
    """Make a step, check that it is of the lake's kind, and upload it; durable on return."""
    from stepfs.format.tgb import build  # noqa: PLC0415
    from stepfs_producer.commit.uploads import check_kind, descriptor_of  # noqa: PLC0415

    payloads, records = make_step(spec, step, None, *groups)
    identity = destination.identity
    if len(payloads) != identity.slices:
        raise UsageError(f"a step of {len(payloads)} files for a lake of {identity.grid}; run the lake's own plan")
    if identity.check_payload:
        check_kind(payloads, ext=identity.ext)
    image = build(
        lake_id=identity.lake_id,
        producer_id=destination.producer_id,
        epoch=destination.epoch,
        seq=ticket.seq,
        payloads=payloads,
        records=records,
    )
    loop = _opened(destination.url, destination.options)
    loop.call(lambda: loop.parts.put(ticket.key, image.parts, crc32c=image.crc32c))
    return descriptor_of(image, ticket.key, ticket.seq)


@lru_cache(maxsize=8)
def _opened(url: str, options: StoreOptions) -> BackgroundLoop[Store]:
    from contextlib import aclosing  # noqa: PLC0415

    from stepfs._internal.background import BackgroundLoop  # noqa: PLC0415
    from stepfs.store.opening import open_store  # noqa: PLC0415

    return BackgroundLoop(
        lambda: aclosing(open_store(url, options=options)), name="stepfs-uploads", closed="the worker ends"
    )
