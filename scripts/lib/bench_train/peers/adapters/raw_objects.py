"""torch alone: workers GET raw objects and preprocess them, tokenising and packing, or decoding and cropping.

Text is one object of documents per batch; images are one object each, as they lie in buckets, and a worker gets the
images of its batch by several threads. The order is the sampler's.
"""

from __future__ import annotations

import json
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from bench_train.peers import samples
from bench_train.peers.adapters.whole_batches import Counted
from bench_train.peers.job import TEXT, Batch, Data, Order

_THREADS = 16  # of one worker
_VOCABULARY = 8192
_CORPUS = ("asyncio", "email", "http", "json", "unittest", "concurrent")


def imports() -> None:
    import boto3  # noqa: F401, PLC0415


def write(order: Order) -> None:
    data = order.data
    if data.kind != TEXT:
        samples.upload(order, ((f"{each:08d}.jpg", partial(samples.jpeg, data, each)) for each in range(data.samples)))
        return
    _prepare(Path(data.directory))
    numbers = range(data.batches)
    samples.upload(order, ((f"{each:06d}.jsonl", partial(_documents, data, each)) for each in numbers))


def _prepare(directory: Path) -> None:
    """The sources of the standard library, and a tokenizer trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415

    library = Path(sysconfig.get_path("stdlib"))
    files = [path for name in _CORPUS for path in sorted((library / name).rglob("*.py"))]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=_VOCABULARY, show_progress=False))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")


def _documents(data: Data, number: int) -> bytes:
    """The documents of a batch, one per sample, each long enough for `TOKENS` tokens."""
    corpus = _corpus(data.directory)
    size = samples.TOKENS * 5
    ids = range(number * data.batch, (number + 1) * data.batch)
    starts = [(each * size) % max(1, len(corpus) - size) for each in ids]
    lines = [{"id": each, "text": corpus[start : start + size]} for each, start in zip(ids, starts, strict=True)]
    return "\n".join(map(json.dumps, lines)).encode()


@cache
def _corpus(directory: str) -> str:
    return (Path(directory) / "corpus.txt").read_text(encoding="utf-8")


@cache
def _tokenizer(directory: str) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))


class Raw(Dataset[Batch]):
    """A batch by number, from its raw objects."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __getitem__(self, number: int) -> Batch:
        data = self._order.data
        if data.kind == TEXT:
            return self._texts(self._get(f"{number:06d}.jsonl"))
        ids = range(number * data.batch, (number + 1) * data.batch)
        _client()  # before there are threads that would each make one
        with ThreadPoolExecutor(_THREADS) as pool:
            bodies = list(pool.map(self._get, [f"{each:08d}.jpg" for each in ids]))
        pixels = [samples.decoded_jpeg(body, each) for each, body in zip(ids, bodies, strict=True)]
        return torch.tensor(list(ids)), torch.stack(pixels)

    def _texts(self, body: bytes) -> Batch:
        tokenizer = _tokenizer(self._order.data.directory)
        ids, packed = [], np.zeros((self._order.data.batch, samples.TOKENS), np.int32)
        for row, line in enumerate(body.splitlines()):
            document = json.loads(line)
            found = tokenizer.encode(document["text"]).ids[: samples.TOKENS]
            packed[row, : len(found)] = found
            ids.append(document["id"])
        return torch.tensor(ids), torch.from_numpy(packed)

    def _get(self, name: str) -> bytes:
        body: bytes = _client().get_object(Bucket=self._order.bucket, Key=f"{self._order.place}/{name}")["Body"].read()
        return body


@cache
def _client() -> Any:
    """One for all threads of a worker, made in the worker."""
    import boto3  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    return boto3.client("s3", config=Config(max_pool_connections=_THREADS, s3={"addressing_style": "path"}))


def train(order: Order, state: Any) -> Counted:
    return Counted(Raw(order), order, state)
