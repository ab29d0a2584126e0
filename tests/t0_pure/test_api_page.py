"""The reference can be made from the docstrings, and names every public name."""

from __future__ import annotations

import re

import stepfs
import stepfs_producer
from api_page import page


def test_the_page_names_every_public_name():
    made = page()
    for package in (stepfs, stepfs_producer):
        for name in package.__all__:
            assert re.search(rf"\b{name}\b", made), name
