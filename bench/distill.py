"""Measures the gain from distilling on traffic: `python -m bench.distill`.

The traffic is 2,000 prompts of a style that the bundled draft has hardly seen, SQL of an invented shop. They go through
`outrider distill`, which holds out one prompt in ten and reports acceptance on these before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe_machine
from services.cli import main as outrider

_TABLES = {
    "orders": ("id", "customer_id", "placed_at", "total", "status"),
    "customers": ("id", "name", "city", "country", "joined_at"),
    "items": ("order_id", "product_id", "quantity", "price"),
    "products": ("id", "title", "category", "weight", "price"),
    "shipments": ("order_id", "carrier", "sent_at", "arrived_at"),
}
_CONDITIONS = ("> {}", "< {}", "= {}", "BETWEEN {} AND {}", "IS NOT NULL", "IN ({}, {})")
_QUESTIONS = ("how many", "which", "the average of", "the newest", "the ten largest", "every", "per month, the sum of")


def prompts(count: int, seed: int) -> list[str]:
    """Returns `count` different prompts."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        table = rng.choice(list(_TABLES))
        columns = _TABLES[table]
        shown = ", ".join(rng.sample(columns, rng.randint(1, 3)))
        condition = rng.choice(_CONDITIONS).format(rng.randint(1, 999), rng.randint(1000, 9999))
        lines = [
            f"-- {rng.choice(_QUESTIONS)} {rng.choice(columns)} of {table}",
            f"SELECT {shown}",
            f"FROM {table}",
            f"WHERE {rng.choice(columns)} {condition}",
        ]
        if rng.random() < 0.5:
            lines.append(f"ORDER BY {rng.choice(columns)} {rng.choice(('ASC', 'DESC'))}")
        found["\n".join(lines[: rng.randint(2, len(lines))]) + "\n"] = None
    return list(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.distill", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--target", default="outrider-target-12m")
    parser.add_argument("--draft", default="outrider-draft-2m")
    parser.add_argument("--epochs", default="6")
    parser.add_argument("--learning-rate", default="1e-3")
    parser.add_argument("--folder", type=Path, help="for answers and draft: answers of before are used (default: none)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/distill.json"))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        traffic = folder / "traffic.jsonl"
        lines = (json.dumps({"prompt": prompt}) for prompt in prompts(arguments.prompts, seed=7))
        traffic.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        models = ["--target", arguments.target, "--draft", arguments.draft]
        training = ["--epochs", arguments.epochs, "--learning-rate", arguments.learning_rate]
        code = outrider(["distill", "--traffic", str(traffic), *models, "--out", str(folder), *training])
        if code:
            return code
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": describe_machine(), "num_prompts": arguments.prompts, **report}
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
