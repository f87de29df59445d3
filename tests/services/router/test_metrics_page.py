"""Requests for the metrics that arrive together share one rendering; each shows what happened before it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from services.router.metrics import RouterMetrics
from services.router.operators.metrics_page import MetricsCall


class Counted(RouterMetrics):
    """Metrics that count their renderings."""

    def __init__(self) -> None:
        super().__init__("model")
        self.num_renderings = 0

    def renderer(self, only_key: str | None = None) -> Any:
        self.num_renderings += 1
        return super().renderer(only_key)


def asked_by(key: str | None) -> Any:
    return SimpleNamespace(state=SimpleNamespace(caller=SimpleNamespace(only_key=key)))


def test_requests_that_arrive_together_share_a_rendering() -> None:
    async def run() -> None:
        metrics = Counted()
        page = MetricsCall(metrics)
        await asyncio.gather(*(page.show(asked_by(key)) for key in ("a", "a", "a", "b")))
        assert metrics.num_renderings == 2

    asyncio.run(run())


def test_a_page_shows_what_happened_before_the_request() -> None:
    async def run() -> None:
        metrics = Counted()
        page = MetricsCall(metrics)
        for number in (1, 2, 3):
            metrics.keys.count_request("a", 200)
            answer = await page.show(asked_by("a"))
            counts = [line for line in bytes(answer.body).decode().splitlines() if 'key="a"' in line and "200" in line]
            assert counts[0].endswith(f" {number}.0")

    asyncio.run(run())


def test_a_caller_who_leaves_takes_the_page_from_nobody() -> None:
    async def run() -> None:
        page = MetricsCall(Counted())
        first, second = (asyncio.create_task(page.show(asked_by("a"))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).body

    asyncio.run(run())
