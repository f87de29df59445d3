"""Writes the tables of docs/MEASURED.md from the result files, or checks that the page has them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.report import cluster, drafting, gpu, operation, pool
from bench.report.page import Results, fill

PAGE = Path("docs/MEASURED.md")
RESULTS = Path("bench/results")

TABLES: dict[str, Callable[[Results], str]] = {
    **cluster.TABLES,
    **gpu.TABLES,
    **pool.TABLES,
    **drafting.TABLES,
    **operation.TABLES,
}


def written(page: str, results: Results) -> str:
    """Returns the text of the page with its tables made from `results`."""
    return fill(page, {name: table(results) for name, table in TABLES.items()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    arguments = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    new = written(page, Results(RESULTS))
    if arguments.check:
        if new != page:
            print(f"{PAGE} is out of date: run python -m bench.report", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
