"""Images with captions from a pipeline of your own: several processes, every sample in exactly one step.

    stepfs init LAKE --slices 2 --ext .tar --check-payload
    python produce_images.py make LAKE 0 2         # shard 0 of 2
    python produce_images.py make LAKE 1 2         # shard 1 of 2, at the same time, on any machine
    python produce_images.py count MOUNT           # reads everything back

Each process has a producer id of its own, which its restarts keep. `position` is committed together with the step, so a
process that was killed continues exactly behind its last step: what was under way is made again, nothing is twice.

`make` prints where it starts; `count` prints how many samples there are, and how many of them are there twice.
"""

import io
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

from PIL import Image, ImageDraw

from stepfs_producer import Producer

SAMPLES, SLICES, PER_SLICE = 640, 2, 4


def sample(number):
    """The encoded image and the caption of one sample. Here they are made; a real pipeline reads and resizes them."""
    color = number * 37 % 256, number * 59 % 256, number * 83 % 256
    image, file = Image.new("RGB", (64, 64), color), io.BytesIO()
    ImageDraw.Draw(image).text((8, 24), str(number), fill="white")
    image.save(file, "JPEG")
    return file.getvalue(), f"the number {number} on color {color}"


def payload(numbers):
    """One slice: a tar as WebDataset reads it, `KEY.jpg` and `KEY.txt` of each sample."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in numbers:
            image, caption = sample(number)
            for ext, data in (("jpg", image), ("txt", caption.encode())):
                entry = tarfile.TarInfo(f"{number:06d}.{ext}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def make(lake, shard, shards):
    mine = range(shard, SAMPLES, shards)
    with Producer(lake, producer_id=f"images-{shard}") as producer:
        done = producer.position or 0  # how many of mine are committed; None before the first step
        print(f"images-{shard}: {done} of {len(mine)} samples are committed", flush=True)
        for start in range(done, len(mine), SLICES * PER_SLICE):
            step = mine[start : start + SLICES * PER_SLICE]
            producer.append([payload(step[i::SLICES]) for i in range(SLICES)], position=start + len(step))
            time.sleep(0.1)  # in place of a pipeline's work
    print(f"images-{shard}: done", flush=True)  # leaving the block has waited for the last commit


def count(mount):
    found = Counter()
    for path in sorted(Path(mount).glob("step-*/rank-*.tar")):
        with tarfile.open(path) as tar:
            found.update(Path(name).stem for name in tar.getnames() if name.endswith(".jpg"))
    print(f"{len(found)} of {SAMPLES} samples, {sum(found.values()) - len(found)} of them twice")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        count(sys.argv[2])
