"""Plans of images and captions: from the tars of an example to files, killed in between, and with bad images among them."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from committed import committed
from forked import Forked
from lakes import stepfs
from PIL import Image
from planned_lake import one_line, produce
from realmount import mounted, until

from stepfs_producer.run.lake import libraries

EXAMPLE = Path(__file__).resolve().parents[2] / "scripts/examples/train_images.py"
pytestmark = pytest.mark.timeout(600)  # a run takes seconds, and minutes beside many others
COUNT = 90
PLAN = """\
version: 1
output:
  mesh: "dp=2"
  micro_batches: 2
  sequence_length: 256
  micro_batch_tokens: 512
  columns: {pixels: {dtype: uint8, shape: [588]OWN}, grid: {dtype: int32, shape: [3]}}
sources:
  pictures: {format: "train_images:Shards", files: "shards/*.tar", transform: "train_images:sample", images: jpg, epochs: 1}
  words: {format: text, records: lines, files: words.txt, epochs: 3}
mix: {pictures: 70, words: 30}
cost: {hidden_size: 64, columns: {pixels: 100}}
balance: {loads: [tokens, pixels]}
"""


def picture(number: int) -> tuple[bytes, str]:
    """A number's size and shade, as the caption says them; every ninth is too long for a row of 256 tokens."""
    width, height = 28 * (1 + number % 5), 28 * (1 + number % 3)
    if number % 9 == 4:
        width = height = 28 * 17
    file = io.BytesIO()
    Image.new("RGB", (width, height), (number, 2 * number, 255 - number)).save(file, "PNG")
    return file.getvalue(), f"{number}: {width // 28} x {height // 28}"


