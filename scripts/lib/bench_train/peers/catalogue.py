"""The participants: packages, mounts and adapters of the peers. Imported in every environment, so it imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """What the process outside needs to know of a peer."""

    name: str
    module: str  # of `adapters`
    requirements: tuple[str, ...] = ()  # of its own environment; none: it runs in this project's
    mount: str = ""  # what shows the data on the trainer's node: a key of `nodes.MOUNTS`
    resumes_by: str = "state"  # as its documents tell: 'state', 'position' (of a sampler), 'skipping' what was read
    kinds: tuple[str, ...] = ("text", "images")
    share: dict[str, float] | None = None  # of the job's batches by kind, where all of them take minutes
    ours: bool = False

    def batches(self, kind: str, batches: int) -> int:
        return max(8, round(batches * (self.share or {}).get(kind, 1.0)))


_ALL = (
    Peer("stepfs", "stepfs_mount", mount="stepfs", ours=True),
    Peer("stepfs-loop", "stepfs_loop", mount="stepfs", kinds=("text",), ours=True),
    Peer("reader", "stepfs_reader", ours=True),
    Peer("mosaicml", "mosaicml", ("mosaicml-streaming==0.13.0",)),
    Peer("litdata", "litdata", ("litdata==0.2.76",)),
    Peer(
        "s3torchconnector",
        "s3torchconnector",
        ("s3torchconnector==1.5.0",),
        resumes_by="position",
    ),
    Peer(
        "webdataset-juicefs",
        "webdataset",
        ("webdataset==1.0.2",),
        mount="juicefs",
        resumes_by="skipping",
    ),
    Peer(
        "webdataset-rclone",
        "webdataset",
        ("webdataset==1.0.2",),
        mount="rclone",
        resumes_by="skipping",
    ),
    Peer("torch", "raw_objects", resumes_by="position", share={"text": 0.05}),
)
CATALOGUE = {peer.name: peer for peer in _ALL}
