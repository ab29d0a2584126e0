"""Images with captions: from WebDataset tars by a plan to a vision-language loop of PyTorch on a mount.

    sources: {pictures: {format: "train_images:Shards", files: "shards/*.tar", transform: "train_images:sample", images: jpg}}

    python train_images.py MOUNT RANK FIRST STOP

stepfs decodes the field `jpg` in the producer's workers; a placeholder token stands for four patches. Prints one line
per step: its loss, and how many patches it has.
"""

import sys
import tarfile
from itertools import groupby

IMAGE = 0  # the placeholder: for the tokenizer `bytes` it is NUL, which is in no caption


class Shards:
    def records(self, file, part):
        with tarfile.open(fileobj=file) as tar:  # a sample's files are neighbours: 000017.jpg, 000017.txt
            for _, group in groupby(tar, key=lambda entry: entry.name.partition(".")[0]):
                files = list(group)
                read = {one.name.partition(".")[2]: tar.extractfile(one).read() for one in files}
                yield files[0].offset, read


def sample(record):
    image, caption = record["jpg"], list(record["txt"])
    places = len(image.pixels) // 4
    mask = [0] * places + [1] * len(caption)
    beside = {"pixels": image.pixels, "grid": image.grid}
    return {"input_ids": [IMAGE] * places + caption, "loss_mask": mask, "columns": beside}


def train(mount, rank, first, stop):
    import torch  # noqa: PLC0415 - here, because the plan's workers import this file, too
    from safetensors.torch import load_file  # noqa: PLC0415

    torch.manual_seed(0)
    encode, embed = torch.nn.Linear(4 * 588, 32), torch.nn.Embedding(258, 32)
    model = torch.nn.ModuleList([encode, embed, decode := torch.nn.Linear(32, 258)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(first, stop):
        file = f"{mount}/step-{step:09d}/rank-{rank:05d}"
        batch, beside = load_file(f"{file}.safetensors"), load_file(f"{file}.pixels.safetensors")
        features = encode(beside["pixels"].reshape(-1, 4 * 588) / 127.5 - 1)  # normalised here: a byte becomes four
        places = (batch["input_ids"] == IMAGE)[..., None]
        logits = decode(embed(batch["input_ids"]).masked_scatter(places, features))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.3f}: {len(beside['pixels'])} patches", flush=True)


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:]))
