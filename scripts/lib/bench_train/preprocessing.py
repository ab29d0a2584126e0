"""The preprocessing that both sides of bench_train do: JPEG decode and augment; tokenise and pack. And their inputs.

A producer does it once, ahead, and commits what comes out; a colocated DataLoader does it in its workers while the
accelerator waits. The corpora are made up or found on any machine: smooth noise as JPEG, the standard library's sources.
"""

from __future__ import annotations

import io
import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bench_train.augment import EDGE, augmented

_JPEG_SIZE = (500, 375)
_JPEG_QUALITY = 90
_IMAGES = 64
_VOCABULARY = 8192
_CHARS_PER_TOKEN = 5  # more than there are: a text of that length fills a sequence
_CORPUS = ("asyncio", "email", "http", "json", "unittest", "concurrent")


class Work(Protocol):
    """One kind of samples. `prepare` makes the corpus once, `sample(i)` does the work of one sample."""

    name: str

    @property
    def sample_bytes(self) -> int: ...

    def prepare(self) -> None: ...

    def sample(self, number: int) -> torch.Tensor: ...


@dataclass
class Images:
    """JPEG → random crop, resized to 224 × 224, flipped half of the time; uint8, channels first."""

    directory: Path
    name: str = "JPEG decode + augment"
    sample_bytes: int = 3 * EDGE * EDGE

    def prepare(self) -> None:
        draw = np.random.default_rng(5)
        for number in range(_IMAGES):
            coarse = draw.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize(_JPEG_SIZE, Image.Resampling.BICUBIC)
            grain = draw.integers(0, 24, (*_JPEG_SIZE[::-1], 3), dtype=np.uint8)
            out = io.BytesIO()
            Image.fromarray(np.asarray(image) // 2 + grain).save(out, "JPEG", quality=_JPEG_QUALITY)
            (self.directory / f"{number}.jpg").write_bytes(out.getvalue())

    def sample(self, number: int) -> torch.Tensor:
        return augmented(self.directory / f"{number % _IMAGES}.jpg", number)


@dataclass
class Text:
    """Documents → BPE tokens → packed to `length`; int32."""

    directory: Path
    length: int = 4096
    name: str = "tokenise + pack"

    @property
    def sample_bytes(self) -> int:
        return 4 * self.length

    def prepare(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [path for name in _CORPUS for path in sorted((library / name).rglob("*.py"))]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=_VOCABULARY, show_progress=False))
        tokenizer.save(str(self.directory / "tokenizer.json"))
        (self.directory / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")

    def sample(self, number: int) -> torch.Tensor:
        tokenizer, corpus = self._loaded()
        start = random.Random(number).randrange(max(1, len(corpus) - self.length * _CHARS_PER_TOKEN))
        packed: list[int] = []
        while len(packed) < self.length:
            stop = start + self.length * _CHARS_PER_TOKEN
            packed += tokenizer.encode(corpus[start:stop]).ids
            start = 0 if stop >= len(corpus) else stop
        return torch.tensor(packed[: self.length], dtype=torch.int32)

    def _loaded(self) -> tuple[Tokenizer, str]:
        if not hasattr(self, "_held"):  # per process: a worker loads its own
            corpus = (self.directory / "corpus.txt").read_text(encoding="utf-8")
            self._held = Tokenizer.from_file(str(self.directory / "tokenizer.json")), corpus
        return self._held


WORKS: dict[str, Callable[[Path], Work]] = {"images": Images, "text": Text}


def batch(work: Work, numbers: Sequence[int]) -> torch.Tensor:
    """What one step needs."""
    return torch.stack([work.sample(number) for number in numbers])
