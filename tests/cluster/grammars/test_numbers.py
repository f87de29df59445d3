"""The expressions of numbers within bounds match these numbers, and no others."""

from __future__ import annotations

import random
import re
from fractions import Fraction

from cluster.grammars.numbers import integers, numbers

NUM_RANGES = 100


def test_integers() -> None:
    rng = random.Random(1)
    for _ in range(NUM_RANGES):
        low, high = sorted(rng.randint(-2000, 2000) for _ in range(2))
        expression = re.compile(integers(low, high))
        for value in (low - 1, low, high, high + 1, *(rng.randint(-2100, 2100) for _ in range(200))):
            assert bool(expression.fullmatch(str(value))) == (low <= value <= high), (low, value, high)


def test_numbers() -> None:
    rng = random.Random(1)
    for _ in range(NUM_RANGES):
        low, high = sorted(round(rng.uniform(-20, 20), rng.randint(0, 4)) for _ in range(2))
        lower, upper = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
        if high - low < 1e-5:
            continue
        expression = re.compile(numbers({lower: low, upper: high}))
        for _ in range(200):
            near = rng.choice((low, high, rng.uniform(-21, 21))) + rng.choice((0, 1e-6, -1e-6))
            text = f"{near:.{rng.randint(0, 6)}f}"
            value, bounds = Fraction(text), (Fraction(str(low)), Fraction(str(high)))
            is_inside = bounds[0] <= value <= bounds[1] and not (
                (lower == "exclusiveMinimum" and value == bounds[0])
                or (upper == "exclusiveMaximum" and value == bounds[1])
            )
            if text.startswith("-") and not value:
                continue  # a negative zero may be left out
            assert bool(expression.fullmatch(text)) == is_inside, (lower, low, upper, high, text)
