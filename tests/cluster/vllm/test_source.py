"""Tests of reading a package's definitions from its source, without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cluster.vllm.compatibility import compare_source
from cluster.vllm.source import SourceTree

FILES = {
    "vllm/__init__.py": 'MODULE_ATTRS = {"Engine": ".engine:Engine"}\n',
    "vllm/engine/__init__.py": "from .core import *\nfrom vllm.engine.core import Base as Other\n",
    "vllm/engine/core.py": """
from dataclasses import dataclass
try:
    import torch
except ImportError:
    torch = None

@dataclass
class Base:
    first: int
    second: str = ""

    def run(self, a, /, b, *rest, c=1, **more):
        "Documented."
        return a

class Engine(Base):
    third: float = 0.0
    limit = 3

Renamed = Engine
if torch:
    def later(x): ...
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    return SourceTree(_write(tmp_path, FILES))


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("module", "attribute", "parameters"),
    [
        ("vllm.engine.core", "Engine", ("first", "second", "third")),
        ("vllm.engine.core", "Engine.run", ("self", "a", "b", "rest", "c", "more")),  # inherited
        ("vllm.engine.core", "Engine.limit", ()),
        ("vllm.engine.core", "later", ("x",)),  # in a branch
        ("vllm.engine.core", "Renamed.run", ("self", "a", "b", "rest", "c", "more")),
        ("vllm.engine", "Engine", ("first", "second", "third")),  # by a star
        ("vllm.engine", "Other", ("first", "second")),
        ("vllm", "Engine", ("first", "second", "third")),  # imported when it is used
    ],
)
def test_names_are_followed(tree: SourceTree, module: str, attribute: str, parameters: tuple[str, ...]) -> None:
    found = tree.find(module, attribute)
    assert found is not None
    assert tree.parameters(found) == parameters


@pytest.mark.parametrize(
    ("module", "attribute"), [("vllm.of_old", "x"), ("vllm.engine", "of_old"), ("vllm", "Engine.old")]
)
def test_what_is_not_there_is_not_found(tree: SourceTree, module: str, attribute: str) -> None:
    assert tree.find(module, attribute) is None


def test_bodies_are_compared_without_their_documentation(tmp_path: Path, tree: SourceTree) -> None:
    core = FILES["vllm/engine/core.py"]
    hashes = []
    for name, text in (
        ("documented", core.replace("Documented.", "Documented otherwise.")),
        ("changed", core.replace("return a", "return b")),
    ):
        other = SourceTree(_write(tmp_path / name, FILES | {"vllm/engine/core.py": text}))
        found = other.find("vllm", "Engine.run")
        assert found is not None
        hashes.append(found.body_hash)
    before = tree.find("vllm", "Engine.run")
    assert before is not None
    assert hashes[0] == before.body_hash != hashes[1]


def test_the_installed_source_is_as_the_installed_package() -> None:
    """Which `test_compatibility` looks at by importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parents[1]
    assert compare_source(installed, installed) == ([], [])
