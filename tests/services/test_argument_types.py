"""Parsers of arguments: accepted and refused values."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from services import argument_types


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (argument_types.above_zero(int), "3", 3),
        (argument_types.share, "0.25", 0.25),
        (argument_types.share, "1", 1.0),
        (argument_types.not_below_zero, "0", 0.0),
        (argument_types.seed, "0", 0),
        (argument_types.temperature_list, "0,0.7,0", (0.0, 0.7)),
        (argument_types.temperature_list, "2", (2.0,)),
        (argument_types.stream_counts, "16,1,256,16", (1, 16, 256)),
        (argument_types.depth_or_auto, "auto", "auto"),
        (argument_types.depth_or_auto, "4", 4),
        (argument_types.name_and_value, "a=b=c", ("a", "b=c")),
    ],
)
def test_a_value_is_parsed(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (argument_types.above_zero(int, 8), "9"),
        (argument_types.above_zero(float), "inf"),
        (argument_types.above_zero(float), "nan"),
        (argument_types.share, "1.01"),
        (argument_types.share, "nan"),
        (argument_types.not_below_zero, "-1"),
        (argument_types.not_below_zero, "inf"),
        (argument_types.seed, "1.5"),
        (argument_types.seed, "-2"),
        (argument_types.seed, str(2**63)),
        (argument_types.temperature_list, "0,2.1"),
        (argument_types.temperature_list, "hot"),
        (argument_types.temperature_list, "nan"),
        (argument_types.stream_counts, "0"),
        (argument_types.stream_counts, "257"),
        (argument_types.stream_counts, "many"),
        (argument_types.depth_or_auto, "deep"),
        (argument_types.depth_or_auto, "-1"),
        (argument_types.name_and_value, "name"),
        (argument_types.name_and_value, "name="),
        (argument_types.name_and_value, "=value"),
    ],
)
def test_a_refusal_quotes_the_text(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        parse(text)
    assert repr(text) in str(raised.value)
