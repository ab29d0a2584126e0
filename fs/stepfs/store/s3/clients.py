"""boto3's clients of S3, made of the user's profile, and the credentials of a role.

`commit` and `delete` send exactly once; `data` retries what may be sent twice, and `direct` reads plain ranges beside it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import botocore.session
from boto3.session import Session
from botocore.awsrequest import AWSHTTPConnectionPool, AWSHTTPSConnectionPool, AWSResponse
from botocore.compat import HTTPHeaders
from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, CredentialRetrievalError, NoCredentialsError
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.loaders import Loader, create_loader

from stepfs.errors import RefusedError, UsageError
from stepfs.store.s3.direct import CONNECT_S, IDLE_S, DirectReads
from stepfs.store.server_answers import is_throttled
from stepfs.store.settings import COMMIT_THREADS_MAX, CONTROL_THREADS_MAX, DATA_THREADS_MAX, S3_ENDPOINTS, SET_S3_KEYS

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_METHODS: Final = {"iam-role", "container-role", "assume-role-with-web-identity"}  # botocore's names
_NO_REGION: Final[Any] = AWSResponse("", 200, HTTPHeaders(), None), {"ResponseMetadata": {"HTTPHeaders": {}}}
_ANSWER_BYTES_MAX: Final = 16 << 20  # a thousand of the longest keys, as XML, are a few
_TRY_S: Final = 2
_TRIES: Final = 3
_NAMED_BY: Final = (
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)
_VENDOR: Final = Path("/sys/class/dmi/id/sys_vendor")

_held: dict[str, tuple[int, RefreshableCredentials]] = {}  # by profile: the process that got them


def are_expected() -> bool:
    """Whether the environment, or the machine's maker, says that a role has credentials here."""
    if any(map(os.environ.get, _NAMED_BY)):
        return True
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    with suppress(OSError):
        return "amazon" in _VENDOR.read_text().lower()
    return False


def are_of_role(credentials: Any) -> bool:
    return getattr(credentials, "method", None) in _METHODS


def credentials_of(session: Session, again: Callable[[], Session]) -> Any:
    """The session's credentials; `NoCredentialsError` if there are none, or none yet: then the next try needs a new session,
    because this one has asked. `again` makes one.
    """
    core: Any = session._session  # noqa: SLF001 - boto3 passes only a part of it on
    pid, held = _held.get(session.profile_name, (os.getpid(), None))
    if held is not None and pid != os.getpid() and not held.refresh_needed():  # else it would take a lock of the parent
        core._credentials = _copied(held, again)  # noqa: SLF001 - no other way
    found: Any = core.get_credentials()
    if found is None:
        raise NoCredentialsError
    if are_of_role(found):
        _held[session.profile_name] = os.getpid(), found
    return found


def _copied(held: RefreshableCredentials, again: Callable[[], Session]) -> RefreshableCredentials:
    """The same credentials without the parent's locks; a session of its own renews them."""

    def renewed() -> dict[str, str]:
        found = again().get_credentials()
        if not isinstance(found, RefreshableCredentials):
            raise CredentialRetrievalError(provider=held.method, error_msg="there are none just now")
        return _metadata(found)

    return RefreshableCredentials.create_from_metadata(_metadata(held), renewed, held.method)


def _metadata(credentials: Any) -> dict[str, str]:
    frozen = credentials.get_frozen_credentials()
    expiry = credentials._expiry_time.isoformat()  # noqa: SLF001 - no other way
    named = {"access_key": frozen.access_key, "secret_key": frozen.secret_key, "token": frozen.token}
    return {**named, "expiry_time": expiry}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The settings that a client takes from a profile. The environment of other servers beats none of it; None: not set there."""

    session: Session
    profile: str | None = None  # of the URL; None: the AWS chain's, whose settings botocore finds by itself
    endpoint_url: str | None = None
    region: str | None = None
    ca_bundle: str | None = None


def profile_of(url: str, names: Iterable[str]) -> str | None:
    """The longest name that is `url`, or a beginning of it at a '/'."""
    fitting = [name for name in names if f"{url}/".startswith(f"{name.rstrip('/')}/") and "://" in name]
    return max(fitting, key=len, default=None)


def choose(profile: str | None, url: str | None) -> Chosen:
    """The session for a lake at `url`, or for a source with a profile of its own. Raises botocore's errors."""
    usual = _session(profile)
    named = None if url is None else profile_of(url, usual.available_profiles)
    if named is None:
        return Chosen(usual)
    session = _session(named)
    core = session._session  # noqa: SLF001 - boto3 passes only a part of it on
    scoped = core.get_scoped_config()
    endpoint = ConfiguredEndpointProvider(core.full_config, scoped, "s3", environ={}).provide()
    return Chosen(session, named, endpoint, scoped.get("region"), scoped.get("ca_bundle"))


