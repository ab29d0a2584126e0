"""The quickstart as CI sees it: it ends well only if every check in its table held."""

from __future__ import annotations

import pytest
import tools

SOURCES, DOCUMENTS = "every source byte", "every document is there"


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--brief"], SOURCES),
        pytest.param(["--plan", "--brief"], DOCUMENTS, marks=pytest.mark.slow),
        pytest.param([], SOURCES, marks=pytest.mark.slow),
        *(pytest.param(["--store", kind], SOURCES, marks=pytest.mark.slow) for kind in ("s3", "gs", "az")),
        pytest.param(["--plan"], DOCUMENTS, marks=pytest.mark.slow),
    ],
    ids=["brief", "plan", "file", "s3", "gs", "az", "whole-plan"],
)
def test_the_quickstart_holds_what_its_table_says(options, said):
    done = tools.ran("quickstart", *options, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
