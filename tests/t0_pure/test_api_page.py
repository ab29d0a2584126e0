"""fs/API.md is what the docstrings say."""

from __future__ import annotations

import re

import stepfs
import stepfs_producer
from api_page import PAGE, page


def test_the_page_is_made_from_the_docstrings_of_today():
    assert PAGE.read_text() == page(), "run: .venv/bin/python scripts/lib/api_page.py"


def test_the_page_names_every_public_name():
    for package in (stepfs, stepfs_producer):
        for name in package.__all__:
            assert re.search(rf"\b{name}\b", page()), name
