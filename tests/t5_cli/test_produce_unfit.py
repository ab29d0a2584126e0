"""`stepfs-produce text`, `run` and `check` refuse a lake that holds something else than they would make."""

from __future__ import annotations

import socket

import lakes
import numpy as np
from lakes import stepfs
from payload_samples import npy
from plans import PLAN, run
from produced_text import produce, refused

from stepfs_producer import Producer
from stepfs_producer.plan.step import State

SHAPE = ["--slices", 2, "--seq-len", 64, "--batch-size", 3, "--limit-steps", 2]


def test_another_tokenizer_in_a_lake_is_refused_unless_accepted(file_url, corpus, plan):
    assert run(plan, file_url, "--producer-id", "first", "--limit-steps", 1).returncode == 0
    with Producer(file_url, producer_id="other") as other:
        position = {**State("0" * 32, 1, {}, tokenizer="bpe-0123").position()}
        other.append([npy(np.zeros((4, 1, 512), np.int32))] * 2, position=position)
    says = "the tokenizer of producer other is bpe-0123, and this plan's is bytes"
    checked = lakes.produce("check", plan, file_url)
    refused(checked, 4, says, "name another lake, or add --accept-changes")
    refused(run(plan, file_url, "--limit-steps", 1), 4, says, "or add --accept-changes")
    assert "plan" not in stepfs("status", file_url, "--json").document["producers"], "no epoch was taken"
    accepted = run(plan, file_url, "--limit-steps", 1, "--accept-changes")
    assert (accepted.returncode, says in accepted.stderr) == (0, True)
    again = run(plan, file_url, "--limit-steps", 2)
    assert (again.returncode, again.stderr) == (0, ""), "what has begun was accepted"
    text = produce(file_url, "-i", corpus, *SHAPE)
    refused(text, 4, "name another lake, or add --accept-changes")
    accepted = produce(file_url, "-i", corpus, *SHAPE, "--accept-changes")
    assert "--accept-changes" not in accepted.stderr, accepted.stderr


def test_both_sides_of_a_holdout_do_not_share_a_lake(file_url, plan) -> None:
    plan.write_text(PLAN.replace("files: code/", "files: code/, holdout: 10%"))
    lake = file_url
    assert run(plan, lake, "--limit-steps", 1).returncode == 0
    for lake_of_them in (lake, f"{lake}-fork"):
        if lake_of_them != lake:
            assert stepfs("fork", lake, lake_of_them).code == 0
        for producer in ("plan", "eval"):
            done = run(plan, lake_of_them, "--holdout", "--producer-id", producer, "--accept-changes")
            refused(done, 4, "has produced into this lake without --holdout", "a lake of its own for each side")
        assert "eval" not in stepfs("status", lake_of_them, "--json").document["producers"], "no epoch was taken"
    own = f"{lake}-held-out"
    assert run(plan, own, "--holdout", "--limit-steps", 1).returncode == 0
    refused(run(plan, own, "--producer-id", "train"), 4, "has produced into this lake with --holdout")
    refused(lakes.produce("check", plan, own), 4, "with --holdout")
    assert lakes.produce("check", plan, own, "--holdout").returncode == 0


def test_check_compares_a_lake_without_a_run(file_url, plan) -> None:
    absent = lakes.produce("check", plan, file_url)
    assert (absent.returncode, "not there yet; a run creates it" in absent.stdout) == (0, True)
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    before = stepfs("status", file_url, "--json").document
    fits = lakes.produce("check", plan, file_url, "--json")
    assert fits.document["lake"] == {"url": file_url, "exists": True}
    plan.write_text(PLAN.replace("code: 30", "code: 60"))
    refused(lakes.produce("check", plan, file_url), 4, "mix[0].weights.code: ")
    other = lakes.produce("check", plan, file_url, "--producer-id", "other")
    assert other.returncode == 0, other.stderr
    plan.write_text(PLAN.replace("dp=2", "dp=4"))
    refused(lakes.produce("check", plan, file_url), 4, "not 4")
    assert stepfs("status", file_url, "--json").document == before, "it writes nothing"
    assert stepfs("seal", file_url).code == 0
    plan.write_text(PLAN)
    for producer in ("plan", "other"):
        for sealed in (
            lakes.produce("check", plan, file_url, "--producer-id", producer),
            run(plan, file_url, "--producer-id", producer),
        ):
            refused(sealed, 4, "the lake is sealed; no more steps can be produced into it")
    plan.write_text(PLAN + "until: {steps: 1}\n")
    assert run(plan, f"{file_url}-done", "--seal").returncode == 0
    for done in (lakes.produce("check", plan, f"{file_url}-done"), run(plan, f"{file_url}-done")):
        assert done.returncode == 0, done.stderr


def test_a_run_that_cannot_have_its_metrics_port_fences_no_one(file_url, plan) -> None:
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken, Producer(file_url, producer_id="plan") as healthy:
        done = run(plan, file_url, "--metrics-port", taken.getsockname()[1])
        refused(done, 4, "choose another port")
        assert stepfs("status", file_url, "--json").document["producers"]["plan"]["epoch"] == healthy.epoch