def _session(profile: str | None) -> Session:
    core = botocore.session.Session(profile=profile)
    if are_expected():
        for name, least in (("metadata_service_timeout", _TRY_S), ("metadata_service_num_attempts", _TRIES)):
            core.set_config_variable(name, max(least, core.get_config_variable(name)))
    loader = _loader(core.get_config_variable("data_path"))
    core.register_component("data_loader", loader)
    session = Session(botocore_session=core)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds boto3's own
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    return create_loader(data_path)


class _BoundedPool:
    """A pool of connections that uses none again which was idle for `IDLE_S`, and ends an answer without an end."""

    def urlopen(self, *arguments: Any, **options: Any) -> Any:
        answer: Any = super().urlopen(*arguments, **options)  # type: ignore[misc]
        stream = answer.stream  # of all but objects, whose readers count for themselves

        def bounded(*arguments: Any, **options: Any) -> Iterator[bytes]:
            size = 0
            for part in stream(*arguments, **options):
                size += len(part)
                if size > _ANSWER_BYTES_MAX:
                    answer.close()
                    raise ValueError(f"an answer of more than {_ANSWER_BYTES_MAX >> 20} MiB")
                yield part

        answer.stream = bounded
        return answer

    def _put_conn(self, connection: Any) -> None:
        if connection is not None:
            connection.idle_since = time.monotonic()
        super()._put_conn(connection)  # type: ignore[misc]

    def _get_conn(self, timeout: float | None = None) -> Any:
        connection: Any = super()._get_conn(timeout=timeout)  # type: ignore[misc]
        if time.monotonic() - getattr(connection, "idle_since", math.inf) > IDLE_S:
            connection.close()  # the request connects it again
        return connection


class _Http(_BoundedPool, AWSHTTPConnectionPool): ...


class _Https(_BoundedPool, AWSHTTPSConnectionPool): ...


