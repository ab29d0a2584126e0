"""The light install meets what needs an extra: one line, exit 2, and the command that installs it."""

from __future__ import annotations

import re
import sys

import pytest
from typer.testing import CliRunner

from stepfs.errors import MissingPackageError
from stepfs_producer.cli.app import app

TEXT = ["text", "LAKE", "--input", "corpus.txt", "--slices", "1", "--seq-len", "8"]
PLAN = """\
version: 1
output: {{mesh: dp=1, ext: {ext}, sequence_length: 16}}
tokenizer: {tokenizer}
sources: {{a: {{{source}}}}}
mix: {{a: 1}}
until: {{steps: 1}}
"""


@pytest.fixture
def hidden(monkeypatch):
    """Make a module one that is not installed."""

    def hide(name):
        monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.fixture
def produce(tmp_path, monkeypatch, file_url):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("some words\n")
    (tmp_path / "corpus.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "corpus.jsonl.zst").write_bytes(b"(\xb5/\xfd")
    (tmp_path / "corpus.parquet").write_bytes(b"PAR1")
    (tmp_path / "tokenizer.json").write_text("{}")

    def run(*words):
        named = [file_url if word == "LAKE" else word for word in words]
        return CliRunner().invoke(app, named, catch_exceptions=False)

    return run


def expect(ended, extra):
    assert ended.exit_code == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("stepfs-produce: ")
    assert line.endswith(f"pip install 'stepfs[{extra}]'")


def forget(monkeypatch, room):
    """It is imported again, until the test ends; then its parent has the former one, too."""
    parent, _, leaf = room.rpartition(".")
    if room in sys.modules:
        monkeypatch.setattr(sys.modules[parent], leaf, sys.modules[room])
    for name in [name for name in sys.modules if name == room or name.startswith(f"{room}.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [
        ("tokenizers", ["--ext", ".npy", "--tokenizer-file", "tokenizer.json"], "produce"),
        ("yaml", [], "produce"),
    ],
)
def test_text_names_the_extra(hidden, produce, monkeypatch, module, options, extra):
    if module == "yaml":
        forget(monkeypatch, "stepfs_producer.plan.file")
        forget(monkeypatch, "stepfs_producer.run")
    hidden(module)
    expect(produce(*TEXT, *options), extra)


def test_pt_files_name_the_extra_of_torch(hidden, produce):
    hidden("torch")
    expect(produce(*TEXT, "--ext", ".pt"), "torch")


@pytest.mark.parametrize(
    ("module", "extra", "changes"),
    [
        ("pyarrow", "parquet", {"source": "format: parquet, files: corpus.parquet"}),
        ("zstandard", "zstd", {"source": "format: jsonl, files: corpus.jsonl.zst"}),
        ("tokenizers", "produce", {"tokenizer": "{kind: huggingface, file: tokenizer.json}"}),
    ],
)
def test_a_plan_names_the_extra(hidden, produce, tmp_path, module, extra, changes):
    settings = {"ext": ".npy", "tokenizer": "{kind: bytes}", "source": "format: jsonl, files: corpus.jsonl"}
    (tmp_path / "plan.yaml").write_text(PLAN.format(**{**settings, **changes}))
    hidden(module)
    expect(produce("check", "plan.yaml"), extra)


def test_an_engine_names_its_extra_before_there_is_a_lake(hidden, produce, tmp_path):
    settings = {"ext": ".npy", "tokenizer": "{kind: bytes}", "source": "format: jsonl, files: corpus.jsonl"}
    (tmp_path / "plan.yaml").write_text(PLAN.format(**settings))
    hidden("ray")
    expect(produce("run", "plan.yaml", f"file://{tmp_path}/none", "--engine", "ray"), "ray")
    assert not (tmp_path / "none").exists()


def test_torch_dump_names_the_extra(hidden):
    hidden("torch")
    from stepfs.torch import dump  # noqa: PLC0415

    with pytest.raises(MissingPackageError, match=re.escape("pip install 'stepfs[torch]'")):
        dump({})
