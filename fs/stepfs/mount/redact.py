"""Texts and URLs without credentials, for logs, documents and mount tables that other people read."""

import os
import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from stepfs.store.settings import SECRETS

_SECRET_BYTES_MIN: Final = 4  # a shorter secret would match ordinary words
_IN_URL: Final = re.compile(r"(?<=://)[^/@\s\"']+@")
_IN_QUERY: Final = re.compile(r"((?:X-Amz-(?:Signature|Credential|Security-Token))=)[^&\s\"']+", re.IGNORECASE)
_IN_SETTING: Final = re.compile(
    r"((?:secret|token|password|credential)\w*[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+", re.IGNORECASE
)
_STRUCK: Final = "[redacted]"


def redacted(text: str) -> str:
    """`text` without this process's credentials, without user and password in URLs, without labelled secrets."""
    for name in SECRETS:
        secret = os.environ.get(name, "")
        if len(secret) >= _SECRET_BYTES_MIN:
            text = text.replace(secret, _STRUCK)
    text = _IN_URL.sub(f"{_STRUCK}@", text)
    text = _IN_QUERY.sub(rf"\g<1>{_STRUCK}", text)
    return _IN_SETTING.sub(rf"\g<1>{_STRUCK}", text)


def shown_path(path: os.PathLike[str]) -> str:
    """The path as text; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def redact_url(url: str) -> str:
    """The URL without user, password and query, which may contain secrets; a path stays unchanged."""
    if url.startswith("file:"):
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
