"""Commands that would wait for ever, or never wait at all."""

from __future__ import annotations

import os

from lakes import stepfs

from stepfs import control_files


def test_status_of_a_mount_that_does_not_answer(tmp_path, monkeypatch):
    """The read that hangs stays behind in its thread; here it is a pipe that nobody writes."""
    monkeypatch.setattr(control_files, "ANSWER_S", 0.1)
    (tmp_path / ".stepfs").mkdir()
    status = tmp_path / ".stepfs" / "status.json"
    os.mkfifo(status)
    ended = stepfs("status", tmp_path)
    assert ended.code == 1
    assert "does not answer within 0.1 s" in ended.err
    os.close(os.open(status, os.O_WRONLY))  # lets the thread go


def test_reclaim_without_a_pause_is_refused(file_url):
    for pause in ("0", "0s", "1ms"):
        ended = stepfs("reclaim", file_url, "--every", pause)
        assert (ended.code, ended.err.count("\n")) == (2, 1)
