"""The peers of reading: other mounts that hold the same files (`large/NN.bin`, `small/SSS-RRR.bin`) the way they want them.

rclone is always there, JuiceFS with --peers. A peer that cannot be installed is left out, with the reason in a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import servers

from bench.bed import Bed
from bench.environments import NotInstalledError
from bench.peer_mounts import JuiceFS, Peer, Rclone

PREFIX = "peers"
_UPLOADS = 8


class Peers:
    """The peers of one run and the files they hold."""

    def __init__(self, bed: Bed, *, install: bool) -> None:
        self._bed = bed
        self._juicefs: JuiceFS | None = None
        self.all: list[Peer] = [Rclone(bed, "off", PREFIX), Rclone(bed, "full", PREFIX)]
        if not install:
            bed.report.say("JuiceFS is left out: give --peers to install it")
            return
        try:
            self._juicefs = JuiceFS(bed)
        except NotInstalledError as error:
            bed.report.say(f"JuiceFS is left out: {error}")
        else:
            self.all.append(self._juicefs)

    def hold(self, name: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Files of one directory (`name/…`) for every peer."""
        import boto3  # noqa: PLC0415 - half a second

        client = boto3.client("s3")

        def put(item: tuple[str, bytes]) -> None:
            client.put_object(Bucket=servers.BUCKET, Key=f"{PREFIX}/{item[0]}", Body=item[1])

        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(put, bodies))
        if self._juicefs is not None:
            with self._juicefs.mounted() as mount:
                (mount.directory / name).mkdir()
                for file, body in bodies:
                    mount.path(file).write_bytes(body)
