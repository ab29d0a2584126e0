"""The pacing with real producers over the store double, at the exposure of S3; `test_pace_simulation.py` has the numbers
beyond a dozen.
"""

from __future__ import annotations

import random

import pytest
import trio
from producer_world import World, append, simulate

from stepfs_producer.commit.pace import LOAD

EXPOSURE_S = 0.05
PRODUCERS = 12
INTERVAL_S = (PRODUCERS - 1) * EXPOSURE_S / LOAD
WARM_S, MEASURED_S = 2 * INTERVAL_S, 12 * INTERVAL_S


def latency(verb: str, _size: int, rng: random.Random) -> float:
    """As a region's object store answers: a create takes as long as an attempt is exposed."""
    return rng.uniform(0.7, 1.3) * (EXPOSURE_S if verb == "create" else EXPOSURE_S / 3)


@pytest.mark.logs("raise max_delay")
def test_a_dozen_producers_share_a_slow_log_evenly_though_their_bound_is_shorter_than_the_pace() -> None:
    async def scenario(world: World) -> tuple[list[int], int, float]:
        commits, lost, waits = [0] * PRODUCERS, 0, [0.0]

        async def one(number: int) -> None:
            nonlocal lost
            store = world.store(f"p{number}")
            store._latency = latency
            async with world.producer(f"p{number}", store, max_delay=0.5) as producer:
                appended = [(producer.next_seq, trio.current_time())]
                before = (0, 0)
                record = 0
                while trio.current_time() < end:
                    await append(producer, record)
                    record += 1
                    appended.append((producer.next_seq, trio.current_time()))
                    await trio.sleep(INTERVAL_S / 4)
                    committed = [when for seq, when in appended if seq <= producer.committed_seq]
                    waiting = [when for seq, when in appended if seq > producer.committed_seq]
                    appended = appended[len(committed) :]
                    if trio.current_time() < begin:
                        before = (producer.tally.commits, producer.tally.lost)
                    elif waiting:
                        waits.append(trio.current_time() - min(waiting))
                commits[number] = producer.tally.commits - before[0]
                lost += producer.tally.lost - before[1]

        begin = trio.current_time() + WARM_S
        end = begin + MEASURED_S
        async with trio.open_nursery() as nursery:
            for number in range(PRODUCERS):
                nursery.start_soon(one, number)
        return commits, lost, max(waits)

    commits, lost, longest_s = simulate(scenario)
    assert lost / (lost + sum(commits)) <= 0.25
    assert max(commits) <= 1.5 * min(commits)
    assert longest_s <= 2.5 * INTERVAL_S
