"""The least-privilege policies of `scripts/deploy/policies`, enforced by a server: enough for each role, and no more."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import aclosing
from pathlib import Path

import boto3
import pytest
import servers
import trio
from realmount import make_lake, mounted, payload, produce, stepfs

from stepfs.errors import RefusedError
from stepfs.lake.control import Control
from stepfs.lake.decisions import AskForPause
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store

POLICIES = Path(__file__).parents[2] / "scripts/deploy/policies"
pytestmark = pytest.mark.nightly
PREFIX = "team/run"  # what the policies allow is below it
COPIES = "team/copies"  # where replicas are


@pytest.fixture(scope="module")
def issuing(tmp_path_factory):
    """A SeaweedFS whose IAM takes policies."""
    directory = tmp_path_factory.mktemp("issuing", numbered=True)
    with servers.seaweedfs(directory, options=["-s3.iam.readOnly=false"]) as server:
        yield server


@pytest.fixture(scope="module")
def keys(issuing):
    """Role → (access key, secret key), as an administrator of the server makes them from our files."""
    iam = boto3.client(
        "iam", endpoint_url=issuing.endpoint_url, region_name="us-east-1", aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
    )  # fmt: skip
    made = {"administrator": (servers.ACCESS_KEY, servers.SECRET_KEY)}
    for policy in POLICIES.glob("*.json"):
        role = policy.stem
        document = policy.read_text().replace("BUCKET", servers.BUCKET).replace("PREFIX", f"{PREFIX}/*")
        iam.create_user(UserName=role)
        iam.put_user_policy(UserName=role, PolicyName=role, PolicyDocument=document)
        key = iam.create_access_key(UserName=role)["AccessKey"]
        made[role] = (key["AccessKeyId"], key["SecretAccessKey"])
        if role == "replicator":  # of the lake it has the rights of another role, and its own at another place
            copies = document.replace(PREFIX, COPIES)
            lakes = (POLICIES / "mount-with-group.json").read_text().replace("BUCKET", servers.BUCKET)
            iam.put_user_policy(UserName=role, PolicyName=role, PolicyDocument=copies)
            iam.put_user_policy(
                UserName=role, PolicyName="lakes", PolicyDocument=lakes.replace("PREFIX", f"{PREFIX}/*")
            )
    iam.close()
    return made


@pytest.fixture
def become(issuing, keys, monkeypatch):
    """Change this process's credentials, and those of the programs it starts."""

    def change(role):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in issuing.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[role][0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[role][1])

    return change


@pytest.fixture
def lake(become):
    """A lake that an administrator made and a producer filled."""
    url = f"s3://{servers.BUCKET}/{PREFIX}/{secrets.token_hex(4)}"
    become("administrator")
    make_lake(url)
    become("producer")
    produce(url, 6)
    return url


def written(mount):
    """Requests of a mount that would change the store."""
    lines = (mount.directory / ".stepfs/metrics").read_text().splitlines()
    counts = dict.fromkeys(("create", "put", "delete"), 0.0)
    for line in lines:
        for verb in counts:
            if line.startswith(f'stepfs_store_requests_total{{verb="{verb}"}}'):
                counts[verb] = float(line.split()[-1])
    assert 'stepfs_store_requests_total{verb="get"}' in "\n".join(lines)
    return sum(counts.values())


def test_a_mount_without_a_group_reads_with_a_key_that_may_only_read_and_never_writes(lake, become, tmp_path):
    become("mount")
    with mounted(lake, tmp_path / "m", "--poll", "20ms") as mount:
        assert mount.file(5, 1).read_bytes() == payload(5, 1)
        assert written(mount) == 0
        become("producer")
        produce(lake, 3, producer="p1")
        mount.wait_for(8)
        assert mount.file(8, 0).read_bytes() == payload(2, 0)
        assert written(mount) == 0
        become("mount")
        assert stepfs("unmount", mount.directory).returncode == 0


