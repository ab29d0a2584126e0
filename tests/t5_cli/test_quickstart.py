"""The quickstart as CI sees it: it ends well only if every check in its table held."""

from __future__ import annotations

import subprocess

import pytest
import tools


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "options",
    [["--brief"], pytest.param([], marks=pytest.mark.slow), pytest.param(["--s3"], marks=pytest.mark.slow)],
    ids=["brief", "file", "s3"],
)
def test_the_quickstart_holds_what_its_table_says(options):
    done = subprocess.run(
        tools.command("quickstart", *options),
        env=tools.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every source byte" in done.stdout
