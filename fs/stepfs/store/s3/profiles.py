"""The AWS profile that a lake's URL chooses: one that is named like the beginning of the URL.

So one process reaches several S3 servers, each with credentials of its own, and the AWS files stay the only place for them.

All sessions of a process, and of the processes forked from it, share one loader of botocore's models: to parse them took
three quarters of a DataLoader worker's first read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import botocore.session
from boto3.session import Session
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.loaders import Loader, create_loader


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
    loader = _loader(core.get_config_variable("data_path"))
    core.register_component("data_loader", loader)
    session = Session(botocore_session=core)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds boto3's own
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    return create_loader(data_path)
