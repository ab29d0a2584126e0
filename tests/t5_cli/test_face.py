"""The public face is as it is kept: each name is a promise, and changes with a line in the changelog."""

from __future__ import annotations

import json

import pytest

import face


def test_nothing_public_changes_without_a_line_in_the_changelog():
    assert face.changed() == [], "write into CHANGELOG.md what changes, then scripts/lib/face.py --write"


def test_what_changes_is_named_and_not_written_beside_the_changelog_of_before(tmp_path, monkeypatch, capsys):
    kept = json.loads(face.FACE.read_text())
    del kept["commands"]["stepfs"]["ls"]
    kept["exit_codes"]["AbsentError"] = 9
    now = face.face()
    monkeypatch.setattr(face, "face", lambda: now)  # made once: it takes seconds
    other, changelog = tmp_path / "face.json", tmp_path / "CHANGELOG.md"
    changelog.write_text("as it was")
    monkeypatch.setattr(face, "FACE", other)
    monkeypatch.setattr(face, "CHANGELOG", changelog)
    assert face.main(["--write"]) == 0
    written = json.loads(other.read_text())
    other.write_text(json.dumps(kept | {"changelog": written["changelog"]}))
    assert face.main([]) == 8
    said = capsys.readouterr().out
    assert all(words in said for words in ("commands: ", "exit_codes: ", '"AbsentError": 9', '"AbsentError": 3'))
    assert face.main(["--write"]) == 4
    changelog.write_text("what changed")
    assert (face.main(["--write"]), face.changed()) == (0, [])
    assert "CHANGELOG.md does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part", ["commands", "documents", "plan_keys", "python", "metrics", "mount_files", "csi_attributes"]
)
def test_no_part_is_empty(part):
    assert len(json.loads(face.FACE.read_text())[part]) > 1
