"""What the node plugin refuses, in one line, and what it takes of a Secret and of its own role."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
import rawserver
from certificates import self_signed
from csinode import READ_ONLY_MANY, daemon_of, ended_with
from realmount import lake_with, payload

from stepfs.csi.__main__ import parsed


@pytest.mark.nightly
def test_a_secret_that_is_absent_or_of_no_use_is_told(other_node, s3_url, tmp_path):
    lake_with(s3_url, 2)
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    absent = {
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    node = other_node(**dict.fromkeys(keys), **absent)
    context = {"lake": s3_url}
    ended_with(node, grpc.StatusCode.FAILED_PRECONDITION, "AWS_ACCESS_KEY_ID", volume_context=context)
    wrong = keys | {"AWS_SECRET_ACCESS_KEY": "expired"}
    ended_with(
        node, grpc.StatusCode.FAILED_PRECONDITION, "AWS_SECRET_ACCESS_KEY", volume_context=context, secrets=wrong
    )
    node.publish("v", tmp_path / "target", volume_context=context, secrets={n: f"{key}\n" for n, key in keys.items()})
    assert (tmp_path / "target/step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)


def test_a_socket_may_be_named_by_its_url_and_is_absolute(capsys):
    given = parsed(["plugin", "--endpoint", "unix:///run/a.sock", "--holder", "/run/b.sock"])
    assert (given.endpoint, given.holder) == ("/run/a.sock", "/run/b.sock")
    for wrong in ("a.sock", "tcp://0.0.0.0:1"):
        with pytest.raises(SystemExit) as ended:
            parsed(["holder", "--holder", wrong])
        assert ended.value.code == 2
        assert f"{wrong!r} is no absolute path; write one such as /csi/csi.sock" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_node_without_the_device_says_so(other_node, lake):
    hidden = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && exec "$@"'
    node = other_node("unshare", "--mount", "sh", "-c", hidden, "sh")
    ended_with(
        node, grpc.StatusCode.FAILED_PRECONDITION, "give the container the device", volume_context={"lake": lake}
    )


@pytest.mark.nightly
def test_an_image_without_the_extra_names_it(other_node, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without/obstore.py").write_text("raise ModuleNotFoundError('no obstore', name='obstore')\n")
    node = other_node(PYTHONPATH=str(tmp_path / "without"))
    context = {"lake": "gs://bucket/run"}
    ended_with(node, grpc.StatusCode.INVALID_ARGUMENT, "pip install 'stepfs[gcs]'", volume_context=context)


def test_what_cannot_be_published_is_told_in_one_line(node, lake, tmp_path):
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    target, full = tmp_path / "target", tmp_path / "full"
    (full / "inside").mkdir(parents=True)
    fields = {
        "volume_id": "v", "target_path": str(target), "volume_capability": READ_ONLY_MANY, "volume_context": {"lake": lake},
    }  # fmt: skip
    for change, code, words in [
        ({"volume_context": {}}, invalid, "lake is missing"),
        (
            {"volume_context": {"lake": lake, "rank": "0"}},
            invalid,
            "unknown volumeAttributes: rank; known are lake, ranks",
        ),
        ({"volume_context": {"lake": lake, "ranks": "7"}}, invalid, "no rank 7"),
        ({"volume_context": {"lake": f"{lake}-none"}}, grpc.StatusCode.NOT_FOUND, "is not a lake"),
        ({"volume_context": {"lake": lake, "prefetch": "-1"}}, invalid, "--prefetch"),
        ({"volume_context": {"lake": lake, "prime": "no"}}, invalid, """prime is "true" or "false", not 'no'"""),
        ({"volume_context": {"lake": lake, "cache-dir": "here"}}, invalid, "cache-dir is 'here'; name a directory"),
        ({"volume_context": {"lake": lake, "cache-size": "lots"}}, invalid, "for example 8G"),
        (
            {"volume_context": {"lake": lake, "checkpoint-dir": "/ckpt"}},
            invalid,
            "unknown volumeAttributes: checkpoint-dir",
        ),
        ({"volume_context": {"lake": f"--near={lake}"}}, invalid, "--near"),
        ({"volume_capability": {"block": {}, "access_mode": {"mode": 3}}}, invalid, "volumeMode Filesystem"),
        ({"volume_capability": READ_ONLY_MANY | {"mount": {"mount_flags": ["ro"]}}}, invalid, "mountOptions ro"),
        ({"volume_capability": READ_ONLY_MANY | {"mount": {"fs_type": "ext4"}}}, invalid, "fsType ext4: leave it out"),
        *(
            (
                {"volume_capability": {"mount": {}, "access_mode": {"mode": mode}}},
                invalid,
                f"accessModes {name}: a lake is",
            )
            for mode, name in [(0, "unknown"), (1, "ReadWriteOnce"), (5, "ReadWriteMany"), (6, "ReadWriteOncePod")]
        ),
        ({"target_path": f"{target}\0"}, invalid, "an absolute target_path"),
        ({"secrets": {"LD_PRELOAD": "x"}}, invalid, "the secret has the keys LD_PRELOAD"),
        ({"target_path": "relative"}, invalid, "an absolute target_path"),
        ({"volume_id": ""}, invalid, "volume_id"),
        ({"target_path": str(full)}, grpc.StatusCode.FAILED_PRECONDITION, "is not empty"),
        ({"target_path": "/proc"}, grpc.StatusCode.ALREADY_EXISTS, "/proc is a mount of proc"),
    ]:
        node.refused(code, words, "NodePublishVolume", **(fields | change))
    once = {"mount": {}, "access_mode": {"mode": 1}}  # ReadWriteOnce, of a pod that says readOnly: true
    node.publish("v", target, volume_context={"lake": lake}, volume_capability=once)
    assert (
        "volume v is read-only, though its accessModes say ReadWriteOnce" in (node.directory / "plugin.log").read_text()
    )
    node.refused(
        grpc.StatusCode.FAILED_PRECONDITION, "a volumeHandle of its own", "NodePublishVolume",
        **(fields | {"target_path": str(tmp_path / "b"), "volume_context": {"lake": lake, "ranks": "1"}}),
    )  # fmt: skip
    node.publish("w", tmp_path / "w", volume_context={"lake": lake})
    node.refused(
        grpc.StatusCode.ALREADY_EXISTS, "has another volume", "NodePublishVolume", **(fields | {"volume_id": "w"})
    )
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
    stats = {"volume_id": "v", "volume_path": str(tmp_path / "none")}
    node.refused(grpc.StatusCode.NOT_FOUND, "is not at", "NodeGetVolumeStats", **stats)
    node.refused(grpc.StatusCode.NOT_FOUND, "is not at", "NodeGetVolumeStats", volume_id="v", volume_path=str(full))
    node.refused(
        grpc.StatusCode.FAILED_PRECONDITION,
        "a mount of proc",
        "NodeUnpublishVolume",
        volume_id="v",
        target_path="/proc",
    )


def test_a_secret_runs_no_program_and_opens_no_file(other_node, tmp_path):
    """Whoever may write a Secret of a namespace is no root of the node."""
    ran, token = tmp_path / "ran", tmp_path / "token"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = touch {ran}\n")
    token.write_text("of the driver")
    node = other_node(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_EC2_METADATA_DISABLED="true")
    with rawserver.raw_server() as server:
        url = server.endpoint_url
        for secret in (
            {"AWS_CONFIG_FILE": str(tmp_path / "config")},
            {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_ENDPOINT_URL_STS": url},
            {"AWS_ENDPOINT_URL_S3": url},
        ):  # fmt: skip
            context = {"lake": "s3://bucket/run", "endpoint-url": url}
            names = "the secret has " + ("the keys " if len(secret) > 1 or "AWS_CONFIG_FILE" in secret else "")
            ended_with(node, grpc.StatusCode.INVALID_ARGUMENT, names, volume_context=context, secrets=secret)
        assert server.requests == []
    assert not ran.exists()


OF_OTHER_TESTS = "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"


def test_a_volume_with_keys_has_nothing_of_the_drivers_own_role(other_node, s3_url, tmp_path):
    """And an authority comes as a text: the driver keeps it where nobody else reads."""
    lake_with(s3_url, 2)
    usual = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3")
    keys = {name: os.environ[name] for name in usual[:2]} | {"AWS_ENDPOINT_URL": os.environ[usual[2]]}
    pem = self_signed(tmp_path).public.read_text()
    role = {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_PROFILE": "driver", "AWS_SESSION_TOKEN": "t",
        "GOOGLE_APPLICATION_CREDENTIALS": "/g", "AZURE_FEDERATED_TOKEN_FILE": "/a", "AWS_RETRY_MODE": "standard",
    }  # fmt: skip
    node = other_node(**dict.fromkeys((*usual, *OF_OTHER_TESTS)), **role)
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": s3_url}, secrets=keys | {"AWS_CA_BUNDLE": pem})
    variables = Path(f"/proc/{daemon_of(target)}/environ").read_text().split("\0")
    found = dict(line.split("=", 1) for line in variables if line.startswith(("AWS_", "GOOGLE_", "AZURE_")))
    (kept,) = node.base.glob("*/ca.pem")
    assert found == {
        **{name: keys[name] for name in usual[:2]}, "AWS_ENDPOINT_URL_S3": keys["AWS_ENDPOINT_URL"],
        "AWS_CA_BUNDLE": str(kept), "AWS_RETRY_MODE": "standard",
    }  # fmt: skip
    assert (kept.read_text().strip(), kept.stat().st_mode & 0o777) == (pem.strip(), 0o600)
    assert node.base.stat().st_mode & 0o777 == 0o700
    node.unpublish("v", target)
    assert list(node.base.iterdir()) == []


def test_a_holder_that_is_gone_is_not_ready_and_one_that_cannot_start_a_mount_says_why(node, lake, tmp_path):
    invalid, context = grpc.StatusCode.INVALID_ARGUMENT, {"lake": lake}
    ended_with(node, invalid, "is too long or has a NUL", volume_context=context | {"group": "g" * 200_000})
    ended_with(node, invalid, "is too long or has a NUL", volume_context=context | {"group": "a\0b"})
    ended_with(node, invalid, "is too long or has a NUL", volume_context=context, secrets={"AWS_REGION": "a\0b"})
    assert node.call("Probe", "Identity").ready.value is True
    assert "not a request" not in (tmp_path / "holder.log").read_text()
    node.holder.kill()
    node.holder.wait()
    assert node.call("Probe", "Identity").ready.value is False


def test_statistics_of_what_is_no_volume_or_no_path(node, lake, tmp_path):
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": lake})
    for volume, path, code in [
        ("v", "some/path", grpc.StatusCode.NOT_FOUND), ("v", f"{target}/..", grpc.StatusCode.NOT_FOUND), ("v", "a\0b", grpc.StatusCode.NOT_FOUND),
        ("w", str(target), grpc.StatusCode.NOT_FOUND), ("w", "some/path", grpc.StatusCode.NOT_FOUND),
        ("", str(target), grpc.StatusCode.INVALID_ARGUMENT), ("v", "", grpc.StatusCode.INVALID_ARGUMENT),
    ]:  # fmt: skip
        node.refused(code, "volume", "NodeGetVolumeStats", volume_id=volume, volume_path=path)