def test_a_mount_with_a_group_needs_and_uses_the_right_to_say_so(lake, become, tmp_path):
    become("mount")
    (tmp_path / "m").mkdir()
    refused = stepfs("mount", lake, tmp_path / "m", "--group", "g")
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    assert re.search(r"cannot create \w+/control/\d+ in .*AccessDenied", refused.stderr)  # the line of the policy
    become("mount-with-group")
    with mounted(lake, tmp_path / "m", "--group", "g") as mount:
        assert mount.file(2, 0).read_bytes() == payload(2, 0)
        assert stepfs("checkpoint", lake, "--group", "g", "4").returncode == 0
        assert stepfs("status", lake).returncode == 0
        assert stepfs("unmount", mount.directory, "--checkpoint", "5").returncode == 0
    for command in (["reclaim", lake], ["seal", lake]):
        done = stepfs(*command)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr


def test_a_reader_cannot_produce_and_is_told_so(lake, become, tmp_path):
    become("mount")
    with pytest.raises(RefusedError, match="refuses these credentials or this action"):
        produce(lake, 1, producer="intruder")
    for command in (
        ["init", f"{lake}-2", "--slices", "1"],
        ["seal", lake],
        ["checkpoint", lake, "--group", "g", "--new-group", "1"],
    ):
        done = stepfs(*command)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    assert stepfs("verify", lake).returncode == 0
    assert stepfs("doctor", lake).returncode == 4  # it says that this key cannot create


def test_a_replicator_adds_groups_to_the_lake_and_everything_to_the_replica(lake, become):
    copy = lake.replace(PREFIX, COPIES)
    become("replicator")
    for steps in (6, 9):
        done = stepfs("replicate", lake, copy, "--keep-all", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert f'"next_step": {steps}' in done.stdout
        become("producer")
        produce(lake, 3, producer=f"p{steps}")
        become("mount-with-group")
        assert stepfs("checkpoint", lake, "--group", "g", "--new-group", str(steps)).returncode == 0
        become("replicator")
    for command in (["seal", lake], ["reclaim", copy, "--grace", "0"], ["reclaim", lake, "--grace", "0"]):
        done = stepfs(*command)
        deletes_nothing = command[1] == copy and "deleted 0 objects" in done.stdout
        assert done.returncode == 4 or deletes_nothing, done.stderr


async def _asks_for_a_pause(url: str) -> int:
    async with aclosing(open_store(url)) as store:
        control = Control(store, await open_lake(store))
        return (await control.change(AskForPause(0))).pauses_asked


def test_a_producer_can_seal_and_ask_for_a_pause_but_not_reclaim(lake, become):
    become("mount-with-group")
    assert stepfs("checkpoint", lake, "--group", "g", "--new-group", "3").returncode == 0
    become("producer")
    done = stepfs("reclaim", lake)
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    assert trio.run(_asks_for_a_pause, lake) == 1
    assert stepfs("seal", lake).returncode == 0


def test_only_a_reclaimer_deletes_and_what_is_needed_stays(lake, become, tmp_path):
    become("mount-with-group")
    assert stepfs("checkpoint", lake, "--group", "g", "--new-group", "3").returncode == 0
    become("reclaimer")
    done = stepfs("reclaim", lake)
    assert done.returncode == 0, done.stderr
    with pytest.raises(RefusedError, match="refuses these credentials or this action"):
        produce(lake, 1, producer="intruder")
    become("mount")
    with mounted(lake, tmp_path / "m") as mount:
        assert mount.steps() == [f"step-{step:09d}" for step in range(3, 6)]
        assert mount.file(3, 0).read_bytes() == payload(3, 0)
    become("producer")
    produce(lake, 2, producer="p1")  # goes on behind a moved floor


def test_no_role_reaches_the_neighbours_lake(lake, become, keys):
    other = f"s3://{servers.BUCKET}/elsewhere/{secrets.token_hex(4)}"
    become("administrator")
    make_lake(other)
    for role in keys:
        if role != "administrator":
            become(role)
            done = stepfs("status", other)
            assert (done.returncode, done.stderr.count("\n")) == (4, 1), f"{role}: {done.stdout}"
