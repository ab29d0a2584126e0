"""Images that stand in a lake as they were encoded: whoever reads it gets the batches of a lake with pixels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pyarrow as pa
import pytest
from committed import committed
from lakes import produce, stepfs
from PIL import Image
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer
from torch.utils.data import DataLoader

from stepfs import Lake, StepDataset
from stepfs._internal import image_patches
from stepfs.errors import MissingPackageError

PLAN = """\
version: 1
output:
  mesh: "dp=2"
  sequence_length: 128
  micro_batches: 2
  columns: {pixels: {dtype: uint8, shape: [588]}, grid: {dtype: int32, shape: [3]}}
tokenizer: {kind: huggingface, file: tokenizer.json, eos: "<|endoftext|>"}
sources: {talks: {format: parquet, files: talks.parquet, chat: messages, images: {fields: picture, decode: PLACE}, epochs: 1}}
cost: {hidden_size: 64, columns: {pixels: 100}}
balance: {loads: [tokens, pixels]}
until: {last: pad}
"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def picture(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 255, (3, 4, 4), np.uint8)
    file = io.BytesIO()
    size = (28 * (1 + number % 3), 28 * (1 + number % 2))
    Image.fromarray(noise.transpose(1, 2, 0)).resize(size).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory of the plans, and the lakes: decoded by the producer, by the reader."""
    directory = tmp_path_factory.mktemp("rest")
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens([AddedToken(one) for one in ("<|im_start|>", "<|im_end|>", "<|image_pad|>")])
    model.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    asks = [{"type": "image"}, {"type": "text", "text": "what?"}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": asks if n % 4 else asks[1:]},
                {"role": "assistant", "content": [{"type": "text", "text": f"{n} it is"}]},
            ],
            "picture": picture(n) if n % 4 else None,
        }
        for n in range(60)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), directory / "talks.parquet")
    found = []
    for place in ("producer", "reader"):
        plan = directory / f"{place}.yaml"
        plan.write_text(PLAN.replace("PLACE", place))
        found.append(f"file://{directory}/{place}")
        done = produce("run", plan, found[-1], "--workers", 2)
        assert done.returncode == 0, done.stderr
    return directory, found


def same(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape)
        assert bool((array == right[name]).all())


def test_the_workers_of_a_loader_decode_them(lakes: tuple[Path, list[str]]) -> None:
    _, urls = lakes
    with Lake(urls[0]) as lake:
        steps = lake.next_step
    assert steps > 2
    for rank in (0, 1):
        for options in ({}, {"mesh": "dp=2"}):
            loaders = [
                DataLoader(StepDataset(url, rank=rank, stop=steps, **options), batch_size=None, num_workers=1)
                for url in urls
            ]
            for theirs, ours in zip(*loaders, strict=True):
                parts = zip(theirs, ours, strict=True) if options else [(theirs, ours)]
                for left, right in parts:
                    same(left, right)


def test_a_lake_with_them_is_smaller_and_shows_the_same(lakes: tuple[Path, list[str]]) -> None:
    directory, urls = lakes
    views, sizes = [], []
    for url in urls:
        sizes.append(sum(len(payload) for _, payloads in committed(url) for payload in payloads))
        shown = produce("view", url, "--step", 1, "--json", "--plan-dir", directory)
        assert shown.returncode == 0, shown.stderr
        views.append(shown.stdout.partition('"sources"')[2].replace(url, ""))
        assert produce("replay", url, "--steps", "0:3", "--plan-dir", directory).returncode == 0
        assert stepfs("verify", url).returncode == 0
    assert views[0] == views[1]
    assert "patches" in views[0]
    assert 3 * sizes[1] < sizes[0]


def test_another_place_is_another_source_and_without_pillow_the_extra_is_named(
    lakes: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, urls = lakes
    refused = produce("run", directory / "producer.yaml", urls[1], "--accept-changes")
    assert refused.returncode == 4
    assert "source talks is not the one" in refused.stderr
    monkeypatch.setattr(image_patches, "find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'stepfs\[images\]'"):
        StepDataset(urls[1], rank=0, stop=1)[0]  # type: ignore[index]
