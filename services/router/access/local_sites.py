"""Protects addresses that need no key from the web sites that a browser on this machine shows."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from cluster.config.types import is_loopback
from services.router.errors import ForbiddenError, excerpt

_SITE = re.compile(r"(?:https?://)?([^/:@]+|\[[^/@]+\])(?::\d+)?")  # a `Host` or `Origin`, in lower case


@dataclass(frozen=True)
class LocalSites:
    """Sites that may call an address that only this machine reaches: its own ones, `hosts`, and pages of `origins`."""

    hosts: Set[str]  # in lower case
    origins: Set[str]  # may include `*`

    def check(self, scope: Scope) -> None:
        """Raises ForbiddenError for another site's `Host`, and its `Origin` where the request may change something.

        A site whose name resolves to this machine (DNS rebinding) has that name as its `Host`.
        """
        headers = Headers(scope=scope)
        origins = set() if scope["method"] in ("GET", "HEAD", "OPTIONS") else set(headers.getlist("origin"))
        foreign = set() if "*" in self.origins else origins - self.origins
        for site in (*headers.getlist("host"), *foreign):
            match = _SITE.fullmatch(site.lower())
            if match is None or not (is_loopback(match[1]) or match[1] in self.hosts):
                raise ForbiddenError(
                    f"requests for or from {excerpt(site)} are refused: set router.allowed_hosts, or use keys"
                )
