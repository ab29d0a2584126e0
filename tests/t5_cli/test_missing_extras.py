"""The light install meets what needs an extra: one line, exit 2, and the command that installs it."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import tools
from finished import ran
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


# module, the extra that has it, the command, what the plan has besides, and what imports it at the top
TABLE = [
    ("tokenizers", "produce", [*TEXT, "--ext", ".npy", "--tokenizer-file", "tokenizer.json"], {}, ""),
    ("yaml", "produce", TEXT, {}, "plan.file run"),
    ("torch", "torch", [*TEXT, "--ext", ".pt"], {}, ""),
    ("pyarrow", "parquet", ["check", "plan.yaml"], {"source": "format: parquet, files: corpus.parquet"}, ""),
    ("zstandard", "zstd", ["check", "plan.yaml"], {"source": "format: jsonl, files: corpus.jsonl.zst"}, ""),
    ("tokenizers", "produce", ["check", "plan.yaml"], {"tokenizer": "{kind: huggingface, file: tokenizer.json}"}, ""),
    ("matplotlib", "report", ["report", "plan.yaml", "--out", "report.html"], {}, ""),
    ("ray", "ray", ["run", "plan.yaml", "LAKE", "--engine", "ray"], {}, ""),
]


@pytest.mark.parametrize(("module", "extra", "command", "changes", "importers"), TABLE)
def test_the_extra_is_named_before_there_is_a_lake(
    hidden, produce, tmp_path, monkeypatch, module, extra, command, changes, importers
):
    settings = {"ext": ".npy", "tokenizer": "{kind: bytes}", "source": "format: jsonl, files: corpus.jsonl"}
    (tmp_path / "plan.yaml").write_text(PLAN.format(**{**settings, **changes}))
    for room in importers.split():
        forget(monkeypatch, f"stepfs_producer.{room}")
    hidden(module)
    expect(produce(*command), extra)
    assert not (tmp_path / "lake").exists()


HIDDEN = "import sys; sys.modules[sys.argv.pop(1)] = None; from stepfs_producer.cli import main; main()"


@pytest.mark.parametrize(
    ("module", "package", "command"), [
        ("yaml", "PyYAML", ["check", "plan.yaml"]),
        pytest.param("trio_parallel", "trio-parallel", ["run", "plan.yaml", "file:///none"], marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_what_is_imported_at_the_top_is_named_by_a_new_process(module, package, command):
    done = ran([sys.executable, "-c", HIDDEN, module, *command], env=tools.environment())
    assert done.returncode == 2
    assert done.stderr == (
        f"stepfs-produce: plans need the package {package}, which is not installed: pip install 'stepfs[produce]'\n"
    )


def test_plans_from_python_name_the_extra_and_are_an_import_error(hidden, monkeypatch):
    for room in ("plan.file", "run", "plans"):
        forget(monkeypatch, f"stepfs_producer.{room}")
    hidden("yaml")
    with pytest.raises(ImportError, match=re.escape("plans need the package PyYAML")) as caught:
        importlib.import_module("stepfs_producer.plans")
    assert type(caught.value) is MissingPackageError
    assert str(caught.value).endswith("pip install 'stepfs[produce]'")


def test_torch_dump_names_the_extra(hidden):
    hidden("torch")
    from stepfs.torch import dump  # noqa: PLC0415

    with pytest.raises(MissingPackageError, match=re.escape("pip install 'stepfs[torch]'")):
        dump({})
