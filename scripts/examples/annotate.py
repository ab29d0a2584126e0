"""A teacher's logits beside each batch: a second lake, whose steps belong to those of the first.

    stepfs init BESIDE --slices 2
    python annotate.py teach LAKE BESIDE           # follows LAKE; killed and started again, it makes no step twice
    python annotate.py read LAKE BESIDE            # what a trainer reads: both, joined

A step that belongs to another lake, or to another history of this one, is refused and not learned. The group holds
what is not annotated yet. Reference log-probabilities of preference pairs are made in the same way.

`read` prints each step, and whether the logits are those of its tokens.
"""

import sys

import torch
from safetensors.torch import load, save

from stepfs import CheckpointHook, Lake, StepDataset
from stepfs_producer import Producer

what, url, beside = sys.argv[1:]


def logits(batch):
    """A model's work. Here it is a hash of each token, for a vocabulary of four."""
    return torch.stack([batch["input_ids"] * factor % 97 for factor in (3, 5, 7, 11)], -1).half()


if what == "teach":
    with Lake(url, group="teacher", wait=60) as lake, Producer(beside, producer_id="teacher") as producer:
        done = CheckpointHook(lake, keep=1)
        for step in lake.follow(producer.position or lake.first_step):
            found = [save({"teacher": logits(load(bytes(step[rank])))}) for rank in range(lake.world)]
            producer.append(found, position=step + 1, note=step.tie())
            if step % 8 == 7:
                producer.flush()
                done(step + 1)
else:
    for number, batch in enumerate(StepDataset(url, beside=beside, rank=0)):
        print(number, torch.equal(batch["teacher"], logits(batch)))
