"""Train a small transformer on every step directory under DIR. Plain PyTorch: it has never heard of stepfs.

python -m quickstart.train DIR
"""
# Written as such scripts are written: without types.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN204, D101, PTH118, PTH208

import os
import sys
import time

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
        ranks = [load_file(os.path.join(step, name)) for name in sorted(os.listdir(step))]
        return {key: torch.cat([rank[key] for rank in ranks]) for key in ("input_ids", "position_ids", "labels")}


class Model(nn.Module):
    def __init__(self, vocabulary=258, width=96, length=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, ids, places):
        return self.head(self.layers(self.tokens(ids) + self.places(places), self.mask, is_causal=True))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps, model = Steps(sys.argv[1]), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    started, smooth = time.monotonic(), None
    for number, batch in enumerate(DataLoader(steps, batch_size=None, num_workers=2)):
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
        if number % 50 == 0 or number == len(steps) - 1:
            print(f"step {number:4d}  loss {smooth:.3f}  {time.monotonic() - started:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
