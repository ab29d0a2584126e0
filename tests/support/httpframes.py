"""Just enough HTTP/1.1 framing for the fault proxy: heads, and bodies by length or in chunks, passed on unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import trio
from trio.abc import Stream

CHUNK = 64 << 10
_HEAD_MAX = 64 << 10


@dataclass
class Message:
    head: bytes
    first_line: list[str]
    headers: dict[str, str]


class Reader:
    """HTTP/1.1 framing over one direction of a connection."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def message(self) -> Message | None:
        """The next head; None at the end of the connection."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            assert len(self._buffer) < _HEAD_MAX
            more = await self._stream.receive_some(CHUNK)
            if not more:
                return None
            self._buffer += more
        head = bytes(self._buffer[: end + 4])
        del self._buffer[: end + 4]
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Message(head, first.split(" ", 2), headers)

    async def relay(self, size: int, sink: Stream | bytearray, *, bytes_per_s: float | None = None) -> None:
        """Pass on exactly `size` bytes."""
        while size > 0:
            if not self._buffer:
                more = await self._stream.receive_some(CHUNK)
                if not more:
                    raise trio.BrokenResourceError
                self._buffer += more
            piece = bytes(self._buffer[:size])
            del self._buffer[: len(piece)]
            size -= len(piece)
            if bytes_per_s is not None:
                await trio.sleep(len(piece) / bytes_per_s)
            if isinstance(sink, bytearray):
                sink += piece
            else:
                await sink.send_all(piece)

    async def relay_body(
        self, request: Message, answer: Message, sink: Stream | bytearray, *, bytes_per_s: float | None = None
    ) -> None:
        """Pass on the body of `answer`, framing included."""
        if request.first_line[0] == "HEAD" or answer.first_line[1] in {"204", "304"}:
            return
        if answer.headers.get("transfer-encoding", "").lower() != "chunked":
            await self.relay(int(answer.headers.get("content-length", "0")), sink, bytes_per_s=bytes_per_s)
            return
        size = -1
        while size != 0:
            while (end := self._buffer.find(b"\r\n")) < 0:
                self._buffer += await self._stream.receive_some(CHUNK) or b"0\r\n\r\n"
            size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
            await self.relay(end + 2 + size + 2, sink, bytes_per_s=bytes_per_s)
