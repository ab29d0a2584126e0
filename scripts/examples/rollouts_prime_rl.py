"""prime-rl's transport of rollouts over a lake: steps whole for all ranks, each once through any crash, on an object store.

    python rollouts_prime_rl.py send LAKE RANKS STEPS       # after `stepfs init LAKE --slices RANKS --ext .bin`
    python rollouts_prime_rl.py receive LAKE RANK STEPS

In prime-rl, return these two from `setup_micro_batch_sender` and `setup_micro_batch_receiver`. Its own transport by
files writes a file for each rank, and a trainer waits for its own. `receive` prints `step N: M micro-batches`.
"""

import asyncio
import sys

from prime_rl.transports.rollouts.base import MicroBatchReceiver, MicroBatchSender
from prime_rl.transports.rollouts.types import MicroBatch

from stepfs import CheckpointHook, Lake
from stepfs_producer import Producer


class LakeSender(MicroBatchSender):
    def __init__(self, url, data_world_size, current_step=0):
        super().__init__(url, data_world_size)
        self.producer = Producer(url, producer_id="orchestrator", max_lead=2).__enter__()
        self.current_step = current_step

    async def send(self, micro_batch_grid):
        payloads = [self.encoder.encode(one) for one in micro_batch_grid]
        if self.current_step >= (self.producer.position or 0):  # else it was committed before a crash
            await asyncio.to_thread(self.producer.append, payloads, position=self.current_step + 1)
        self.current_step += 1

    def close(self):
        self.producer.__exit__(None, None, None)  # once all is committed


class LakeReceiver(MicroBatchReceiver):
    def __init__(self, url, data_rank, current_step=0):
        super().__init__(url, data_rank)
        self.lake = Lake(url, ranks=data_rank, group="trainer", wait=3600)
        self.pace, self.current_step = CheckpointHook(self.lake, pace=True), current_step

    def wait(self):
        self.lake.can_follow_to(self.current_step)

    def can_receive(self):
        return self.current_step < self.lake.next_step

    def receive(self):
        found = self.decoder.decode(self.lake.read(self.current_step, self.data_rank, waits=True))
        self.current_step += 1
        if self.data_rank == 0:
            self.pace(self.current_step)
        return found


async def orchestrate(url, ranks, steps):
    sender = LakeSender(url, ranks)
    of_each = {"loss_mask": True, "advantages": 0.5, "position_ids": 0, "inference_logprobs": -1.0, "temperatures": 1.0}
    values = {name: [value] * 8 for name, value in of_each.items()} | {"sequence_lengths": [8], "seq_lens": [8]}
    for step in range(steps):
        batch = MicroBatch(**values, input_ids=[step] * 8, env_names=["math"])
        await sender.send([[batch, batch] for _ in range(ranks)])
    sender.close()


what, url, number, steps = *sys.argv[1:3], *map(int, sys.argv[3:])
if what == "send":
    asyncio.run(orchestrate(url, number, steps))
else:
    receiver = LakeReceiver(url, number)
    while receiver.current_step < steps:
        receiver.wait()
        print(f"step {receiver.current_step}: {len(receiver.receive())} micro-batches", flush=True)
