"""Columns of messages that hold the values of several entries, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def split(values: Sequence[T], lengths: Sequence[int]) -> Iterator[Sequence[T]]:
    """Yields the entries of a flattened column. Raises ValueError if `lengths` do not add up to `len(values)`."""
    if sum(lengths) != len(values):
        raise ValueError(f"lengths add up to {sum(lengths)} but there are {len(values)} values")
    start = 0
    for length in lengths:
        end = start + length
        yield values[start:end]
        start = end
