"""Rollouts of asynchronous RL as a lake: a collector commits them, a trainer reads them, and both may be killed.

python rollouts.py collect LAKE DIR STEPS   workers hand completions to the fleet's collector, which commits steps of them
python rollouts.py train LAKE DIR STEPS     reads each step once, skips what is too old, records its pace and checkpoints
python rollouts.py replay LAKE DIR STEPS    trains anew from the lake alone: prints the same numbers, to the last digit
"""

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stepfs import CheckpointHook, Lake, StreamState
from stepfs_producer import Producer

AHEAD, TOO_OLD, PROMPTS, COMPLETIONS, KEEP_EVERY = 2, 3, 4, 8, 3  # in steps; of a step; of a prompt; steps


def generate(weights, seed):
    """What an inference worker returns for one prompt: a group of completions, and their rewards."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(weights.softmax(0), COMPLETIONS * 16, replacement=True, generator=draw)
    tokens = tokens.reshape(COMPLETIONS, 16)
    return {"tokens": tokens, "rewards": (tokens % 7 == 0).float().sum(1)}


def collect(url, directory, steps):
    with Producer(url, producer_id="collector", max_lead=AHEAD) as producer, ThreadPoolExecutor(4) as workers:
        for step in range(producer.position or 0, steps):
            newest = load(directory)  # in a fleet: the weights that its engines serve now
            seeds = range(PROMPTS * step, PROMPTS * (step + 1))
            groups = list(workers.map(lambda seed, now=newest: generate(now["weights"], seed), seeds))
            payload = io.BytesIO()
            torch.save(groups, payload)
            note = {"policy": newest["stream"].get("next_step", 0)}
            producer.append(
                [payload.getvalue()], position=step + 1, note=note
            )  # waits while it is `AHEAD` of the trainer


def learn(weights, groups):
    for group in groups:
        for tokens, advantage in zip(group["tokens"], group["rewards"] - group["rewards"].mean(), strict=True):
            weights = weights.index_add(0, tokens, torch.full(tokens.shape, 1e-2) * advantage)
    return weights


def train(url, directory, steps, *, records):
    directory.mkdir(exist_ok=True)
    with Lake(url, group="trainer" if records else None, wait=300) as lake:
        stream, state = StreamState.of_lake(lake), load(directory)
        if state["stream"]:
            stream.load_state_dict(state["stream"])
        weights, durable = state["weights"], CheckpointHook(lake, keep=2) if records else lambda _: None
        pace = CheckpointHook(lake, pace=True) if records else lambda _: None
        while stream.next_step < steps:
            pace(stream.next_step)
            groups = torch.load(io.BytesIO(lake.read(stream.next_step, 0, waits=True)))
            if stream.next_step - lake.note(stream.next_step)["policy"] <= TOO_OLD:
                weights = learn(weights, groups)
            stream.next_step += 1
            if stream.next_step % KEEP_EVERY == 0 or stream.next_step == steps:
                torch.save({"weights": weights, "stream": stream.state_dict()}, directory / "new.pt")
                (directory / "new.pt").rename(directory / "checkpoint.pt")
                durable(stream.next_step)
    print(f"{steps} steps, weights {weights.double().square().sum().item().hex()}")


def load(directory):
    saved = directory / "checkpoint.pt"
    return torch.load(saved) if saved.exists() else {"weights": torch.zeros(64), "stream": {}}


what, url, directory, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
if what == "collect":
    collect(url, directory, steps)
else:
    train(url, directory, steps, records=what == "train")
