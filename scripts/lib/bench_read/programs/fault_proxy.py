"""The tests' fault proxy as a program that is told what to do, one line of JSON at a time. Prints its URL first.

{"do": "hold"}  {"do": "release"}  {"do": "lose", "share": 0.01}  {"do": "slow", "delay_s": 0.02, "bytes_per_s": 1e6}
{"do": "well"}
"""

from __future__ import annotations

import json
import sys

import trio
from faultproxy import LOST_RESPONSE, FaultProxy, Trouble


async def main() -> None:
    proxy = FaultProxy(int(sys.argv[1]))
    orders = trio.lowlevel.FdStream(0)
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve)
        print(proxy.endpoint_url, flush=True)
        left = b""
        while piece := await orders.receive_some():
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                obey(proxy, json.loads(line))
                proxy.handled.clear()
        nursery.cancel_scope.cancel()


def obey(proxy: FaultProxy, order: dict[str, object]) -> None:
    what = order.pop("do")
    if what == "hold":
        proxy.hold()
    elif what == "release":
        proxy.release()
    elif what == "lose":
        proxy.randomly({LOST_RESPONSE: float(str(order["share"]))})
    elif what == "slow":
        proxy.randomly({Trouble("slow", **order): 0.999})  # type: ignore[arg-type]
    else:
        proxy.randomly({})


if __name__ == "__main__":
    trio.run(main)
