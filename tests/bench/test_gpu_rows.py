"""Every row of `make gpu-check` has a verdict, and the rows are those that the checks make."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu_rows import NEVER_RUN, ROWS, Row, not_listed, verdicts

ROOT = Path(__file__).parents[2]
NAMES = [row for rows in ROWS.values() for row in rows]


def patterns() -> Iterator[str]:
    """Yields patterns of the row names in the source, with wildcards for their fields."""
    for file in ("gpu_check.py", "gpu_kernels.py"):
        for node in ast.walk(ast.parse((ROOT / "bench" / file).read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="Row"), args=[name, *_]) | ast.Assign([ast.Name(id="row")], name):
                    if isinstance(name, ast.Constant):
                        yield re.escape(str(name.value))
                    elif isinstance(name, ast.JoinedStr):
                        parts = (re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in name.values)
                        yield "".join(parts)


def test_every_row_has_a_verdict() -> None:
    assert set(NAMES) <= set(verdicts(ROOT / "bench" / "results"))


def test_rows_are_those_that_the_checks_make() -> None:
    made = set(patterns())
    assert len(made) > 8
    assert not [name for name in NAMES if not any(re.fullmatch(pattern, name) for pattern in made)]
    assert not [pattern for pattern in made if not any(re.fullmatch(pattern, name) for name in NAMES)]


def test_a_row_that_is_not_listed_is_told() -> None:
    own = [Row("drafts in bursts, float32", True, "")]
    assert not_listed("triton-bursts", own) is None
    wrong = not_listed("triton-bursts", [*own, Row("steps on the moon", True, "")])
    assert wrong is not None
    assert wrong.held is False


def test_a_check_that_raised_has_not_held(tmp_path: Path) -> None:
    def report(name: str, check: str, held: bool | None) -> None:
        rows = [{"check": check, "held": held}]
        document = {"machine": {"gpu": "NVIDIA H200"}, "rows": rows}
        (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")

    report("gpu.json", "constraints", False)
    report("gpu-later.json", "drafts in bursts, float32", True)
    found = verdicts(tmp_path)
    assert {found[row] for row in ROWS["constraints"]} == {"NOT held on an H200"}
    assert found["drafts in bursts, float32"] == "held on an H200"
    assert found["Triton attention, float32"] == NEVER_RUN
    report("gpu-odd.json", "steps on the moon", True)
    with pytest.raises(KeyError, match="moon"):
        verdicts(tmp_path)
