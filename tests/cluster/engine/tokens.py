"""Tokens to run a tiny model on."""

from __future__ import annotations

import random


def random_tokens(seed: int, length: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(512) for _ in range(length)]
