"""The commands on gs:// and az://: a lake's life, a fork whose parent lies in another cloud, and what bad input gets."""

from __future__ import annotations

import pytest
import servers
from lakes import SLICES, commit, payloads, stepfs
from planned_lake import produce
from realmount import mounted

import stepfs as library


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.nightly)])
def cloud_url(request):
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def lake(cloud_url):
    assert stepfs("init", cloud_url, "--slices", SLICES).code == 0
    commit(cloud_url, range(4))
    return cloud_url


def read(url):
    """All payloads, as a trainer without a mount gets them."""
    with library.Lake(url) as opened:
        return [[bytes(opened.read(step, rank)) for rank in range(SLICES)] for step in opened.steps]


def test_a_lake_lives_there(lake):
    assert "4 committed" in stepfs("status", lake).out
    assert len(stepfs("ls", lake).out.splitlines()) == 4
    assert stepfs("verify", lake).code == 0
    assert stepfs("checkpoint", lake, "--group", "train", "--new-group", 2).code == 0
    ended = stepfs("reclaim", lake, "--grace", "0")
    assert ended.code == 0, ended.err
    assert stepfs("status", lake, "--json").document["first_step"] == 2
    assert stepfs("seal", lake).code == 0
    again = stepfs("init", lake, "--slices", SLICES)
    assert again.code == 4


def test_doctor_probes_it(lake):
    findings = stepfs("doctor", lake, "--json").document["findings"]
    told = {finding["subject"]: finding["detail"] for finding in findings if finding["level"] == "ok"}
    assert told["conditional create"] == "honest, serially and in a race"
    assert lake in told["store"]


def forked(parent, fork, directory):
    """Make the fork, go on in it, and read both halves, by Python and as files."""
    ended = stepfs("fork", parent, fork)
    assert ended.code == 0, ended.err
    commit(fork, range(4, 6), producer_id="of the fork")
    assert read(fork) == [payloads(step) for step in range(6)]
    assert stepfs("verify", fork).code == 0
    with mounted(fork, directory) as mount:
        found = [[path.read_bytes() for path in sorted(mount.step(step).iterdir())] for step in range(6)]
    assert found == [payloads(step) for step in range(6)]


@pytest.mark.nightly
def test_forks_read_a_parent_in_another_cloud(lake, file_url, gs_url, tmp_path):
    forked(lake, file_url, tmp_path / "of-a-directory")
    forked(lake, f"{gs_url}-fork", tmp_path / "of-google")


@pytest.mark.nightly
def test_a_replica_lies_in_another_cloud(cloud_url, file_url):
    for home, copy in ((cloud_url, f"{file_url}-copy"), (file_url, f"{cloud_url}-copy")):
        assert stepfs("init", home, "--slices", SLICES).code == 0
        for steps in (range(4), range(4, 6)):
            commit(home, steps)
            ended = stepfs("replicate", home, copy)
            assert ended.code == 0, ended.err
        assert stepfs("verify", copy).code == 0
        assert read(copy) == read(home) == [payloads(step) for step in range(6)]
        with library.Lake(home, near=copy) as opened:
            assert bytes(opened.read(5, 0)) == payloads(5)[0]
            assert opened.counts()["near_hits"]


@pytest.mark.nightly
def test_forks_read_a_parent_on_a_second_s3_server(file_url, s3_url, tmp_path, monkeypatch):
    with servers.seaweedfs(tmp_path / "second") as second:
        config = tmp_path / "config"
        config.write_text(
            f"[profile s3://{servers.BUCKET}/there]\nendpoint_url = {second.endpoint_url}\n"
            f"aws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        parent = f"s3://{servers.BUCKET}/there/run"
        assert stepfs("init", parent, "--slices", SLICES).code == 0
        commit(parent, range(4))
        forked(parent, file_url, tmp_path / "of-a-directory")
        forked(parent, s3_url, tmp_path / "of-s3")
        ended = stepfs("checkpoint", s3_url, "--group", "train", "--new-group", 2)
        assert ended.code == 0, ended.err
        ended = stepfs("reclaim", s3_url, "--grace", "0")
        assert ended.code == 0, ended.err
        second.kill()
        assert stepfs("status", s3_url).code == 0, "only its parent was there"


def test_what_is_not_there_is_told_apart(cloud_url):
    absent = stepfs("ls", cloud_url)
    assert (absent.code, "stepfs init" in absent.err) == (3, True)
    nowhere = stepfs("ls", cloud_url.replace(servers.BUCKET, "no-such-place"))
    assert (nowhere.code, "does not exist" in nowhere.err, "create it first" in nowhere.err) == (
        3,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("size", "line"),
    [
        ("0", "max_live_bytes=0: use at least 1"),
        ("-1", "size '-1': write a number and K, M, G, T or P, for example 8G"),
        ("much", "size 'much': write a number and K, M, G, T or P, for example 8G"),
    ],
)
def test_a_bound_on_live_bytes_that_is_none(tmp_path, size, line):
    plan = tmp_path / "plan.yaml"
    plan.write_text("output: {mesh: dp=1, sequence_length: 8}\nsources: {a: {format: text, files: plan.yaml}}\n")
    ended = produce("run", plan, f"file://{tmp_path}/lake", "--max-live-bytes", size)
    assert (ended.code, ended.err.count("\n"), line in ended.err) == (2, 1, True), ended.err
