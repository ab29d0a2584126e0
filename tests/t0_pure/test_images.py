"""JPEG and PNG in records → patches; what cannot be decoded is a bad record, whatever Pillow makes of it."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
import warnings
import zlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from declared import column_spec, tokenizer_spec, transform_spec
from hypothesis import given
from hypothesis import strategies as st
from oracles import COLUMNS as OF_PLAN
from oracles import Case, ours
from PIL import Image as Pillow
from PIL import ImageOps
from tokenizers import Tokenizer
from transformed import made, records_of

from stepfs.errors import CorruptError, UsageError
from stepfs.payload import expand
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.plan.sources import Images
from stepfs_producer.sources.record import Bad, Kind, packed, unpacked
from stepfs_producer.transforms.documents import UnfitRecordError
from stepfs_producer.transforms.images import size_for_chats, size_of, with_images

SPEC = Images(fields=("jpg",))
SMALL = Images(fields=("jpg",), patch=2, merge=2)
COLUMNS = (column_spec("grid", "int32", (3,)), column_spec("pixels", "uint8", (588,)))


def encoded(image: Pillow.Image, form: str = "PNG", **more) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def plain(width: int, height: int, form: str = "JPEG") -> bytes:
    return encoded(Pillow.new("RGB", (width, height), (9, 99, 199)), form)


def decoded(data: object, spec: Images = SPEC):
    return with_images({"jpg": data}, spec)["jpg"]


def test_patches_are_in_groups_row_by_row() -> None:
    """8 × 8 pixels are 4 × 4 patches of 2 × 2, in groups of 2 × 2: pixel (y, x) has the value 8 y + x."""
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    got = decoded(encoded(Pillow.fromarray(np.stack([pixels, pixels, 255 - pixels], axis=2))), SMALL)
    assert got.grid.tolist() == [[1, 4, 4]]
    assert got.grid.dtype == np.int32
    corners = got.pixels.reshape(16, 2, 2, 3)[:, 0, 0]
    assert corners[:, 0].tolist() == [0, 2, 16, 18, 4, 6, 20, 22, 32, 34, 48, 50, 36, 38, 52, 54]
    assert corners[:, 2].tolist() == [255 - value for value in corners[:, 0].tolist()]
    assert got.pixels[0].reshape(2, 2, 3)[:, :, 0].tolist() == [[0, 1], [8, 9]]


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(4, 5000), st.integers(1, 3))
def test_a_size_is_whole_groups_within_the_most(width, height, most, merge) -> None:
    spec = Images(fields=("x",), patch=14, merge=merge, patches_max=max(most, merge**2))
    across, down = size_of(width, height, spec)
    side = 14 * merge
    assert across % side == down % side == 0
    assert min(across, down) >= side
    assert (across // 14) * (down // 14) <= spec.patches_max
    if max(width, height) <= 14 * merge * 2 and most >= 16 * merge**2:
        assert abs(across - width) <= max(side // 2, side - width)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_every_mode_becomes_rgb(mode) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    assert decoded(encoded(Pillow.new(mode, (28, 28)), form)).pixels.shape == (4, 588)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_what_is_transparent_shows_the_background(form) -> None:
    clear = Pillow.new("RGBA", (28, 28), (200, 0, 0, 0))
    clear.paste((0, 0, 200, 255), (0, 0, 14, 28))
    data = encoded(clear, form, **({"lossless": True} if form == "WEBP" else {}))
    white, grey = decoded(data).pixels, decoded(data, Images(fields=("jpg",), background=(90, 90, 90))).pixels
    middle = slice(3 * (7 * 14 + 7), 3 * (7 * 14 + 7) + 3)
    assert white[0, middle].tolist() == grey[0, middle].tolist() == [0, 0, 200]
    assert white[1, middle].tolist() == [255, 255, 255]
    assert grey[1, middle].tolist() == [90, 90, 90]


def test_a_palette_with_a_transparent_color_shows_the_background() -> None:
    indexed = Pillow.new("P", (28, 28), 1)
    indexed.putpalette([0, 0, 0, 200, 0, 0])
    assert decoded(encoded(indexed, transparency=1)).pixels.min() == 255


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (257 * 90, 90), (65535, 255), (65535 // 2, 127)])
def test_sixteen_bits_are_scaled(value, expected) -> None:
    image = Pillow.fromarray(np.full((28, 28), value, np.uint16))
    assert np.unique(decoded(encoded(image)).pixels).tolist() == [expected]


def test_sixteen_bits_have_a_transparent_value() -> None:
    image = Pillow.fromarray(np.full((28, 28), 500, np.uint16))
    assert np.unique(decoded(encoded(image, transparency=500)).pixels).tolist() == [255]
    assert np.unique(decoded(encoded(image, transparency=501)).pixels).tolist() == [2]


def test_the_first_frame_of_an_animation_is_taken() -> None:
    first, second = (Pillow.new("RGB", (28, 28), (0, level, 0)) for level in (50, 250))
    data = encoded(first, "GIF", save_all=True, append_images=[second])
    assert np.unique(decoded(data).pixels).tolist() == [0, 50]


def test_only_a_bomb_among_warnings_is_an_error(monkeypatch) -> None:
    real = Pillow.open

    def warning(*arguments, **more):
        warnings.warn(
            "Palette images with Transparency expressed in bytes should be converted", UserWarning, stacklevel=1
        )
        return real(*arguments, **more)

    monkeypatch.setattr(Pillow, "open", warning)
    assert decoded(plain(28, 28)).grid.tolist() == [[1, 2, 2]]


def test_an_image_is_upright_and_may_be_one_of_several_or_in_a_mapping() -> None:
    turned: Pillow.Image = Pillow.new("RGB", (56, 28))
    exif = turned.getexif()
    exif[0x0112] = 6
    upright = encoded(turned, "JPEG", exif=exif)
    assert decoded(upright).grid.tolist() == [[1, 4, 2]]
    several = decoded([plain(28, 28), plain(56, 28)])
    assert [one.grid.tolist() for one in several] == [[[1, 2, 2]], [[1, 2, 4]]]
    assert decoded({"bytes": plain(28, 28), "path": "a.jpg"}).grid.tolist() == [[1, 2, 2]]
    assert with_images({"txt": b"a"}, SPEC) == {"txt": b"a"}
    assert with_images({"jpg": None}, SPEC) == {"jpg": None}


ROTATED = plain(28, 28).replace(
    b"\xff\xd8", b"\xff\xd8\xff\xe1\0\x22Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0", 1
)


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_stands_as_pillow_turns_it(orientation: int) -> None:
    image: Pillow.Image = Pillow.effect_noise((56, 28), 50).convert("RGB")
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, "PNG", exif=exif)
    turned = ImageOps.exif_transpose(Pillow.open(io.BytesIO(data)))
    assert (decoded(data).pixels == decoded(encoded(turned)).pixels).all()


def test_an_image_that_pillow_shows_is_taken_whatever_its_exif_holds() -> None:
    """Pillow's own turning writes the EXIF back, and fails at what it cannot write."""
    draw, begin = random.Random(7), ROTATED.index(b"Exif")
    shown = 0
    for _ in range(300):
        data = bytearray(ROTATED)
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(begin + 6, begin + 34)] = draw.randrange(256)
        try:
            with warnings.catch_warnings(action="ignore"):
                Pillow.open(io.BytesIO(data)).convert("RGB")
        except Exception:  # noqa: BLE001 - Pillow raises anything
            continue
        shown += 1
        assert decoded(bytes(data)).grid.tolist() == [[1, 2, 2]]
    assert shown > 250


