"""Certificates for servers on loopback."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Two files; clients trust `public`."""

    public: Path
    private: Path

    def of_server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.public, self.private)
        return context


def self_signed(directory: Path) -> Certificate:
    """For 127.0.0.1, two days long; the one that is there, if there is one."""
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    if made.public.exists():
        return made
    subject = ["-subj", "/CN=stepfs-test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(made.public), "-keyout", str(made.private)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return made
