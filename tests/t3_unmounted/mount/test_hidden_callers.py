"""A reader in another pid namespace shows as pid 0: its signals cannot be seen, and the daemon says so once."""

from __future__ import annotations

import pytest

from stepfs.mount.host import procfs


@pytest.mark.logs("another pid namespace")
def test_a_caller_that_cannot_be_seen_is_said_once(caplog):
    procfs._say_that_callers_are_hidden.cache_clear()
    assert [procfs.has_pending_signal(0) for _ in range(3)] == [False] * 3
    assert [record.getMessage() for record in caplog.records if "pid namespace" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "shareProcessNamespace" in caplog.text
    procfs._say_that_callers_are_hidden.cache_clear()
