"""WebDataset on a mount: the `.tar` files of one rank, step after step, by two workers, in the lake's order.

    stepfs mount LAKE MOUNT --wait 300
    python train_webdataset.py MOUNT RANK FIRST STOP

A list of paths is all that WebDataset needs. Its workers take the files in turns, and a file holds one batch, so
batch k of the loader is step FIRST + k: to resume, store that one integer, and pass it as FIRST.

Prints one line per step: the number of samples, and the first tokens.
"""

import sys

import webdataset as wds

ROWS = 8  # samples in a file: `--batch-size` of `stepfs-produce text`


def every_file(paths):
    """In place of `wds.split_by_node`, which would deal the files among ranks: each rank has files of its own here."""
    return paths


def main(mount, rank, first, stop):
    paths = [f"{mount}/step-{step:09d}/rank-{rank:05d}.tar" for step in range(first, stop)]
    samples = (
        wds.WebDataset(paths, shardshuffle=False, nodesplitter=every_file)
        .decode()
        .to_tuple("input_ids.npy", "labels.npy")
        .batched(ROWS)
    )
    loader = wds.WebLoader(samples, batch_size=None, num_workers=2)
    for step, (ids, labels) in enumerate(loader, start=first):
        assert ids.shape == labels.shape
        print(f"step {step}: {len(ids)} samples, tokens {ids[0][:4].tolist()} …", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
