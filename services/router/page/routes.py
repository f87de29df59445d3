"""The page's routes: its files, which need no key, and its events, which need one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.router.access.caller import is_still_let_in
from services.router.http.security_headers import SECURITY_HEADERS
from services.router.http.streaming import EventStream
from services.router.page.feed import Feed

STATIC = Path(__file__).parent / "static"
EVENTS_PATH = "/page/events"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class StatusPage:
    """Serves the files and the events of the page. `hello`: returns a viewer's first event."""

    def __init__(self, feed: Feed, hello: Callable[[], Mapping[str, Any]]) -> None:
        self._feed = feed
        self._hello = hello
        self._files = {
            "/" if path.name == _INDEX else f"/page/{path.name}": _File(path)
            for path in sorted(STATIC.iterdir())
            if path.suffix in _MEDIA_TYPES
        }

    @property
    def open_routes(self) -> frozenset[str]:
        """Routes that need no key."""
        return frozenset(self._files)

    def routes(self) -> list[Route]:
        endpoints = {path: file.show for path, file in self._files.items()} | {EVENTS_PATH: self._show_events}
        # They are not in the schema: only this page uses them.
        return [Route(path, show, methods=["GET"], include_in_schema=False) for path, show in endpoints.items()]

    async def _show_events(self, request: Request) -> Response:
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        events = self._feed.events(self._hello(), partial(is_still_let_in, request.scope))
        return EventStream(events, headers)


class _File:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._media_type = _MEDIA_TYPES[path.suffix]
        self._headers = (
            SECURITY_HEADERS
            | {
                "cache-control": "no-cache",  # cached, but revalidated for each use
                "etag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"',
            }
        )

    async def show(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._media_type, headers=self._headers)
