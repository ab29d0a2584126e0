"""The options of a run, from the command and from Python alike."""

from __future__ import annotations

import math

import pytest

from stepfs.declared_option import declared
from stepfs.errors import UsageError
from stepfs_producer.cli.plans.text_options import TextOptions
from stepfs_producer.run.options import RunOptions


@pytest.mark.parametrize("rate", [0, -1.0, math.nan])
def test_a_rate_that_is_not_above_zero_is_refused_by_its_name(rate):
    with pytest.raises(UsageError, match=r"^steps_per_second=.*: use a number above 0$"):
        RunOptions("file:///lake", steps_per_second=rate)


def test_an_option_of_both_commands_is_one_declaration():
    of_run, of_text = declared(RunOptions), declared(TextOptions)
    assert of_run["limit_steps"] == of_text["limit_steps"]
