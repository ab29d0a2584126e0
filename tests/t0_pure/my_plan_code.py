"""What a user's own module may look like, for tests of plans that name it."""

from __future__ import annotations


def flops(columns):
    return columns["tokens"] * 3


constant = 5
