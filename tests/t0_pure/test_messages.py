"""*Troubleshooting by message* has each message of the code: what is not found in the source is named here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from site_pages.messages import VALUE, collected
from stepfs import errors

# Places that pass on what another place of the page, or a library, says.
PASSED_ON = {
    "fs/stepfs/_internal/background.py": "why it was closed",
    "fs/stepfs/checkpoints/record.py": "the trouble of a mount's status.json",
    "fs/stepfs/cli/commands/show.py": "what a payload's reader says",
    "fs/stepfs/csi/node.py": "what the holder's socket says",
    "fs/stepfs/lake/origins.py": "the error of the parent's store",
    "fs/stepfs/mount/launch.py": "the error of a daemon or keeper",
    "fs/stepfs/view/ranks.py": "what the mesh says",
    "producer/stepfs_producer/cli/app.py": "why there is no text",
    "producer/stepfs_producer/engine/ray.py": "a line for each node",
    "producer/stepfs_producer/plan/file/yaml_file.py": "a line for each `Problem`",
    "producer/stepfs_producer/plan/model.py": "lines of a `PlanError`",
    "producer/stepfs_producer/plan/part.py": "the error of a value",
    "producer/stepfs_producer/plan/parts.py": "what a kind of file lacks for encoded images",
    "producer/stepfs_producer/run/check.py": "the error of a file or function",
    "producer/stepfs_producer/sources/compressed.py": "what a decompressor says",
    "producer/stepfs_producer/sources/tables.py": "the error of pyarrow",
    "producer/stepfs_producer/transforms/pairs.py": "what is wrong with a side of a pair",
    "producer/stepfs_producer/transforms/tokenizer.py": "the error of a tokenizer's file",
}

found = cache(collected)


def test_no_message_is_missing():
    messages, unknown = found()
    elsewhere = [place for place in unknown if place.partition(": ")[0] not in PASSED_ON]
    assert elsewhere == [], "say it in words at the raise, or name it above"
    assert {place.partition(": ")[0] for place in unknown} == {*PASSED_ON}, "it is found by now: take it out"
    assert len(messages) > 800
    assert {one.kind for one in messages} >= {"doctor", "volume", "record", "PlanError"}


def test_each_error_that_the_code_raises_is_a_kind():
    raised = {
        name
        for home in ("fs/stepfs", "producer/stepfs_producer")
        for path in (Path(__file__).parents[2] / home).rglob("*.py")
        for name in re.findall(r"raise (?:errors\.)?(\w+Error)\(f?\"", path.read_text())
    }
    public = {name for name in raised if isinstance(getattr(errors, name, None), type)}
    assert public <= {one.kind for one in found()[0]}


@pytest.mark.parametrize(
    ("code", "texts"), [
        ("raise UsageError('give a name')", {"give a name"}),
        ("raise errors.UsageError(f'{a}: give ' + 'a name')", {f"{VALUE}: give a name"}),
        ("raise UsageError(f\"{a} {'is full' if b else 'is empty'}\")", {f"{VALUE} is full", f"{VALUE} is empty"}),
        ("raise UsageError(f'run `{command(\"stepfs\", \"ls\", lake)}`')", {f"run `stepfs ls {VALUE}`"}),
        ("why = 'it is late'\nraise UsageError(why)", {"it is late"}),
        ("WHY = 'it is late'\ndef f():\n    raise UsageError(f'{x}: {WHY}')", {f"{VALUE}: it is late"}),
        ("def f(why):\n    raise UsageError(why)\nf('it is late')\nf(why='it is early')", {"it is late", "it is early"}),
        ("def why():\n    return 'it is late'\nraise UsageError(why())", {"it is late"}),
        ("class OwnError(UsageError): ...\nraise OwnError('it is late')", {"it is late"}),
        ("raise UsageError('%s is late' % x)", {f"{VALUE} is late"}),
        ("raise UsageError(f'{a}{b} {c} is late')", {f"{VALUE} is late"}),
        ("WHY = {1: 'it is late'}\nraise UsageError(WHY.get(x, 'it is early'))", {"it is late", "it is early"}),
        ("from m import why as reason\ndef why():\n    return 'it is late'\nraise UsageError(reason())", {"it is late"}),
        ("raise UsageError(*error.args)\nraise OSError('not ours')", set()),
    ],
)  # fmt: skip
def test_a_message_is_found_however_it_is_put_together(tmp_path, code, texts):
    (tmp_path / "fs/stepfs").mkdir(parents=True)
    (tmp_path / "fs/stepfs/module.py").write_text(code)
    messages, unknown = collected(tmp_path)
    assert ({one.text for one in messages}, unknown) == (texts, [])


def test_what_cannot_be_found_is_named(tmp_path):
    (tmp_path / "fs/stepfs").mkdir(parents=True)
    (tmp_path / "fs/stepfs/module.py").write_text("raise UsageError(str(error))")
    assert collected(tmp_path) == ([], ["fs/stepfs/module.py: UsageError(str(error))"])
