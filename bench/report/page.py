"""The page's markers, and reading the result files that its tables are made from."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TABLE = re.compile(r"(<!--table:(?P<name>[\w-]+)-->\n).*?(?=<!--end-->)", re.DOTALL)


class Results:
    """Reads result files, and records which of them the tables use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.used: set[str] = set()

    def read(self, name: str) -> Any:
        return json.loads((self.folder_of(name) / name).read_text(encoding="utf-8"))

    def folder_of(self, *names: str) -> Path:
        """Returns the folder, for a function that reads the files `names` itself."""
        self.used.update(names)
        return self._folder


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Returns `page` with each text between `<!--table:NAME-->` and `<!--end-->` replaced by the table NAME.

    Raises ValueError if the page has a marker without a table, a table twice, or lacks a table.
    """
    names = [found["name"] for found in _TABLE.finditer(page)]
    if sorted(names) != sorted(tables):
        both = sorted(set(names) ^ set(tables)) or sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the markers of the page are not those of the tables: {', '.join(both)}")
    return _TABLE.sub(lambda found: f"{found[1]}\n{_narrow(tables[found['name']])}\n\n", page)


def _narrow(table: str) -> str:
    """`table` with the line below its titles as `markdown` writes it."""
    return re.sub(r"^\|( --- \|)+$", lambda line: "|" + "---|" * line[0].count("---"), table, flags=re.MULTILINE)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown with the titles `head`."""
    lines = [_line(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    # An empty cell is one space wide.
    return re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(map(str, cells))} |")


def median(results: Iterable[Mapping[str, Any]], key: str, scale: float = 1.0) -> float:
    """The median of one figure over the repeats in `results`, times `scale`."""
    return float(scale * statistics.median(result[key] for result in results))


def percent(share: float) -> str:
    return f"{100 * share:+.1f}%"
