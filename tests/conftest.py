"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.background_loop import BackgroundLoop

# Before gRPC is imported: tests with gRPC in this process come before others that start programs. What it does after
# a fork, for children that go on to use it, takes threads into Python in a child that is about to become another
# program, and ends that now and then with a segmentation fault.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()
