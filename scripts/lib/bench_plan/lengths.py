"""Lengths of documents in tokens: lognormal as measured for web text, and those of real files that every checkout has."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import botocore
import numpy as np

from quickstart.corpus import documentation
from stepfs_producer.plan.arrays import Integers

MEAN_TOKENS = 700
SIGMA = 1.3
BYTES_PER_TOKEN = 4
SERVICES = 60


def lognormal(seed: int, count: int) -> Integers:
    random = np.random.default_rng(seed)
    drawn = random.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, count)
    return np.maximum(drawn, 1).astype(np.int64)


def code(seed: int, count: int) -> Integers:
    """Of installed Python files."""
    return _shuffled(_code(), seed, count)


def prose(seed: int, count: int) -> Integers:
    """Of botocore's documentation."""
    return _shuffled(_prose(), seed, count)


KINDS: dict[str, Callable[[int, int], Integers]] = {"lognormal": lognormal, "code": code, "prose": prose}


def _shuffled(lengths: Integers, seed: int, count: int) -> Integers:
    return np.random.default_rng(seed).choice(lengths, count)


@cache
def _code() -> Integers:
    return _tokens([path.stat().st_size for path in code_files()])


@cache
def _prose() -> Integers:
    return _tokens([len(text) for text in prose_texts(SERVICES)])


def code_files() -> Iterator[Path]:
    """Installed Python files."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    return (path for root in roots for path in sorted(root.rglob("*.py")) if path.is_file())


def prose_texts(services: int | None = None) -> Iterator[str]:
    """Botocore's documentation of that many services; None: of all."""
    files = sorted((Path(botocore.__file__).parent / "data").glob("*/*/service-2.json.gz"))
    for path in islice(files, services):
        yield from documentation(json.loads(gzip.decompress(path.read_bytes())))


def _tokens(sizes: list[int]) -> Integers:
    return np.array([size // BYTES_PER_TOKEN + 1 for size in sizes if size], np.int64)
