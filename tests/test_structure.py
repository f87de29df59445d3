"""Rules of the code's structure that no tool checks: one class for each name, few modules outside a package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_no_public_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (*(ROOT / "cluster").rglob("*.py"), *(ROOT / "services").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(("package", "most"), [("cluster", 10), ("services/router", 15)])
def test_few_modules_stand_outside_a_package(package: str, most: int) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= most