@dataclass(eq=False)
class Clients:
    """The `commit` and `data` clients, each made at its first use. Thread-safe.

    `on_request(operation, headers)` runs in the sending thread right before each HTTP attempt, retries included;
    `on_server(name)` runs with the Server header of each answer; `on_throttled()` at each answer that asks for fewer
    requests, also if a retry succeeds. `url`: of a lake, whose profile is used; `of_origin`: its server beats
    `endpoint_url`.
    """

    endpoint_url: str | None
    commit_timeout_s: float
    data_timeout_s: float
    data_threads: int = DATA_THREADS_MAX
    profile: str | None = None
    url: str | None = None
    of_origin: bool = False
    on_request: Callable[[str, Mapping[str, Any]], None] = lambda _operation, _headers: None
    on_server: Callable[[str], None] = lambda _name: None
    on_throttled: Callable[[], None] = lambda: None
    chosen: Chosen | None = None  # once a client is made
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: dict[str, S3Client] = field(default_factory=dict)
    _direct: DirectReads | None = None
    _credentials: Any = None
    _pid: int | None = None

    def commit(self) -> S3Client:
        return self._client("commit", 1, COMMIT_THREADS_MAX, self.commit_timeout_s)

    def delete(self) -> S3Client:
        return self._client("delete", 1, CONTROL_THREADS_MAX, self.data_timeout_s)

    def data(self) -> S3Client:
        return self._client("data", 4, CONTROL_THREADS_MAX + self.data_threads, self.data_timeout_s)

    def direct(self) -> DirectReads:
        self.data()
        assert self._direct is not None
        return self._direct

    def may_come_late(self) -> bool:
        """Whether credentials that are missing or expired are those of a role, which may get them yet."""
        return are_expected() if self._credentials is None else are_of_role(self._credentials)

    def close(self) -> None:
        with self._lock:
            if self._direct is not None:
                self._direct.close()
            for client in self._made.values():
                client.close()
            self._made.clear()

    def _client(self, role: str, attempts: int, threads: int, timeout_s: float) -> S3Client:
        with self._lock:
            if self._pid not in {None, os.getpid()}:
                raise RefusedError("this process was forked after the store was used; open the store in the child")
            self._pid = os.getpid()
            if role not in self._made:
                self._made[role] = self._make(attempts, threads, timeout_s)
            return self._made[role]

    def _make(self, attempts: int, threads: int, timeout_s: float) -> S3Client:
        if self._made and self.chosen is not None:  # its session has credentials, and has read what all clients read
            chosen = self.chosen
        else:
            try:
                chosen = self.chosen = choose(self.profile, self.url)
            except BotoCoreError as error:  # AWS_PROFILE names no profile, a configuration file does not parse
                raise UsageError(f"the AWS settings are wrong: {error}") from error
            self._credentials = credentials_of(chosen.session, lambda: choose(self.profile, self.url).session)
        session, scoped = chosen.session, chosen.endpoint_url
        given = scoped or self.endpoint_url if self.of_origin else self.endpoint_url or scoped
        signs_body = attempts == 1  # uploads use the CRC32C that the server verifies: SHA-256 costs more
        usual = None if chosen.profile else next(filter(None, map(os.environ.get, S3_ENDPOINTS)), None)
        named = given or usual
        if named and "@" in named:  # it would be in argv, in logs and in error messages
            raise UsageError(f"credentials do not belong into an endpoint URL; {SET_S3_KEYS}")

        def make(style: Literal["auto", "path"]) -> S3Client:
            config = Config(
                connect_timeout=CONNECT_S,
                read_timeout=timeout_s,
                max_pool_connections=threads,
                tcp_keepalive=True,
                retries={"total_max_attempts": attempts, "mode": "standard"},
                request_checksum_calculation="when_required",  # uploads carry a CRC32C of our own
                response_checksum_validation="when_required",  # so do stored objects, inside
                user_agent_extra="stepfs",
                # Those of the environment, which are for other servers.
                ignore_configured_endpoint_urls=chosen.profile is not None,  # type: ignore[call-arg]
                s3={"addressing_style": style, "payload_signing_enabled": signs_body},
            )
            region = chosen.region or session.region_name or "us-east-1"
            try:
                return session.client(
                    "s3", endpoint_url=given, region_name=region, config=config, verify=chosen.ca_bundle
                )
            except ValueError as error:  # botocore raises this for anything but a URL, and for what is no region's name
                if named is None:
                    raise UsageError(
                        f"region {region!r}: set AWS_REGION to a region's name, such as eu-west-1"
                    ) from error
                raise UsageError(f"endpoint {named!r}: write a URL such as https://host:port") from error

        client = make("path" if named else "auto")
        if not named and not is_aws(client.meta.endpoint_url):  # an endpoint from a configuration file
            client.close()
            client = make("path")
        host = urlsplit(client.meta.endpoint_url).hostname or ""
        if signs_body and host.endswith("storage.googleapis.com"):
            raise RefusedError(f"{host} ignores If-None-Match on writes, so no lake may lie there; use gs://")
        if self._direct is None:
            self._direct = DirectReads(
                self._credentials,
                cache(partial(_tls, chosen.ca_bundle or session._session.get_config_variable("ca_bundle"))),  # noqa: SLF001 - no other way
                self.data_timeout_s,
                self.on_request,
                self.on_throttled,
            )
        sends: Any = client._endpoint.http_session  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
        sends._pool_classes_by_scheme.update(http=_Http, https=_Https)  # noqa: SLF001
        client.meta.events.register("before-send.s3", self._before_send)
        client.meta.events.register("after-call.s3", self._after_call)
        client.meta.events.register("needs-retry.s3", self._after_attempt)
        # boto3 asks for the region of a redirected bucket, and of that question's redirection, and so on.
        client.meta.events.register("before-call.s3.HeadBucket", lambda **_: _NO_REGION)
        return client

    def _before_send(self, request: Any, event_name: str, **_: object) -> None:
        operation = event_name.rpartition(".")[2]
        self.on_request(operation, request.headers)
        if operation == "GetObject" and self._direct is not None:
            self._direct.sent.request = request

    def _after_call(self, http_response: Any, **_: object) -> None:
        self.on_server(http_response.headers.get("Server", ""))

    def _after_attempt(self, response: tuple[Any, Mapping[str, Any]] | None, **_: object) -> None:
        if response is None:
            return  # there was no answer
        http, parsed = response
        if is_throttled(http.status_code, parsed.get("Error", {}).get("Code", "")):
            self.on_throttled()


def _tls(ca_bundle: Any) -> SSLContext:
    """The context that verifies a server, as botocore makes it. `ca_bundle`: a file, or None for the usual authorities."""
    context: SSLContext = create_urllib3_context()
    context.load_verify_locations(get_cert_path(ca_bundle or True))
    return context


def is_aws(endpoint_url: str) -> bool:
    """Whether the endpoint is Amazon's own, where virtual-host addressing is the rule."""
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
