"""Train a small transformer on packed micro-batches under DIR. Plain PyTorch: it has never heard of stepfs.

python -m quickstart.train DIR VOCABULARY MICRO_BATCHES TOKENS
"""
# Written as such scripts are written: without types.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN204, D101, PTH118, PTH208

import os
import sys
import time
from itertools import pairwise

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Steps(Dataset):
    def __init__(self, root):
        self.steps = [os.path.join(root, name) for name in sorted(os.listdir(root)) if name.startswith("step-")]

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, number):
        step = self.steps[number]
        return [load_file(os.path.join(step, name)) for name in sorted(os.listdir(step))]


def check(batch, shape):
    """What a training program relies on."""
    ids, labels, places, documents = (batch[name] for name in ("input_ids", "labels", "position_ids", "doc_ids"))
    assert ids.shape == labels.shape == places.shape == documents.shape == shape
    assert (ids.dtype, labels.dtype, places.dtype) == (torch.int64, torch.int64, torch.int32)
    offsets, ends = batch["cu_seqlens_offsets"], batch["cu_seqlens"]
    assert (ends.dtype, offsets[0], offsets[-1], len(offsets)) == (torch.int32, 0, len(ends), len(ids) + 1)
    for micro in range(len(ids)):
        bounds = ends[offsets[micro] : offsets[micro + 1]]
        assert bounds[0] == 0 and bounds[-1] == shape[1] and (bounds.diff() > 0).all()  # noqa: PT018
        for begin, end in pairwise(bounds.tolist()):
            span = documents[micro, begin:end]
            assert (span == span[0]).all()  # one document, or padding
            if span[0] >= 0:
                assert (places[micro, begin:end] == torch.arange(end - begin)).all()
                assert (labels[micro, begin : end - 1] == ids[micro, begin + 1 : end]).all()
            else:
                assert (labels[micro, begin:end] == -100).all()


class Model(nn.Module):
    def __init__(self, vocabulary, width=48):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.mix, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, places, bounds):
        """Of one flat micro-batch; attention inside each document, as variable-length kernels do it."""
        inner = self.tokens(ids) + self.places(places)
        query, key, value = self.mix(self.norm(inner)).chunk(3, dim=-1)
        seen = [
            nn.functional.scaled_dot_product_attention(
                query[None, begin:end], key[None, begin:end], value[None, begin:end], is_causal=True
            )[0]
            for begin, end in pairwise(bounds)
        ]
        return self.head(inner + torch.cat(seen))


def train(model, batches):
    """The loss of a step: gradients of every rank's micro-batches are accumulated, as ranks would sum theirs."""
    losses = []
    for batch in batches:
        for micro in range(len(batch["input_ids"])):
            offsets = batch["cu_seqlens_offsets"]
            bounds = batch["cu_seqlens"][offsets[micro] : offsets[micro + 1]].tolist()
            logits = model(batch["input_ids"][micro], batch["position_ids"][micro], bounds)
            losses.append(nn.functional.cross_entropy(logits, batch["labels"][micro]))
            losses[-1].backward()
    return torch.stack(losses).mean().item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    root, vocabulary, micro_batches, tokens = sys.argv[1], *map(int, sys.argv[2:5])
    steps, model = Steps(root), Model(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    started, smooth, checked = time.monotonic(), None, 0
    for number, batches in enumerate(DataLoader(steps, batch_size=None, num_workers=1)):
        for batch in batches:
            check(batch, (micro_batches, tokens))
            checked += 1
        optimizer.zero_grad()
        loss = train(model, batches)
        optimizer.step()
        smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss
        if number % 20 == 0 or number == len(steps) - 1:
            print(f"step {number:4d}  loss {smooth:.3f}  {time.monotonic() - started:5.1f} s", flush=True)
    print(f"{checked} batches are as they should be", flush=True)


if __name__ == "__main__":
    main()
