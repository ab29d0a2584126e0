"""The client of a NATS server, in an environment that has `nats-py`. Prints JSON.

    python -m bench_ingest.brokers.nats_client ORDER

ORDER is JSON: `url`, `do`, and what that needs. Every publish waits for the acknowledgement of the stream, several at a
time. `do`: 'publish' (seconds for `count` payloads), 'latency' (seconds from publish to read), 'until_killed' (a line per
acknowledged payload until the server is gone), 'audit' (numbers of the payloads that can be read whole).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any

from bench_ingest.brokers.payloads import Assembly, number_of, payload, pieces

STREAM = "bench"
MESSAGE_BYTES = 1 << 20  # the server's default max_payload
_ACK_S = 60.0
_QUIET_S = 3.0
_MESSAGES_AT_ONCE = 16


async def main() -> None:
    import nats  # type: ignore[import-not-found]  # noqa: PLC0415 - only in the environment of this peer

    order: dict[str, Any] = json.loads(sys.argv[1])
    quiet = order["do"] == "until_killed"
    client = await nats.connect(order["url"], allow_reconnect=False, error_cb=_ignore if quiet else None)
    try:
        context = client.jetstream(timeout=_ACK_S)
        await {"publish": publish, "latency": latency, "until_killed": until_killed, "audit": audit}[order["do"]](
            context, order
        )
    finally:
        with suppress(Exception):
            await client.close()


async def _ignore(_: Exception) -> None:
    """The server is killed on purpose."""


async def _stream(context: Any, subject: str) -> None:
    with suppress(Exception):
        await context.delete_stream(STREAM)
    await context.add_stream(name=STREAM, subjects=[subject], storage="file")


async def _put(context: Any, room: asyncio.Semaphore, number: int, body: bytes) -> None:
    async def one(message: bytes) -> None:
        async with room:
            await context.publish(STREAM, message, timeout=_ACK_S)

    await asyncio.gather(*(one(message) for message in pieces(number, body, MESSAGE_BYTES)))


async def publish(context: Any, order: dict[str, Any]) -> None:
    await _stream(context, STREAM)
    body, messages, payloads = (
        payload(0, order["size"]),
        asyncio.Semaphore(_MESSAGES_AT_ONCE),
        asyncio.Semaphore(8),
    )

    async def one(number: int) -> None:
        async with payloads:
            await _put(context, messages, number, body)

    began = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(order["count"])))
    print(json.dumps({"seconds": time.monotonic() - began}))


async def latency(context: Any, order: dict[str, Any]) -> None:
    await _stream(context, STREAM)
    reader, assembly = await context.subscribe(STREAM, ordered_consumer=True), Assembly()
    sent: list[float] = []
    found: list[float] = []
    body, messages = payload(0, order["size"]), asyncio.Semaphore(_MESSAGES_AT_ONCE)

    async def read() -> None:
        while len(found) < order["count"]:
            message = await reader.next_msg(timeout=_ACK_S)
            if assembly.add(message.data) is not None:
                found.append(time.monotonic() - sent[len(found)])

    reading = asyncio.create_task(read())
    for number in range(order["count"]):
        sent.append(time.monotonic())
        await _put(context, messages, number, body)
        await asyncio.sleep(max(0.0, sent[number] + order["gap_s"] - time.monotonic()))
    await reading
    print(json.dumps({"latencies": found}))


async def until_killed(context: Any, order: dict[str, Any]) -> None:
    await _stream(context, STREAM)
    messages, number = asyncio.Semaphore(_MESSAGES_AT_ONCE), 0
    with suppress(Exception):  # the server is gone, as it should
        while True:
            await _put(context, messages, number, payload(number, order["size"]))
            print(number, flush=True)
            number += 1


async def audit(context: Any, order: dict[str, Any]) -> None:
    del order
    reader, assembly, found = await context.subscribe(STREAM, ordered_consumer=True), Assembly(), []
    with suppress(TimeoutError, asyncio.TimeoutError):
        while True:
            message = await reader.next_msg(timeout=_QUIET_S)
            body = assembly.add(message.data)
            if body is not None and (number := number_of(body)) is not None:
                found.append(number)
    print(json.dumps({"found": found}))


if __name__ == "__main__":
    asyncio.run(main())
