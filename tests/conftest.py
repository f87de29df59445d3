"""Fixtures and hooks of all tests."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.background_loop import BackgroundLoop
from tests.order import ByGroup, put_in_order

# This has to be set before gRPC is imported, as tests with gRPC in this process come before others that start programs.
# gRPC's handler after a fork serves children that go on to use it. In a child that is about to run another program its
# threads enter Python, which sometimes ends in a segmentation fault.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# By default idle OpenMP threads spin and take cores from other tests: a distillation in parallel with other work takes
# four times the CPU seconds. This has to be set before PyTorch is imported.
os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


# Tests of the package's extras, by the package that they need.
_OF_EXTRAS = {
    "vllm": (
        "system/vllm",
        "system/ray/test_vllm.py",
        "cluster/vllm",
    ),
    "ray": (
        "bench/test_report.py",
        "system/ray",
        "services/launch/ray/test_app.py",
        "services/launch/ray/test_router_replica.py",
    ),
    "agents": ("system/clients/test_agents.py",),
    "lm_eval": ("system/clients/test_lm_eval.py",),
    "playwright": ("services/router/page/test_browser.py",),
}
_SETUP = {"vllm": "vllm", "ray": "ray", "agents": "clients", "lm_eval": "clients", "playwright": "browser"}
_ERROR_LINES = 12  # of a failure's traceback, whose end has the error
_MISSING = [package for package in _OF_EXTRAS if importlib.util.find_spec(package) is None]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of an extra, where it cannot be had; with REQUIRE_VLLM, REQUIRE_RAY, REQUIRE_CLIENTS or REQUIRE_BROWSER
    set they fail there."""
    own = collection_path.relative_to(Path(__file__).parent.parent).as_posix().removeprefix("tests/")
    for package in _MISSING:
        if f"REQUIRE_{_SETUP[package].upper()}" not in os.environ and own.startswith(_OF_EXTRAS[package]):
            return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        put_in_order(items)


@pytest.hookimpl(optionalhook=True)  # interpreted kernels are tested without plugins
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup | None:
    return ByGroup(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failure at once: a run that is ended by a time limit prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        error = str(report.longrepr).splitlines()[-_ERROR_LINES:]
        print(f"\n{report.nodeid} failed in {report.when} after {report.duration:.0f} s:", *error, sep="\n", flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for package in _MISSING:
        tests = ", ".join(_OF_EXTRAS[package])
        terminalreporter.write_line(f"left out, as {package} is not installed (make setup-{_SETUP[package]}): {tests}")


@pytest.fixture(autouse=True)
def _end_of_log() -> Iterator[None]:
    """A log that a test's program set up goes to what is captured of that test, and is closed with it."""
    yield
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


@pytest.fixture(scope="module")
def own_environment() -> Iterator[None]:
    """Restores the environment after the module's tests, as vLLM for example sets variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()
