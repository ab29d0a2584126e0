"""How a store is reached, beside the lake's URL. Credentials are no part of it; they come from the environment."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of every kind of store; each kind ignores options that it does not know. The one place to add another."""

    endpoint_url: str | None = None  # an S3-compatible server; None: the AWS chain decides
    connections: int | None = None  # ranged reads under way at a time; None: the store's own limit
    of_origin: bool = False  # a fork's parent: the server of its own profile beats `endpoint_url`

    def at_endpoint(self, endpoint_url: str | None) -> StoreOptions:
        """These options, at that server unless they name one."""
        return replace(self, endpoint_url=self.endpoint_url or endpoint_url)

    def for_origin(self) -> StoreOptions:
        """The same for the lake that a fork was made of."""
        return replace(self, of_origin=True)
