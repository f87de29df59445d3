"""The route of the current request, which the first checks have noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def route_of(scope: Mapping[str, Any]) -> str:
    """Returns the path of the route that answers the request, as declared; "" if there is none."""
    return str(scope.get("state", {}).get("route", ""))
