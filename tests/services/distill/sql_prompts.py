"""Prompts of a style that the bundled draft has hardly seen: SQL of an invented shop."""

from __future__ import annotations

import random

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
