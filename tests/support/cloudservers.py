"""Servers of gs:// and az:// on loopback: the double of Google's XML interface, and Azurite (scripts/setup brings it)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from pathlib import Path

import servers
from servers import BUCKET

ACCOUNT = "devstoreaccount1"  # Azurite's, with its well-known key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"


@dataclass
class CloudServer:
    """A running server; lakes lie below `home`."""

    home: str
    endpoint_url: str
    process: subprocess.Popen[bytes]

    @property
    def plain_port(self) -> int:
        return int(self.endpoint_url.rpartition(":")[2])

    def environment(self, endpoint_url: str | None = None) -> dict[str, str]:
        """Variables with which a client reaches it, or a proxy before it."""
        endpoint_url = endpoint_url or self.endpoint_url
        if self.home.startswith("gs:"):
            return {"GOOGLE_BASE_URL": endpoint_url, "GOOGLE_BEARER_TOKEN": "stepfs-test-token"}
        return {"AZURE_STORAGE_ENDPOINT": f"{endpoint_url}/{ACCOUNT}", "AZURE_STORAGE_ACCOUNT_KEY": KEY}


@contextmanager
def google(directory: Path, *, port: int = 0, lies: bool = False) -> Iterator[CloudServer]:
    """The double; its objects live as long as it does. `lies`: every create of a key succeeds."""
    port = port or servers.free_ports(1)[0]
    program = Path(__file__).with_name("googlexml.py")
    command = [sys.executable, str(program), str(port), *(["--lie"] if lies else [])]
    with servers.running(command, directory, partial(_is_up, port)) as process:
        yield CloudServer(f"gs://{BUCKET}", f"http://127.0.0.1:{port}", process)


@contextmanager
def azurite(directory: Path, *, port: int = 0) -> Iterator[CloudServer]:
    """Azurite with its data in `directory`, which a second start there finds again."""
    port = port or servers.free_ports(1)[0]
    command = [str(AZURITE), "--blobPort", str(port), "--location", str(directory)]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--blobKeepAliveTimeout", "60"]
    with servers.running(command, directory, partial(_is_up, port)) as process:
        with suppress(urllib.error.HTTPError):  # 409: it is there
            urllib.request.urlopen(_container_request(f"http://127.0.0.1:{port}"), timeout=10).close()
        yield CloudServer(f"az://{ACCOUNT}/{BUCKET}", f"http://127.0.0.1:{port}", process)


def _container_request(endpoint_url: str) -> urllib.request.Request:
    path, date, version = f"/{ACCOUNT}/{BUCKET}", formatdate(usegmt=True), "2021-10-04"
    signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    headers = {
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
        "x-ms-date": date,
        "x-ms-version": version,
    }
    return urllib.request.Request(f"{endpoint_url}{path}?restype=container", method="PUT", headers=headers)


def _is_up(port: int) -> str:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).close()
    except urllib.error.HTTPError:
        return ""
    except OSError as error:
        return str(error)
    return ""
