"""Tests of reading a package's definitions from its source, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_definitions_are_compared_without_their_documentation(tmp_path: Path, tree: SourceTree) -> None:
    core = FILES["vllm/engine/core.py"]
    changes = {"documented": ("Documented.", "Documented otherwise."), "changed": ("return a", "return b")}
    for module, name in (("vllm", "Engine.run"), ("vllm.engine", "Other")):  # a method, and its class
        before = tree.find(module, name)
        assert before is not None
        is_same = {}
        for change, (old, new) in changes.items():
            other = SourceTree(_write(tmp_path / change, FILES | {"vllm/engine/core.py": core.replace(old, new)}))
            found = other.find(module, name)
            assert found is not None
            is_same[change] = found.digest == before.digest
        assert is_same == {"documented": True, "changed": False}


def test_only_functions_and_classes_have_a_digest(tree: SourceTree) -> None:
    limit = tree.find("vllm.engine.core", "Engine.limit")
    assert limit is not None
    assert limit.digest is None
