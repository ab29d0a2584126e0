"""`stepfs doctor --bundle`, and that a credential is nowhere an operator, a log collector or `ps` would find it."""

from __future__ import annotations

import json
import os
import signal
import tarfile
import urllib.request
from pathlib import Path

import pytest
import servers
from prometheus_client.parser import text_string_to_metric_families
from realmount import PATIENCE_S, change_constants, gone, lake_with, make_lake, mounted, stepfs

from stepfs.mount import metrics

pytestmark = pytest.mark.usefixtures("real_daemons")

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCY"


def contents(path):
    with tarfile.open(path) as archive:
        return {m.name.removeprefix("stepfs-doctor/"): archive.extractfile(m).read().decode() for m in archive}


def test_a_bundle_holds_what_explains_a_mount(file_url, tmp_path, monkeypatch):
    lake_with(file_url, 3)
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}/token")
    monkeypatch.setenv("AWS_PROFILE", "training")
    bundle = tmp_path / "bundle.tar.gz"
    with mounted(file_url, tmp_path / "m") as mount:
        done = stepfs("doctor", "--bundle", bundle)
        assert bundle.stat().st_mode & 0o777 == 0o600
        inside = contents(bundle)
        (place,) = {
            name.split("/")[1] for name in inside if name.startswith("mounts/") and f"{tmp_path.name}_m/" in name
        }
        assert json.loads(inside[f"mounts/{place}/status.json"])["frontier"] == 2
        assert json.loads(inside[f"mounts/{place}/config.json"])["pid"] == mount.pid
        assert "stepfs_frontier_step 2.0" in inside[f"mounts/{place}/metrics"]
        assert "lookup(" in inside[f"mounts/{place}/accesslog"]
        assert "serving" in inside[f"mounts/{place}/log"]
        assert json.loads(inside["versions.json"])["packages"]["stepfs"]
        assert inside["report.txt"] == done.stdout
        assert str(mount.directory) in inside["system/mountinfo"]
        variables = json.loads(inside["environment.json"])
        assert variables["AWS_PROFILE"] == "training"
        assert variables["AWS_SECRET_ACCESS_KEY"] == variables["AWS_SESSION_TOKEN"] == "[redacted]"
        assert not [name for name, text in inside.items() if SECRET in text]
        again = stepfs("doctor", "--bundle", bundle)
        assert (again.returncode, again.stderr.count("\n")) == (4, 1)
        assert "is there already" in again.stderr


def test_a_dead_mount_hangs_no_doctor(file_url, tmp_path, monkeypatch):
    change_constants(
        monkeypatch, {"stepfs._internal.control_files:ANSWER_S": 1.0, "stepfs.doctor.bundle:ANSWER_S": 1.0}
    )
    make_lake(file_url)
    bundle = tmp_path / "bundle.tar.gz"
    with mounted(file_url, tmp_path / "m") as mount:
        mount.kill(signal.SIGSTOP)
        try:
            stepfs("doctor", "--bundle", bundle)
        finally:
            mount.kill(signal.SIGCONT)
        mine = f"{tmp_path.name}_m/status.json"  # other tests have mounts, too
        (status,) = [text for name, text in contents(bundle).items() if name.endswith(mine)]
        assert status == "no answer within 1 s\n"
        mount.kill(signal.SIGKILL)
        gone(mount.pid)


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.nightly), "json"])
def test_no_secret_is_in_argv_in_the_log_or_in_the_mount(s3_url, tmp_path, monkeypatch, log_format):
    lake_with(s3_url, 2)
    monkeypatch.setenv("STEPFS_LOG_FORMAT", log_format)
    port = servers.free_port_of_nobody()
    options = ["--group", "g", "--metrics-port", str(port)]
    with mounted(s3_url, tmp_path / "m", *options, allowed=["serving"]) as mount:
        mount.file(0, 0).read_bytes()
        mount.kill(signal.SIGUSR1)
        shown = {
            str(path): path.read_text(errors="replace")
            for path in (mount.directory / ".stepfs").rglob("*")
            if path.is_file() and "/wait/" not in str(path)
        }
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as scrape:
            shown["scrape"] = scrape.read().decode()
        names = {s.name for f in text_string_to_metric_families(shown["scrape"]) for s in f.samples}
        assert names >= {f"stepfs_{name}" for name in (*metrics.GAUGES, "mount_info", "fetch_seconds_bucket")}
        shown["log"] = mount.log.read_text()
        shown["argv"] = Path(f"/proc/{mount.pid}/cmdline").read_text()
        shown["source"] = Path("/proc/self/mountinfo").read_text()
        secret = os.environ["AWS_SECRET_ACCESS_KEY"]
        assert not [name for name, text in shown.items() if secret in text]
        assert len(shown) > 7
        if log_format == "json":
            first = json.loads(shown["log"].splitlines()[0])
            assert (first["mount"], first["level"]) == (str(mount.directory), "INFO")


def test_credentials_in_an_endpoint_are_refused_without_repeating_them(s3_url, tmp_path):
    (tmp_path / "m").mkdir()
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"].replace("http://", f"http://somebody:{SECRET}@")
    done = stepfs("mount", s3_url, tmp_path / "m", "--endpoint-url", endpoint)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "do not belong into an endpoint URL" in done.stderr
    assert SECRET not in done.stderr
