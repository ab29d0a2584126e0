"""Mistakes that somebody makes who runs a plan for the first time: one line that says what to do."""

from __future__ import annotations

import pytest
from lakes import produce, stepfs
from plans import PLAN, run


@pytest.mark.parametrize(
    ("change", "advice"), [
        (("dp=2", "dp=3"),
         "2 slices per step, not 3 slices; name another lake, or set output.mesh to one with dp = 2"),
        (("micro_batch_tokens: 512", "micro_batches: 4, files: micro_batches"),
         "2 slices per step, not 8 slices (ranks 2 × micro-batches 4); name another lake, or set output.files to ranks\n"),
        ((".npy", ".pt"), "holds .npy files, not .pt; name another lake, or set output.ext to .npy"),
    ], ids=["mesh", "files", "ext"],
)  # fmt: skip
def test_a_lake_of_another_shape_names_the_key_of_the_plan(plan, file_url, change, advice):
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    plan.write_text(PLAN.replace(*change))
    refused = run(plan, file_url, "--accept-changes")
    assert refused.returncode == 4
    assert advice in refused.stderr
    assert "--slices" not in refused.stderr.partition(" (of text: ")[0]


def test_a_lake_of_as_many_slices_for_other_ranks_is_refused(plan, file_url):
    assert stepfs("init", file_url, "--data-ranks", 1, "--cp", 2, "--ext", ".npy").code == 0
    refused = run(plan, file_url)
    assert refused.returncode == 4
    assert "has 2 slices (ranks 1 × cp 2) per step, not 2 slices; name another lake\n" in refused.stderr


def test_a_lake_of_micro_batches_names_the_keys_of_the_plan(plan, file_url):
    assert stepfs("init", file_url, "--data-ranks", 3, "--micro-batches", 4, "--ext", ".npy").code == 0
    refused = run(plan, file_url)
    assert refused.returncode == 4
    assert (
        "has 12 slices (ranks 3 × micro-batches 4) per step, not 2 slices; name another lake, or set output.mesh to one"
        " with dp = 3, output.micro_batches to 4 and files to micro_batches\n" in refused.stderr
    )


def test_arguments_in_the_wrong_order_are_put_right(plan):
    for command in ("run", "check"):
        done = produce(command, "s3://bucket/lake", plan)
        expected = (
            f"stepfs-produce: the lake is s3://bucket/lake: write `stepfs-produce {command} {plan} s3://bucket/lake`\n"
        )
        assert (done.code, done.err) == (2, expected)
    done = stepfs("mount", "/mnt/run", "s3://bucket/lake")
    assert (done.code, done.err) == (
        2,
        "stepfs: the lake is s3://bucket/lake: write `stepfs mount s3://bucket/lake /mnt/run`\n",
    )


def test_a_plan_that_is_complete_already_shows_no_shares_of_nothing(plan, file_url):
    plan.write_text(PLAN + "until: {steps: 2}\n")
    assert "2 steps in total" in run(plan, file_url).stdout
    again = run(plan, file_url)
    assert again.returncode == 0
    assert again.stdout == "plan: no further step; 2 steps in total; the number of steps is reached\n"


def test_a_misspelt_sources_is_one_mistake_and_not_one_for_every_name(plan):
    plan.write_text(PLAN.replace("sources:", "source:"))
    done = produce("check", plan)
    assert done.code == 2
    assert [line.partition("plan.yaml:")[2] for line in done.stderr.splitlines()[1:]] == [
        "1:1: 'sources' is missing",
        "3:1: unknown key 'source'; did you mean 'sources'?",
    ]
