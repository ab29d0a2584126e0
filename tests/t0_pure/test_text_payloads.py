"""The five kinds of rank file, each read by the library its users read it with; and the pipeline that makes them."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import webdataset

from stepfs.errors import RefusedError, UsageError
from stepfs_producer.payloads.arrays import SliceBatch
from stepfs_producer.payloads.encode import encoder_for
from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.records import Shard, TextSource
from stepfs_producer.text.steps import Shape, TextPosition, TextStep, read_position, text_steps
from stepfs_producer.transforms.tokenize import ByteTokenizer

ALL = Shard()
EXTS = [".pt", ".safetensors", ".npy", ".tar", ".bin"]
BATCH = SliceBatch(
    input_ids=np.array([[10, 11, 256, 12], [13, 256, 257, 257]], np.int32),
    labels=np.array([[11, 256, -100, 13], [256, -100, -100, -100]], np.int32),
    position_ids=np.array([[0, 1, 2, 0], [0, 1, 0, 0]], np.int32),
    doc_ids=np.array([[0, 0, 0, 1], [0, 0, -1, -1]], np.int32),
    spans=np.array([[0, 0, 3, 0, 0, 2], [0, 3, 1, 1, 5, 1], [1, 0, 2, 1, 6, 1]], np.int64),
    sources=("a.txt", "bé.txt"),
    stream="0-of-2",
    first_row=40,
)


def test_pt() -> None:
    loaded = torch.load(io.BytesIO(encoder_for(".pt", vocabulary=258)(BATCH)), weights_only=True)
    assert loaded["input_ids"].tolist() == BATCH.input_ids.tolist()
    assert loaded["input_ids"].dtype == loaded["labels"].dtype == torch.int64
    assert loaded["position_ids"].dtype == loaded["doc_ids"].dtype == torch.int32
    assert loaded["spans"].tolist() == BATCH.spans.tolist()
    assert loaded["sources"] == ["a.txt", "bé.txt"]
    loss = torch.nn.functional.cross_entropy(torch.zeros(8, 258), loaded["labels"].ravel())
    assert loss.isfinite()


def test_pt_of_a_view_carries_only_its_own_rows() -> None:
    wide = np.zeros((1000, 64), np.int32)
    view = SliceBatch(wide[:1], wide[:1], wide[:1], wide[:1], np.zeros((0, 6), np.int64), (), "0-of-1", 0)
    assert len(encoder_for(".pt", vocabulary=258)(view)) < 8192


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "rank.safetensors"
    path.write_bytes(encoder_for(".safetensors", vocabulary=258)(BATCH))
    with safetensors.safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["sources"]) == ["a.txt", "bé.txt"]
        assert file.get_tensor("labels").tolist() == BATCH.labels.tolist()
        assert file.get_tensor("spans").tolist() == BATCH.spans.tolist()


def test_npy(tmp_path: Path) -> None:
    path = tmp_path / "rank.npy"
    path.write_bytes(encoder_for(".npy", vocabulary=258)(BATCH))
    input_ids, labels, position_ids, doc_ids = np.load(path, mmap_mode="r")
    assert input_ids.tolist() == BATCH.input_ids.tolist()
    assert labels.tolist() == BATCH.labels.tolist()
    assert position_ids.tolist() == BATCH.position_ids.tolist()
    assert doc_ids.tolist() == BATCH.doc_ids.tolist()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset leaves the file open
def test_tar(tmp_path: Path) -> None:
    path = tmp_path / "rank.tar"
    path.write_bytes(encoder_for(".tar", vocabulary=258)(BATCH))
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == ["0-of-2-000000000040", "0-of-2-000000000041"]
    assert samples[0]["input_ids.npy"].tolist() == [10, 11, 256, 12]
    assert samples[1]["labels.npy"].tolist() == [256, -100, -100, -100]
    assert samples[0]["json"] == {"spans": [[0, 3, "a.txt", 0, 2], [3, 1, "bé.txt", 5, 1]]}


@pytest.mark.parametrize(("vocabulary", "dtype"), [(258, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_bin(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    path = tmp_path / "rank.bin"
    path.write_bytes(encoder_for(".bin", vocabulary=vocabulary)(BATCH))
    assert np.memmap(path, dtype=dtype, mode="r").reshape(2, 4).tolist() == BATCH.input_ids.tolist()


def test_an_unknown_extension_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"\.parquet.*\.pt \.safetensors \.npy \.tar \.bin"):
        encoder_for(".parquet", vocabulary=258)


def steps_of(root: Path, ext: str, start: object = None, shard: Shard = ALL) -> list[TextStep]:
    source = TextSource(list_sources([root]), shard=shard)
    position = read_position(start, shard=shard, tokenizer="bytes")
    return list(text_steps(source, ByteTokenizer(), Shape(2, 3, 16, ext), position))


@pytest.mark.parametrize("ext", EXTS)
def test_the_pipeline_is_a_function_of_the_position(tmp_path: Path, ext: str) -> None:
    for n in range(21):
        (tmp_path / f"{n}.txt").write_bytes(bytes(range(65, 65 + n)) * n)
    whole = steps_of(tmp_path, ext)
    assert len(whole) > 10
    for cut in range(0, len(whole), 3):
        again = steps_of(tmp_path, ext, start=whole[cut].position.value())
        assert again == whole[cut + 1 :]
    assert [step.padding for step in whole[:-1]] == [0] * (len(whole) - 1)
    assert whole[-1].padding > 0
    assert all(step.records == [3, 3] for step in whole[:-1])
    assert whole[-1].records == [1, 0]
    last = whole[-1].position
    assert last.source_bytes == sum(n * n for n in range(21))
    assert last.steps == len(whole)
    assert last.rows == 6 * len(whole)
    assert steps_of(tmp_path, ext, start=last.value()) == []


def test_raw_slices_in_order_are_the_stream(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello world " * 100)
    data = b"".join(payload for step in steps_of(tmp_path, ".bin") for payload in step.payloads)
    ids = np.frombuffer(data, "<u2")
    assert ids[ids < 256].astype(np.uint8).tobytes() == b"hello world " * 100


def test_a_position_of_another_stream_is_refused() -> None:
    mine = Shard(1, 2)
    value: dict[str, object] = TextPosition(mine, "bytes").value() | {"at": ["a", 3, 0, 1]}
    assert read_position(value, shard=mine, tokenizer="bytes").value() == value
    with pytest.raises(RefusedError, match="continue it with --shard 1/2"):
        read_position(value, shard=Shard(0, 2), tokenizer="bytes")
    with pytest.raises(RefusedError, match="tokens of bytes, not bpe-1"):
        read_position(value, shard=mine, tokenizer="bpe-1")
    for foreign in (7, {"pipeline": "images"}, [1]):
        with pytest.raises(RefusedError, match="another pipeline"):
            read_position(foreign, shard=mine, tokenizer="bytes")
    for broken in ({"at": None}, {"shard": 3}, {"steps": None}, {"shard": [5, 2]}):
        with pytest.raises(RefusedError):
            read_position(value | broken, shard=mine, tokenizer="bytes")