def write_plan(directory: Path, *, own: bool = True, spoilt: int | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    shutil.copy(EXAMPLE, directory)
    (directory / "shards").mkdir()
    for shard in range(3):
        with tarfile.open(directory / f"shards/{shard}.tar", "w") as tar:
            for number in range(shard, COUNT, 3):
                data, caption = picture(number)
                if number == spoilt:
                    data = data[: len(data) // 2]
                for ending, body in (("jpg", data), ("txt", caption.encode())):
                    entry = tarfile.TarInfo(f"{number:06d}.{ending}")
                    entry.size = len(body)
                    tar.addfile(entry, io.BytesIO(body))
    (directory / "words.txt").write_text("".join(f"line {n} " + "w" * (n % 80) + "\n" for n in range(300)))
    path = directory / "plan.yaml"
    path.write_text(PLAN.replace("OWN", ", file: own" if own else ""))
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The plan's directory, and the steps of an undisturbed run."""
    directory = tmp_path_factory.mktemp("pictures")
    plan = write_plan(directory)
    done = produce("run", plan, f"file://{directory}/lake", "--workers", 1, "--json")
    assert done.code == 0, done.err
    return directory, [payloads for _, payloads in committed(f"file://{directory}/lake")], done.document


def test_a_view_says_the_size_of_each_image(original) -> None:
    directory, _, _ = original
    for target in ([f"file://{directory}/lake", "--step", 0], [directory / "plan.yaml", "--samples", 9]):
        rows = produce("view", *target, "--json").document["rows"]
        documents = [one for row in rows for one in row["documents"] if one["source"] == "pictures"]
        assert len(documents) >= 9
        for one in documents:
            text = "".join(part["text"] for part in one["parts"] if part["kind"] == "text").replace("\0", "")
            width, height = map(int, re.search(r": (\d+) x (\d+)", text).groups())
            assert one["images"] == [f"image {28 * width} × {28 * height} pixels, {2 * width} × {2 * height} patches"]
    shown = produce("view", f"file://{directory}/lake", "--step", 0, "--source", "pictures").out
    assert re.search(r"\n  ┌ image \d+ × \d+ pixels, \d+ × \d+ patches ┐\n", shown)


def test_each_image_stands_with_its_caption_and_its_placeholders(original) -> None:
    _, steps, document = original
    seen = set()
    for payloads in steps:
        assert len(payloads) == 4
        for main, beside in zip(payloads[::2], payloads[1::2], strict=True):
            batch, pixels = safetensors.numpy.load(main), safetensors.numpy.load(beside)["pixels"]
            assert int((batch["input_ids"] == 0).sum()) * 4 == len(pixels)
            patches, grids = (
                iter(np.split(pixels, np.cumsum(batch["pixels_counts"])[:-1])),
                iter(batch["grid"]),
            )
            for span, rows, grid in zip(
                batch["spans"].tolist(), batch["pixels_counts"], batch["grid_counts"], strict=True
            ):
                mine = next(patches)
                micro, start, tokens = span[:3]
                ids = batch["input_ids"][micro, start : start + tokens]
                assert (ids == 0).sum() * 4 == rows == len(mine)
                assert grid == (rows > 0)
                if not rows:
                    continue
                text = bytes(ids[(ids > 0) & (ids < 256)].astype(np.uint8)).decode()
                number, width, height = map(int, re.fullmatch(r"(\d+): (\d+) x (\d+)", text).groups())
                assert next(grids).tolist() == [1, 2 * height, 2 * width]
                assert set(map(tuple, mine.reshape(-1, 3).tolist())) == {(number, 2 * number, 255 - number)}
                assert number not in seen
                seen.add(number)
    long = {number for number in range(COUNT) if number % 9 == 4}
    left = document["sources"]["pictures"]["records"]
    assert not seen & long
    assert len(seen) >= left - len(long)
    assert document["lost_tokens"] >= 289 * 2
    assert set(document["loads"]) == {"tokens", "pixels"}


@pytest.mark.nightly
def test_killed_and_continued_with_other_workers_it_makes_the_same_bytes(original, tmp_path) -> None:
    directory, steps, _ = original
    lake = f"file://{tmp_path}/lake"
    words = ["run", directory / "plan.yaml", lake, "--workers", 2, "--steps-per-second", 2]
    with Forked("stepfs_producer", *words):  # which kills it
        until(lambda: (tmp_path / "lake/lake.msgpack").exists() and len(committed(lake)) > 1, "no step")
    assert produce("run", directory / "plan.yaml", lake, "--workers", 3).code == 0
    assert [payloads for _, payloads in committed(lake)] == steps


def test_a_run_without_files_beside_has_the_same_arrays_and_is_refused_by_the_other_lake(original, tmp_path):
    directory, steps, _ = original
    plan = directory / "inside.yaml"
    plan.write_text(PLAN.replace("OWN", ""))
    lake = f"file://{tmp_path}/lake"
    assert produce("run", plan, lake, "--workers", 1).code == 0
    for whole, parts in zip(committed(lake), steps, strict=True):
        for payload, main, beside in zip(whole[1], parts[::2], parts[1::2], strict=True):
            together = {**safetensors.numpy.load(main), **safetensors.numpy.load(beside)}
            inside = safetensors.numpy.load(payload)
            assert {name: array.tolist() for name, array in inside.items()} == {
                name: array.tolist() for name, array in together.items()
            }
    one_line(
        produce("run", plan, f"file://{directory}/lake"),
        4,
        "has 4 slices (ranks 2 × files 2) per step, not 2 slices",
    )


def test_a_stage_without_the_encoder_fetches_no_pixel(original, tmp_path) -> None:
    directory, steps, _ = original
    lake = f"file://{directory}/lake"
    with mounted(lake, tmp_path / "m") as mount:
        names = sorted(path.name for path in mount.step(0).iterdir())
        assert names == [f"rank-0000{rank}{file}.safetensors" for rank in range(2) for file in (".pixels", "")]
        for step, payloads in enumerate(steps):
            assert mount.file(step, 1, ".safetensors").read_bytes() == payloads[2]
        texts = sum(len(payloads[2]) for payloads in steps)
        data = mount.status()["data"]
        assert texts <= data["bytes_fetched"] <= 1.02 * texts, data
        assert (mount.step(1) / "rank-00001.pixels.safetensors").read_bytes() == steps[1][3]
        lineage = ("lineage", str(mount.step(1) / "rank-00001.pixels.safetensors"), "--json")
        beside, main = (
            produce(*lineage).document["spans"],
            produce("lineage", str(mount.file(1, 1, ".safetensors")), "--json").document["spans"],
        )
        assert beside == main != []
    assert stepfs("verify", lake, "--check-payload").code == 0
    beside = stepfs("show", lake, "--step", 1, "--rank", 1, "--beside", "pixels", "--json").document["arrays"]
    assert [(one["name"], one["dtype"], one["shape"][1:]) for one in beside] == [("pixels", "uint8", [588])]


def test_replay_and_lineage_know_images(original) -> None:
    directory, _, _ = original
    lake = f"file://{directory}/lake"
    done = produce("replay", lake, "--steps", "0:3", "--plan-dir", directory, "--workers", 1)
    assert (done.code, "all the same" in done.out) == (0, True), done.err
    spans = produce("lineage", lake, "--step", 0, "--text", "--plan-dir", directory, "--json").document["spans"]
    shown = [json.loads(span["text"]) for span in spans if span["source"] == "pictures"]
    assert shown
    assert all(re.fullmatch(r"\d+ bytes", one["jpg"]) for one in shown)


def test_check_and_simulate_show_slices_and_both_loads(original) -> None:
    directory, _, document = original
    assert "4 (mesh dp=2: 2 ranks; each coordinate of dp has 2 slices)" in produce("check", directory / "plan.yaml").out
    done = produce("simulate", directory / "plan.yaml", "--limit-steps", 3, "--workers", 1)
    assert re.search(
        r"^  tokens +slowest ÷ mean rank 1\.\d+.*\n  pixels +slowest ÷ mean rank 1\.", done.out, re.MULTILINE
    )
    for load in document["loads"].values():
        assert 1 <= load["slowest_to_mean"] <= load["slowest_to_mean_micro"] < 2


def test_a_bad_image_stops_the_plan_or_is_skipped_and_counted(tmp_path) -> None:
    plan = write_plan(tmp_path / "p", spoilt=5)
    lake = f"file://{tmp_path}/lake"
    done = produce("run", plan, lake, "--workers", 1)
    assert done.code == 4
    assert re.search(
        r"bad record: source pictures, 0/2\.tar at \d+: the field jpg holds no readable JPEG, PNG, WebP or GIF",
        done.err,
    )
    assert "too many records could not be decoded" in done.err.splitlines()[-1]
    tried = produce("simulate", plan, "--limit-steps", 2, "--workers", 1)
    assert (tried.code, tried.err.splitlines()) == (4, done.err.splitlines()), "without a lake as well"
    plan.write_text(plan.read_text().replace("images: jpg,", "images: jpg, on_error: skip,"))
    done = produce("run", plan, lake, "--workers", 1, "--accept-changes", "--json")
    assert done.code == 0, done.err
    assert done.document["sources"]["pictures"]["skipped"] == 1


def test_another_version_of_pillow_or_of_the_planner_is_told_and_accepted(original, monkeypatch) -> None:
    directory, _, _ = original
    lake, then = f"file://{directory}/lake", version("pillow")
    monkeypatch.setattr("stepfs_producer.run.prepare.libraries", lambda: {**libraries(), "pillow": "99"})
    monkeypatch.setattr("stepfs_producer.run.prepare.REVISION", 7)
    words = f"the planner is revision 7, and was 1 and images are decoded by pillow 99, and were by {then}"
    for command in (produce("run", directory / "plan.yaml", lake), produce("check", directory / "plan.yaml", lake)):
        one_line(command, 4, f"{words}: steps may differ from those of before; add --accept-changes to go on with that")
    accepted = produce("check", directory / "plan.yaml", lake, "--accept-changes")
    assert accepted.code == 0
    assert words in accepted.err


def test_another_column_is_another_source(original) -> None:
    directory, _, _ = original
    lake = f"file://{directory}/lake"
    words = "source pictures is not the one that this lake has taken samples of"
    plan = directory / "other.yaml"
    plan.write_text(PLAN.replace("OWN", ", file: own").replace("images: jpg", "images: {fields: jpg, merge: 1}"))
    one_line(produce("run", plan, lake, "--accept-changes"), 4, words)


def test_without_pillow_the_extra_is_named(original, monkeypatch) -> None:
    directory, _, _ = original
    monkeypatch.setitem(sys.modules, "PIL", None)
    one_line(produce("run", directory / "plan.yaml", "file:///nowhere/lake"), 2, "pip install 'stepfs[images]'")
    done = produce("check", directory / "plan.yaml")
    assert done.code == 2
    assert "sources.pictures.images: images need the package pillow" in done.err
