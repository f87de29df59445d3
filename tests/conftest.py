"""What all tests share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.background_loop import BackgroundLoop

# Before gRPC is imported: tests with gRPC in this process come before others that start programs. What it does after
# a fork, for children that go on to use it, takes threads into Python in a child that is about to become another
# program, and ends that now and then with a segmentation fault.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


_OF_VLLM = ("system/vllm", "cluster/vllm", "cluster/drafters/test_vllm.py", "cluster/targets/test_vllm_rounds.py")
_HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of vLLM, where it cannot be had; with REQUIRE_VLLM set they fail there."""
    own = collection_path.relative_to(Path(__file__).parent.parent).as_posix().removeprefix("tests/")
    is_left_out = not _HAS_VLLM and "REQUIRE_VLLM" not in os.environ and own.startswith(_OF_VLLM)
    return True if is_left_out else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _HAS_VLLM:
        terminalreporter.write_line(f"left out, as vLLM is not installed (make setup-vllm): {', '.join(_OF_VLLM)}")


@pytest.fixture(scope="module")
def own_environment() -> Iterator[None]:
    """What the module's tests put into the environment, as vLLM does, is gone after them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()
