"""Credentials of a role: of this machine (IMDS), this container or this pod. They may come late, or rarely.

A metadata service starts after the machine and limits its rate. So it gets several tries of two seconds; what it does not
give yet is an outage and no mistake; and processes that are forked from one that has credentials begin with those, since a
dozen loader workers at once would be refused. A spawned process asks for itself: secrets go into no pickle.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from boto3.session import Session
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import CredentialRetrievalError, NoCredentialsError

_METHODS: Final = {"iam-role", "container-role", "assume-role-with-web-identity"}  # botocore's names
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
    because this one has asked. `again` makes one."""
    core: Any = session._session  # noqa: SLF001 - boto3 passes only a part of it on
    if are_expected():
        for name, least in (("metadata_service_timeout", _TRY_S), ("metadata_service_num_attempts", _TRIES)):
            core.set_config_variable(name, max(least, core.get_config_variable(name)))
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
