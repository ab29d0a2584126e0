"""Opens the store of a lake's URL: parsing and checks only; nothing here touches a disk or a network."""

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from stepfs.errors import MissingPackageError, UsageError
from stepfs.format.arguments import check_text
from stepfs.store.api import KEY_BYTES_MAX, Store, StoreOptions
from stepfs.store.local.local_store import LocalStore
from stepfs.store.settings import AZURE, GOOGLE, S3
from stepfs.store.silence import Silence

_REMOTE: Final = "s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix"
_NEARLY: Final = re.compile(r"(file|s3|gs|az)(?::/*|//+)([^/].*)", re.IGNORECASE)
_ACCOUNT: Final = re.compile(r"[a-z0-9]{3,24}")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_OF_GOOGLE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Of a prefix. A class that ends at \U0010ffff would take 7 ms to compile, a tenth of a short command.
_PART: Final = re.compile(r"(?:[A-Za-z0-9_=+~-]|[^\x00-\x7f])(?:[A-Za-z0-9_=+~. -]|[^\x00-\x7f])*(?<! )")
_SERVERS: Final = {"s3": (S3, _BUCKET), "gs": (GOOGLE, _OF_GOOGLE), "az": (AZURE, _BUCKET)}


def open_store(
    url: str, *, endpoint_url: str | None = None, options: StoreOptions | None = None, silence: Silence | None = None
) -> Store:
    """The store of a lake's URL; `UsageError` for anything else.

    `endpoint_url` is short for `StoreOptions(endpoint_url)`. `silence` watches the requests of a command that waits.
    """
    options = (options or StoreOptions()).at_endpoint(endpoint_url)
    scheme, separator, rest = check_text(url, "the lake", "file:///directory").partition("://")
    if not separator:
        raise UsageError(f"{url!r} has no scheme; do you mean {meant_url(url)}?")
    if scheme == "file":
        return LocalStore(_local_root(url, rest))
    if scheme in {"http", "https"}:
        host, _, path = rest.partition("/")
        raise UsageError(
            f"{url!r} is the address of a server; write s3://{path.strip('/') or 'bucket/prefix'}, and the server as"
            f" --endpoint-url {scheme}://{host}"
        )
    if scheme not in _SERVERS:
        near = get_close_matches(scheme.lower(), ["file", *_SERVERS], n=1, cutoff=0.5)
        meant = f"do you mean {near[0]}://{rest}?" if near else f"write file:///directory, {_REMOTE}"
        raise UsageError(f"{url!r}: unknown scheme {scheme!r}; {meant}")
    words, name = _SERVERS[scheme]
    if "@" in rest or "?" in rest:
        raise UsageError(
            f"credentials and options do not belong into a URL, and '@' and '?' not into a prefix; {words.check_keys}"
        )
    account, _, inner = rest.partition("/") if scheme == "az" else ("", "", rest)
    bucket, _, prefix = inner.partition("/")
    if scheme == "az" and _ACCOUNT.fullmatch(account) is None:
        raise UsageError(f"{url!r}: {account!r} is not an account name; write {words.form}")
    if name.fullmatch(bucket) is None:
        raise UsageError(f"{url!r}: {bucket!r} is not a {words.container} name; write {words.form}")
    prefix = _checked(prefix.strip("/"))
    if scheme == "s3":
        from stepfs.store.s3.s3_store import S3Store  # noqa: PLC0415 (boto3 is heavy; only S3 lakes pay for it)

        return S3Store(
            bucket,
            prefix,
            endpoint_url=options.endpoint_url,
            of_origin=options.of_origin,
            data_threads=options.connections,
            silence=silence,
        )
    try:  # obstore takes a tenth of a second, and comes with an extra
        from stepfs.store.cloud.cloud_store import CloudStore  # noqa: PLC0415
        from stepfs.store.cloud.place import azure_place, google_place  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{scheme}:// needs the package obstore, which is not installed: pip install 'stepfs[{words.extra}]'"
        ) from error
    place = azure_place(account, bucket, prefix) if scheme == "az" else google_place(bucket, prefix)
    return CloudStore(place, data_threads=options.connections, silence=silence)


def _checked(prefix: str) -> str:
    plain = prefix.isprintable() and len(prefix.encode()) <= KEY_BYTES_MAX
    if not plain or (prefix and not all(map(_PART.fullmatch, prefix.split("/")))):
        raise UsageError(
            f"the prefix {prefix[:80]!r}: its parts take letters, digits, - _ = + ~, inside also blanks and dots, and all "
            f"together {KEY_BYTES_MAX} bytes; use another"
        )
    return prefix


def meant_url(text: str) -> str:
    """The URL that a text without a scheme may mean: `s3:/bucket`, or a path."""
    near = _NEARLY.fullmatch(text)
    if near is None:
        return Path(os.path.realpath(Path(text).expanduser() if text.startswith("~/") else text)).as_uri()
    return ("file:///" if near[1].lower() == "file" else f"{near[1].lower()}://") + near[2]


def _local_root(url: str, rest: str) -> Path:
    host, slash, path = rest.partition("/")
    if host not in {"", "localhost"} or not slash:
        raise UsageError(f'{url!r} is not absolute; write "file://$PWD/{rest}", or file:///directory')
    root = Path(unquote(f"/{path}"))
    if "\0" in str(root) or ".." in root.parts:
        raise UsageError(f"{url!r} does not name a directory; write file:///directory")
    return root
