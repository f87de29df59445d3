"""The page of measurements is the one that its results make, and uses all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report.__main__ import TABLES, written
from bench.report.page import Results, fill, markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
MOST_WORDS = 5_000


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "MEASURED.md").read_text(encoding="utf-8")


def test_the_page_is_the_one_that_the_command_writes(page: str) -> None:
    assert written(page, Results(RESULTS)) == page


def test_the_page_is_short(page: str) -> None:
    assert len(page.split()) <= MOST_WORDS


def test_every_result_file_has_a_place(page: str) -> None:
    results = Results(RESULTS)
    for table in TABLES.values():
        table(results)
    planning = (ROOT / "docs" / "PLANNING.md").read_text(encoding="utf-8")
    names = {path.name for path in RESULTS.iterdir()}
    assert results.used <= names
    assert {name for name in names - results.used if name not in page and name not in planning} == set()


def test_tables_replace_what_is_between_their_markers() -> None:
    page = "Before.\n\n<!--table:one-->\n\nold\n\n<!--end-->\n\nAfter.\n"
    filled = fill(page, {"one": "| a |\n| --- |\n| 1 |"})
    assert filled == "Before.\n\n<!--table:one-->\n\n| a |\n|---|\n| 1 |\n\n<!--end-->\n\nAfter.\n"
    assert fill(filled, {"one": "| a |\n| --- |\n| 1 |"}) == filled


@pytest.mark.parametrize("tables", [{}, {"one": "", "two": ""}])
def test_markers_without_a_table_and_tables_without_markers_are_refused(tables: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="one" if not tables else "two"):
        fill("<!--table:one-->\n<!--end-->\n", tables)


def test_empty_cells_are_a_space_wide() -> None:
    assert markdown(["a", "b"], [["", 1], ["", ""]]) == "| a | b |\n|---|---|\n| | 1 |\n| | |"


def test_used_files_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"figure": 1}), encoding="utf-8")
    results = Results(tmp_path)
    assert results.read("one.json") == {"figure": 1}
    assert results.folder_of("two.json") == tmp_path
    assert results.used == {"one.json", "two.json"}
