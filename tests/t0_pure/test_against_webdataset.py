"""Shards as people make them, against webdataset's own reader: its answers are kept, and asked for again at night."""

from __future__ import annotations

import gc
import gzip
import io
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from their_answers import REFUSED, Case, asked, compare, kept, program

KEPT = Path(__file__).parent / "answers/webdataset.zip"
Members = list[tuple[str, bytes | str]]  # the content, or what it is a link to


def tar(*members: tuple[str, bytes | str], **how: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **how) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.LNKTYPE, content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return file.getvalue()


def shard(data: bytes, name: str = "a.tar") -> Callable[[Path], Any]:
    def ask(directory: Path) -> Any:
        webdataset = program("webdataset")

        (directory / name).write_bytes(data)
        with warnings.catch_warnings(action="ignore"):
            url = str(directory / name)
            try:
                read = list(
                    webdataset.WebDataset(
                        url, shardshuffle=False, empty_check=False, handler=webdataset.reraise_exception
                    ).decode()
                )
            except Exception:  # noqa: BLE001 - it raises anything
                return REFUSED
        return [{key: value for key, value in one.items() if not key.startswith("__")} for one in read]

    return ask


def texts(*names: str) -> Members:
    return [(name, f"text of {name}".encode()) for name in names]


SOURCE = {"format": "webdataset"}
THREE = texts("0.txt", "1.txt", "2.txt")
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "small letters": (shard(tar(*THREE)), ""),
    "capitals": (shard(tar(*texts("0.TXT", "1.Txt", "2.JPG", "2.Cls.TXT"))), ""),
    "a name twice": (shard(tar(*texts("0.txt", "0.txt", "1.txt"))), ""),
    "a name twice, once in capitals": (shard(tar(*texts("0.txt", "0.TXT", "1.txt"))), ""),
    "kinds": (shard(tar(("0.json", b'{"a": [1, null]}'), ("0.cls", b"7"), ("0.bin", b"\xff"), ("0.text", "é".encode()))), ""),
    "dots in directories": (shard(tar(*texts("v1.0/part.1/0.txt", "v1.0/part.2/0.txt"))), ""),
    "dots in names": (shard(tar(*texts("clip.0.txt", "clip.1.txt"))), ""),
    "a dot before names": (shard(tar(*texts("./0.txt", "./1.txt"))), ""),
    "long names": (shard(tar(*texts(("d" * 120 + "/") * 2 + "0.txt"), format=tarfile.GNU_FORMAT)), ""),
    "long names of letters": (shard(tar(*texts(("ä" * 120 + "/") * 2 + "0.txt"), format=tarfile.PAX_FORMAT)), ""),
    "an empty member": (shard(tar(("0.txt", b""), ("0.cls", b"1"), ("1.txt", b"x"))), ""),
    "what macOS leaves": (shard(tar(("._0.txt", b"\0\5"), ("0.txt", b"x"), (".DS_Store", b"\0"))), ""),
    "a hard link": (shard(tar(("0.txt", b"x"), ("1.txt", "0.txt"), ("2.txt", b"y"))), ""),
    "samples mixed": (shard(tar(*texts("0.txt", "1.txt"), ("0.cls", b"1"), ("1.cls", b"2"))), ""),
    "what begins with __": (shard(tar(*texts("__meta__/0.txt", "0.txt", "__index__", "__no/1.txt"))), ""),
    "no member": (shard(tar()), ""),
    "cut within a member": (shard(tar(("0.txt", b"t" * 2000), ("1.txt", b"t" * 2000))[:4000]), ""),
    "cut behind a member": (shard(tar(*THREE)[:2048]), "it ends without the blocks that end a tar"),
    "a damaged header": (shard(tar(*THREE)[:1024] + b"\xff" * 9 + tar(*THREE)[1033:]), "no member where one should begin: bad checksum"),
    "gzip": (shard(gzip.compress(tar(*THREE), mtime=0), "a.tar.gz"), ""),
    "gzip by another name": (shard(gzip.compress(tar(*THREE), mtime=0)), "a.tar is gzip; let its name end in .gz"),
}  # fmt: skip
CASES = {name: Case(ask, SOURCE, refused) for name, (ask, refused) in FILES.items()}


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_webdataset(name: str, tmp_path: Path) -> None:
    compare(CASES[name], kept(KEPT, name, tmp_path), tmp_path / name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_webdataset_answers_as_it_did(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        answer = asked(CASES[name], tmp_path / name)
        gc.collect()  # it leaves a damaged shard open
    assert answer == kept(KEPT, name, tmp_path / "kept")
    compare(CASES[name], answer, tmp_path / name)
