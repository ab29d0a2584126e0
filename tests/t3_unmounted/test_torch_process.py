"""`.pt` files of strangers: the process that looks into them may fail, the command that asked does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from payload_samples import bomb, pt, zipped

from stepfs.errors import MissingPackageError
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.torch.process import TorchProcess
from stepfs.torch.table import torch_arrays

SOUND = pt({"x": torch.ones(2), "turned": torch.ones(2, 3).t(), "facts": ["a", float("nan")]})


@pytest.fixture(scope="module")
def reader():
    with TorchProcess() as reader:
        yield reader


def hashed_for_ever():
    """A key of tuples, each of the one before, twice: to hash it takes 2^60 steps."""
    made = b"\x80\x02}](" + b")q\x00"
    for number in range(60):
        made += b"h" + bytes([number]) + b"h" + bytes([number]) + b"\x86q" + bytes([number + 1])
    return zipped(made + b"e" + b"}h\x3cNs.")


def many_copies():
    """Half a megabyte of text, made bytes ten thousand times. On a slow core its seconds end before its memory."""
    text = b"X\x00\x00\x08\x00" + b"a" * (512 << 10) + b"q\x00"
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    return zipped(b"\x80\x02](" + text + call * 10_000 + b"e.")


def one_large_buffer():
    return zipped(b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.")


def test_it_says_what_torch_says_here(reader):
    found, here = reader(Excerpt.of(SOUND)), torch_arrays(Excerpt.of(SOUND))
    assert found.arrays == here.arrays
    assert repr(found.facts) == repr(here.facts)


@pytest.mark.parametrize(
    ("hostile", "reason"), [
        (bomb, "Unsupported global: GLOBAL exec"), (many_copies, "MemoryError|SIGXCPU"), (one_large_buffer, "MemoryError"),
        (hashed_for_ever, r"ended the process that looked into it \(SIGXCPU\)"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_and_the_next_one_is_read(reader, hostile, reason):
    with pytest.raises(UnreadablePayloadError, match=reason):
        reader(Excerpt.of(hostile()))
    assert reader(Excerpt.of(SOUND)).arrays[0].name == "x"


def test_a_killed_process_is_one_refused_file():
    with TorchProcess() as reader:
        reader(Excerpt.of(SOUND))
        os.kill(reader._child.pid, 9)
        with pytest.raises(UnreadablePayloadError, match="SIGKILL"):
            reader(Excerpt.of(SOUND))
        reader(Excerpt.of(SOUND))
        last = reader._child.pid
    assert not Path(f"/proc/{last}").exists()


def test_without_torch_no_process_is_started(monkeypatch):
    monkeypatch.setattr("stepfs.torch.need.version", lambda _: "2.9.0")
    with TorchProcess() as reader, pytest.raises(MissingPackageError):
        reader(Excerpt.of(SOUND))
