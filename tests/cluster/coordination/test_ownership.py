"""A drafted sequence has one owner: nothing outside its module assigns a field of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from cluster.coordination import sequence
from cluster.coordination.sequence import SpeculativeSequence

OWNER = Path(sequence.__file__)
ROOT = OWNER.parents[2]
FIELDS = {field.name for field in fields(SpeculativeSequence)}
# Where sequences of the coordinator are handled; elsewhere the same names are fields of other things.
PACKAGES = ("cluster/coordination", "cluster/targets")


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes of anything but `self` that `tree` assigns or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not is_own:
                yield node


def test_only_its_module_assigns_its_fields() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{node.lineno} assigns .{node.attr}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != OWNER
        for node in assigned(ast.parse(path.read_text(encoding="utf-8")))
        if node.attr in FIELDS
    ]
    assert offences == []


def test_an_assignment_would_be_found() -> None:
    source = "s.depth = 1\na.b.link, c = 1, 2\nself.depth = 1\nfor x.proposal in y: pass\ndel z.is_late\ns.depth += 1\n"
    found = [node.attr for node in assigned(ast.parse(source)) if node.attr in FIELDS]
    assert sorted(found) == ["depth", "depth", "is_late", "link", "proposal"]
