"""GET /metrics of the public address: answers requests that arrive together with one rendering."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from services.router.http.large_work import run_in_thread
from services.router.metrics import RouterMetrics

_INTERVAL_S = 0.1  # between two renderings for one caller; each takes 4 ms of processor time


class MetricsCall:
    """The page of each caller: a key that sees its own metrics, or one that sees all (None)."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._next: dict[str | None, asyncio.Task[bytes]] = {}  # renderings that have not begun
        self._begun_at: dict[str | None, float] = {}  # by caller, of the last rendering

    async def show(self, request: Request) -> Response:
        key = request.state.caller.only_key
        if key not in self._next:
            self._next[key] = asyncio.create_task(self._render(key))
        page = await asyncio.shield(self._next[key])  # others may wait for it
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _render(self, key: str | None) -> bytes:
        await asyncio.sleep(self._begun_at.get(key, 0.0) + _INTERVAL_S - time.monotonic())
        del self._next[key]  # later requests need later values
        self._begun_at[key] = time.monotonic()
        return await run_in_thread(0, self._metrics.renderer(key))
