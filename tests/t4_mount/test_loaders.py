"""Unmodified loaders of six kinds read a mount."""

from __future__ import annotations

import io
import itertools
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from finished import ran
from realmount import make_lake, mounted
from safetensors import safe_open
from safetensors.torch import save
from torch.utils.data import DataLoader, Dataset

from stepfs.torch import dump
from stepfs_producer import Producer

STEPS, SLICES, LENGTH = 6, 2, 50_000


def array(step: int, index: int) -> np.ndarray:
    return (np.arange(LENGTH, dtype=np.int64) * (step * SLICES + index + 1)).astype(np.int32)


def npy(step, index):
    out = io.BytesIO()
    np.save(out, array(step, index))
    return out.getvalue()


def pt(step, index):
    return dump({"ids": torch.from_numpy(array(step, index)), "step": step})


def tar(step, index):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for sample in range(4):
            data = array(step, index)[sample :: LENGTH // 8].tobytes()
            info = tarfile.TarInfo(f"{step:03d}{index}{sample}.bin")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def raw(step, index):
    return array(step, index).tobytes()


def tensors(step, index):
    return save({"ids": torch.from_numpy(array(step, index)), "more": torch.ones(7)})


@pytest.fixture
def reading(file_url, tmp_path):
    """A lake of payloads made by `encode`, mounted."""

    def begin(ext, encode):
        make_lake(file_url, slices=SLICES, ext=ext)
        with Producer(file_url, producer_id="p") as producer:
            for step in range(STEPS):
                producer.append([encode(step, index) for index in range(SLICES)], position=step)
        return mounted(file_url, tmp_path / "m")

    return begin


def each():
    return itertools.product(range(STEPS), range(SLICES))


def test_numpy_mmap(reading):
    with reading(".npy", npy) as mount:
        for step, index in each():
            loaded = np.load(mount.file(step, index, ".npy"), mmap_mode="r")
            assert np.array_equal(loaded, array(step, index))
            del loaded


def test_numpy_memmap_is_a_shared_mapping(reading):
    with reading(".bin", raw) as mount:
        for step, index in each():
            mapped = np.memmap(mount.file(step, index), dtype=np.int32, mode="r")
            assert np.array_equal(mapped, array(step, index))
            lines = Path("/proc/self/maps").read_text().splitlines()
            assert {line.split()[1] for line in lines if str(mount.directory) in line} == {"r--s"}
            del mapped


def test_torch_load_mmap(reading):
    with reading(".pt", pt) as mount:
        for step, index in each():
            loaded = torch.load(mount.file(step, index, ".pt"), mmap=True, weights_only=True)
            assert loaded["step"] == step
            assert np.array_equal(loaded["ids"].numpy(), array(step, index))
            del loaded


def test_safetensors(reading):
    with reading(".safetensors", tensors) as mount:
        for step, index in each():
            with safe_open(mount.file(step, index, ".safetensors"), framework="pt") as file:
                assert sorted(file.keys()) == ["ids", "more"]
                assert np.array_equal(file.get_tensor("ids").numpy(), array(step, index))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files to the collector
def test_webdataset(reading):
    with reading(".tar", tar) as mount:
        urls = [str(mount.file(step, index, ".tar")) for step, index in each()]
        samples = list(webdataset.WebDataset(urls, shardshuffle=False))
        assert len(samples) == STEPS * SLICES * 4
        for sample in samples:
            key = sample["__key__"]
            step, index, number = int(key[:3]), int(key[3]), int(key[4])
            assert sample["bin"] == array(step, index)[number :: LENGTH // 8].tobytes()


class Files(Dataset):
    def __init__(self, directory, rank):
        names = sorted(name for name in os.listdir(directory) if name.startswith("step-"))
        self.paths = [f"{directory}/{name}/rank-{rank:05d}.pt" for name in names]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, item):
        return torch.load(self.paths[item], weights_only=True)


def load_forked(directory: str) -> None:
    """Runs in a process of its own: forked workers of a test runner with threads are another story."""
    loader = DataLoader(Files(directory, 1), batch_size=None, num_workers=4, multiprocessing_context="fork")
    for _ in range(2):
        seen = [(batch["step"], int(batch["ids"][3])) for batch in loader]
        assert seen == [(step, int(array(step, 1)[3])) for step in range(STEPS)], seen


@pytest.mark.nightly
def test_a_forked_dataloader_with_four_workers(reading):
    with reading(".pt", pt) as mount:
        code = f"import test_loaders; test_loaders.load_forked({str(mount.directory)!r})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = ran([sys.executable, "-c", code], env=env)
        assert done.returncode == 0, done.stderr
