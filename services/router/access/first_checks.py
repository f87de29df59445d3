"""First checks of every request, at both of the router's addresses."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import InvalidRequestError
from services.router.access.gate import refuse
from services.router.access.local_sites import LocalSites


class FirstChecks:
    """Middleware that refuses malformed paths and other sites, and finds the request's route.

    The checks inside it decide by this route (`route_of`), because a route's pattern may match more than one path: it
    ends with `$`, which also matches before a final newline.
    """

    def __init__(self, app: ASGIApp, *, sites: LocalSites | None) -> None:
        """`sites`: those that may call; None: all."""
        self._app = app
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                if not scope["path"].isprintable():
                    raise InvalidRequestError("the path has a control character or another one that cannot be printed")
                if self._sites is not None:
                    self._sites.check(scope)
            except InvalidRequestError as error:
                await refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {})["route"] = _find_route(scope)
        await self._app(scope, receive, send)


def _find_route(scope: Scope) -> str:
    """Returns the path of the route that Starlette will choose: the first full match, else the first partial one."""
    matches = ((route.matches(scope)[0].value, route.path) for route in scope["app"].routes)
    match, path = max(matches, key=lambda found: found[0])
    return path if match else ""
