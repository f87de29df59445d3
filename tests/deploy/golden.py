"""Output of the chart for some of the values in values/: `make docs` (`python -m tests.deploy.golden`) writes golden/.

The effect of a changed template on objects shows there. Properties of the other values are in `test_chart.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.helm.render import join, render

FOLDER = Path(__file__).resolve().parent
CASES = tuple(sorted(path.stem for path in (FOLDER / "values").glob("*.yaml")))

GOLDEN = ("defaults", "ray", "secured")


def read_values(case: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((FOLDER / "values" / f"{case}.yaml").read_text(encoding="utf-8"))
    return values


def golden_file(case: str) -> Path:
    return FOLDER / "golden" / f"{case}.yaml"


def write_all() -> None:
    golden_file("any").parent.mkdir(exist_ok=True)
    for case in GOLDEN:
        golden_file(case).write_text(join(render(read_values(case))), encoding="utf-8")


if __name__ == "__main__":
    write_all()
