"""The caller of the current request, if the router has keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.router.errors import excerpt

Role = Literal["client", "operator", "scraper", "launcher"]
"scraper, launcher: may only read pages about the cluster's state."


@dataclass(frozen=True, slots=True)
class Caller:
    name: str  # name of the key; "": the router has no keys
    role: Role
    sees_workers: bool = False  # whether it may see the workers' addresses
    has_priority: bool = False  # whether its requests' priority orders them among those of all keys
    output_token_ms: float | None = None  # limit of its requests without their own; None: the target's

    @property
    def owner(self) -> bytes:
        """A hash of the key's name, by which targets share fairly; b"" without keys or with priority=all."""
        return b"" if self.has_priority or not self.name else hashlib.sha256(self.name.encode()).digest()[:8]

    @property
    def only_key(self) -> str | None:
        """Returns the name of the only key whose use it may see; None: it may see the use of all keys."""
        return self.name if self.role == "client" and not self.sees_workers else None


def caller_of(scope: Mapping[str, Any]) -> Caller | None:
    """Returns the caller of the request; None for a probe without a key."""
    caller: Caller | None = scope.get("state", {}).get("caller")
    return caller


def is_still_let_in(scope: Mapping[str, Any]) -> bool:
    """Returns whether the request's key is still valid. Answers that last for hours check this."""
    ask: Callable[[], object] | None = scope.get("state", {}).get("ask_again")
    return ask is None or ask() is not None


def name_of_caller(scope: Mapping[str, Any]) -> str:
    """Returns the key's name, if there is one, and the host, for audit lines."""
    key, host = caller_of(scope), host_of(scope)
    return f"{key.name} at {host}" if key is not None and key.name else host


def host_of(scope: Mapping[str, Any]) -> str:
    """Returns the client's host in quotes: a proxy may pass on any text as the host."""
    client = scope.get("client")
    return excerpt(client[0]) if client else "unknown"
