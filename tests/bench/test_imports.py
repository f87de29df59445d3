from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench

EXTRAS = ("ray", "vllm")


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(bench.__path__)])
def test_every_command_finds_what_it_imports(name: str) -> None:
    try:
        importlib.import_module(f"bench.{name}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(f"needs {error.name}")
