"""Two S3 servers in one process: a lake's URL chooses the AWS profile that is named like its beginning."""

from __future__ import annotations

import os

import boto3
import pytest
import servers
from botocore.loaders import JSONFileLoader
from stubs3 import ABSENT, stub_s3, xml_error

from stepfs.doctor.lakes import check_lake
from stepfs.errors import RefusedError
from stepfs.lake.origins import OriginStores
from stepfs.store.api import StoreOptions
from stepfs.store.opening import open_store
from stepfs.store.s3.clients import choose, profile_of
from stepfs.store.s3.s3_store import S3Store


@pytest.mark.parametrize(
    ("url", "name"), [
        ("s3://train", "s3://train"), ("s3://train/c", "s3://train"), ("s3://train/a/b", "s3://train/a"),
        ("s3://train/ab", "s3://train"), ("s3://training/a", None), ("s3://other/dir", "s3://other/"),
        ("s3://default", None),
    ],
)  # fmt: skip
def test_the_longest_name_that_begins_the_url_at_a_slash_is_meant(url, name):
    assert profile_of(url, ["default", "s3", "s3://train", "s3://train/a", "s3://other/"]) == name


@pytest.fixture
def second():
    """A server that the environment says nothing of."""
    with stub_s3() as server:
        yield server


@pytest.fixture
def configured(monkeypatch, tmp_path, second):
    def write(*lines, name="s3://stepfs-tests/eu"):
        path = tmp_path / "config"
        path.write_text("\n".join([f"[profile {name}]", *lines, ""]))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(path))

    write(f"endpoint_url = {second.endpoint_url}", "aws_access_key_id = eu", "aws_secret_access_key = x")
    return write


def open_s3(url):
    opened = open_store(url)
    assert isinstance(opened, S3Store)
    return opened


async def test_below_its_name_a_profile_says_all_and_elsewhere_nothing(seaweed, s3_url, configured, second):
    here, there = open_s3(s3_url), open_s3("s3://stepfs-tests/eu/run")
    await here.put("a", [b"here"])
    assert await there.get("a") is None
    assert await here.get("a") == b"here"
    assert [path for _, path in second.requests] == ["/stepfs-tests/eu/run/a"]
    assert (here.profile, there.profile) == (None, "s3://stepfs-tests/eu")
    for store in (here, there):
        await store.aclose()


async def test_its_services_section_counts_too(seaweed, configured, second):
    configured(
        "services = eu\naws_access_key_id = eu\naws_secret_access_key = x",
        "[services eu]",
        f"s3 =\n  endpoint_url = {second.endpoint_url}",
    )
    store = open_store("s3://stepfs-tests/eu/run")
    assert await store.get("a") is None
    assert len(second.requests) == 1
    await store.aclose()


async def test_an_endpoint_of_the_environment_is_none_of_a_profiles(seaweed, configured):
    """Without one of its own it means Amazon's."""
    configured("region = eu-west-1", "aws_access_key_id = eu", "aws_secret_access_key = x")
    store = open_s3("s3://stepfs-tests/eu/run")
    client = store._clients.data()
    assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    await store.aclose()


@pytest.mark.parametrize(("of_origin", "asked"), [(False, True), (True, False)])
async def test_an_endpoint_of_the_command_line_means_its_lake(seaweed, configured, second, of_origin, asked):
    with stub_s3() as given:
        options = StoreOptions(given.endpoint_url)
        store = open_store("s3://stepfs-tests/eu/run", options=options.for_origin() if of_origin else options)
        assert await store.get("a") is None
        assert bool(given.requests) is asked
        assert bool(second.requests) is not asked
        await store.aclose()


async def test_an_origin_without_a_profile_lies_at_the_endpoint_given(seaweed, configured):
    with stub_s3() as given:
        store = open_store("s3://stepfs-tests/x", options=StoreOptions(given.endpoint_url).for_origin())
        assert await store.get("a") is None
        assert given.requests
        await store.aclose()


async def test_a_profile_without_keys_has_none_of_the_environments(seaweed, configured, second, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    configured(f"endpoint_url = {second.endpoint_url}")
    store = open_store("s3://stepfs-tests/eu/run")
    with pytest.raises(RefusedError, match=r"Unable to locate credentials.*AWS_PROFILE"):
        await store.get("a")
    assert second.requests == []
    await store.aclose()


async def test_doctor_names_the_profile_without_its_secrets(seaweed, configured, second):
    second.answer = lambda method, _path: ABSENT if method == "GET" else xml_error(403, "AccessDenied")
    store = open_store("s3://stepfs-tests/eu/run")
    findings = [finding async for finding in check_lake(store, OriginStores(store, pytest.fail))]
    (named,) = [finding for finding in findings if finding.subject == "profile"]
    assert named.detail == "[profile s3://stepfs-tests/eu] of the AWS configuration, by the lake's URL"
    assert not any("eu-secret" in finding.detail for finding in findings)
    await store.aclose()


def test_botocore_reads_such_names(configured):
    """In one of its files; if it ever stops, this says so."""
    assert os.environ["AWS_CONFIG_FILE"]
    assert "s3://stepfs-tests/eu" in boto3.session.Session().available_profiles
    assert servers.BUCKET == "stepfs-tests"


def test_a_second_session_parses_no_model_of_botocore_again(monkeypatch):
    """Each of a DataLoader's workers, forked from a process that had opened the lake, parsed them for its first read."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    choose(None, "s3://train/run").session.client("s3")
    parsed = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _self, path: parsed.append(path))
    choose(None, "s3://train/run").session.client("s3")
    assert parsed == []