def png_of(width: int, height: int) -> bytes:
    """A header that says any size, and hardly any pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


BAD_IMAGES = {
    "truncated JPEG": plain(400, 400)[:-300], "truncated PNG": encoded(Pillow.effect_noise((64, 64), 50))[:-900],
    "a bomb": png_of(30_000, 30_000), "half a bomb, which Pillow only warns of": png_of(10_000, 10_000),
    "no pixel": png_of(0, 5), "no pixel in a row": png_of(5, 0), "empty": b"",
    "another format": encoded(Pillow.new("RGB", (8, 8)), "TIFF"), "noise": bytes(range(256)),
    "a damaged chunk": plain(64, 64, "PNG").replace(b"IDAT", b"IDAX"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_what_cannot_be_decoded_is_a_bad_record_beside_good_ones(name) -> None:
    spec = transform_spec(tokenizer_spec(eos="none"), "user_functions:captioned", COLUMNS, images=SPEC)
    values = [{"jpg": data, "txt": b"ab"} for data in (plain(28, 28), BAD_IMAGES[name], plain(28, 56))]
    result = made(spec, records_of(Kind.FIELDS, [packed(value) for value in values]))
    assert result.heads.tokens.tolist() == [3, -1, 4]
    assert result.heads.rows.tolist() == [[1, 4], [0, 0], [1, 8]]
    why = result.bad[1]
    assert why.startswith("the field jpg holds no readable JPEG, PNG, WebP or GIF (")
    assert "0x" not in why
    assert (name == "another format") == ("it is TIFF" in why)
    assert "\n" not in why
    assert len(why) < 200


@pytest.mark.parametrize("value", ["text", 3, {"path": "x"}, [plain(28, 28), None]])
def test_a_field_without_an_image_is_named(value) -> None:
    with pytest.raises(UnfitRecordError, match=r"the field jpg(\[1\])? holds \w+, not the bytes of an image"):
        decoded(value)


def test_the_same_image_gives_the_same_patches_in_another_process() -> None:
    data = encoded(Pillow.effect_noise((300, 211), 60).convert("RGB"), "JPEG")
    program = (
        "import sys; from stepfs_producer.transforms.images import with_images;"
        "from stepfs_producer.plan.sources import Images;"
        "data = sys.stdin.buffer.read(); assert 'PIL' not in sys.modules;"
        "sys.stdout.buffer.write(with_images({'jpg': data}, Images(fields=('jpg',)))['jpg'].pixels.tobytes())"
    )
    other = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    assert other.stdout == decoded(data).pixels.tobytes()


def test_an_object_is_json_unless_it_holds_bytes() -> None:
    assert packed({"a": 1, "b": "ü"}) == '{"a": 1, "b": "ü"}'.encode()
    for value in ({"a": b"\xff"}, {"a": {"b": [1, b"x"]}}, {"a": 2**63, "b": b""}):
        data = packed(value)
        assert not data.startswith(b"{")
        assert unpacked(data) == value
    assert unpacked(packed({"a": 2**80})) == {"a": 2**80}
    assert unpacked(packed({"a": 2**80, "b": b""})) == {"a": str(2**80), "b": b""}
    assert isinstance(packed({"a": "\ud800"}), Bad)
    assert msgpack.packb({str(number): b"" for number in range(70_000)})[:1] != b"{"


SHOWS: dict[str, object] = {"chat": {}, "images": {"fields": "images"}}
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "what?"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)


def talk(*parts: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "this"}]}


@pytest.mark.parametrize(
    ("record", "source", "sizes", "message"),
    [
        (talk(IMAGE, TEXT), SHOWS, [(28, 28), (28, 28)], "show 1 images by <|image_pad|>, and the record has 2; each stands in them as"),
        (talk(TEXT), SHOWS, [(28, 28)], "show 0 images by <|image_pad|>, and the record has 1"),
        (talk(IMAGE, TEXT), {"chat": {}, "images": {"fields": "jpg"}}, [(28, 28)], "show 1 images by <|image_pad|>, and the record has 0"),
        (talk(IMAGE, TEXT), {"chat": {}}, [(28, 28)], "message 0 has a part of type image, which is no text; name the field of the images"),
        (talk({"image": "http://a"}), {"chat": {}}, [(28, 28)], "message 0 has a part of type image, which is no text"),
        (talk({"type": "video"}), SHOWS, [(28, 28)], "message 0 has a part of type video, which is no text; leave the part out"),
        (talk({"type": "image_url", "image_url": {"url": "a"}}), SHOWS, [(28, 28)], "has a part of type image_url, which is no text; leave"),
        (talk(IMAGE), SHOWS, [(2010, 10)], "an image of 2010 × 10 pixels; the model's processor takes at most 200 : 1"),
    ],
)  # fmt: skip
def test_images_that_a_chat_cannot_show_are_named(record, source, sizes, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ours(Case(record, source, TEMPLATE, images=sizes), tmp_path)


def test_a_message_that_spells_the_placeholder_shows_no_image(tmp_path) -> None:
    record = talk({"type": "text", "text": "what is <|image_pad|>?"}, IMAGE)
    [[ids, mask, grid, _]] = ours(Case(record, SHOWS, TEMPLATE, images=[(28, 56)]), tmp_path)
    token = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|image_pad|>")
    assert (ids.count(token), grid) == (2, [1, 4, 2])
    assert not any(is_learned for one, is_learned in zip(ids, mask, strict=True) if one == token)


THERE = SHOWS | {"images": {"fields": "a", "decode": "reader"}}


@pytest.mark.parametrize(
    ("source", "columns", "message"),
    [
        (SHOWS, {}, "images of chats become columns; declare output: {columns: {pixels: {dtype: uint8, shape: [588]}}}"),
        (SHOWS | {"images": {"fields": "a", "patch": 16}}, OF_PLAN, "declare output: {columns: {pixels: {dtype: uint8, shape: [768]}}}"),
        (SHOWS | {"long": "split"}, OF_PLAN, "chats with images are whole; use drop"),
        (SHOWS | {"pair": {}}, OF_PLAN, "give one of pair and images"),
        (SHOWS | {"images": {"fields": "a", "patches_min": 9000}}, OF_PLAN, "more than the 4096 of patches_max"),
        ({"transform": "a:b", "images": {"fields": "a", "patches_min": 9}}, OF_PLAN, "patches_min is of a chat's images; remove it"),
        ({"transform": "a:b", "images": {"fields": "a", "decode": "reader"}}, OF_PLAN, "decode is of a chat's images; remove it"),
        (THERE, {**OF_PLAN, "pixels": {**OF_PLAN["pixels"], "file": "own"}}, "remove file: own of the column pixels"),
        (THERE, {**OF_PLAN, "encoded": {"dtype": "uint8", "shape": []}}, "the file's own array is called encoded; give that column another name"),
        ({"images": {"fields": "a"}}, OF_PLAN, "add transform: module:function, or a chat that shows them"),
    ],
)  # fmt: skip
def test_mistakes_of_a_plan(source, columns, message) -> None:
    output = {"mesh": "dp=1", "sequence_length": 64, "columns": columns}
    known = {"tokenizer": {"kind": "huggingface", "file": "tokenizer.json"}, "output": output}
    with pytest.raises(UsageError, match=re.escape(message)):
        parsed_plan(known | {"sources": {"a": {"format": "parquet", "files": "a", **source}}})


def test_images_of_a_plan_are_decoded_in_one_place_and_stand_in_files_with_room() -> None:
    sources = {"a": THERE, "b": SHOWS}
    known: dict = {"tokenizer": {"kind": "huggingface", "file": "tokenizer.json"}}
    known["sources"] = {name: {"format": "parquet", "files": "a", **one} for name, one in sources.items()}
    output = {"mesh": "dp=1", "sequence_length": 64, "columns": OF_PLAN}
    with pytest.raises(
        UsageError, match=r"sources\.a\.images\.decode: source 'b' gives columns with pixels of its own"
    ):
        parsed_plan(known | {"output": output})
    with pytest.raises(
        UsageError, match=r"\.tar files have no images that a reader decodes; choose \.safetensors or \.pt"
    ):
        parsed_plan(known | {"output": {**output, "ext": ".tar"}})


def test_an_image_that_another_pillow_took_is_named() -> None:
    about = np.array([[3, 14, 2, 255, 255, 255]], np.int32)
    batch = {
        "input_ids": np.zeros((1, 4), np.int64), "labels": np.zeros((1, 4), np.int64), "pixels": np.zeros((0, 588), np.uint8),
        "grid": np.array([[1, 2, 2]], np.int32), "encoded": np.frombuffer(b"abc", np.uint8), "encoded_images": about,
    }  # fmt: skip
    with pytest.raises(
        CorruptError, match=r"image 0 of a batch cannot be decoded \(.*\); install the Pillow of its producer"
    ):
        expand(batch)


def test_columns_of_ones_own_with_these_names_stay() -> None:
    batch = {
        name: np.ones((2, 3), np.uint8)
        for name in ("input_ids", "labels", "pixels", "grid", "encoded", "encoded_images")
    }
    assert expand(batch) == batch


QWEN2 = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 14, "merge_size": 2, "min_pixels": 784}


@pytest.mark.parametrize(
    ("file", "config", "message"),
    [
        ("preprocessor_config.json", QWEN2 | {"patch_size": 16, "min_pixels": 1024}, "write images: {patch: 16, patches_min: 4}"),
        ("processor_config.json", {"image_processor": QWEN2 | {"min_pixels": None, "size": {"shortest_edge": 3136}}}, "write images: {patches_min: 16}"),
        ("preprocessor_config.json", {"image_processor_type": "Idefics3ImageProcessor"}, "are prepared by Idefics3ImageProcessor, and those of chats"),
    ],
)  # fmt: skip
def test_a_model_with_another_rule_of_images_is_refused(file, config, message, tmp_path) -> None:
    case = Case(talk(IMAGE), SHOWS, TEMPLATE, images=[(28, 28)], beside={file: json.dumps(config)})
    with pytest.raises(UsageError, match=re.escape(message)):
        ours(case, tmp_path)


def test_the_rule_of_its_own_processor_is_taken(tmp_path) -> None:
    images = {"fields": "images", "patches_min": 4}
    case = Case(talk(IMAGE), {"chat": {}, "images": images}, TEMPLATE, images=[(28, 28)])
    assert ours(replace(case, beside={"preprocessor_config.json": json.dumps(QWEN2)}), tmp_path)[0][2] == [1, 2, 2]


@pytest.mark.nightly
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(4, 64), st.integers(64, 4096))
def test_sizes_are_those_of_the_processor(width, height, least, most) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # noqa: PLC0415

    spec = Images(fields=("jpg",), patches_min=least, patches_max=most)
    try:
        rows, columns = smart_resize(height, width, 28, least * 196, most * 196)
    except ValueError:
        with pytest.raises(UnfitRecordError, match="takes at most 200 : 1"):
            size_for_chats(width, height, spec)
    else:
        assert size_for_chats(width, height, spec) == (columns, rows)
