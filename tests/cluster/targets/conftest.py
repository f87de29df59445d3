"""What the tests of targets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.background_loop import BackgroundLoop


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()
