"""Options of the planner run as clusters in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.placed import Placed
from cluster.planning.options import HEAD, PLAIN, main_options
from cluster.planning.prediction import ExpectedLoad, plan
from tests.cluster.planning.test_planner import request

_LOAD = ExpectedLoad(4, prompt_tokens=200, answer_tokens=32)


def test_each_option_answers_with_the_depth_that_is_set() -> None:
    found = {option.name: option for option in main_options(request(head_acceptance=(0.9, 0.8)))}
    plain = Placed(found[PLAIN], _LOAD, fixed_k=0).run(20)
    assert plain.mean_k == 0.0
    for name in (HEAD, "pool, 0.5 ms away, one pass", "n-gram"):
        drafted = Placed(found[name], _LOAD, fixed_k=2).run(20)
        assert drafted.num_answers >= 20
        assert 1.0 < drafted.mean_k <= 2.0
        assert drafted.requests_per_second > 0.9 * plain.requests_per_second


def test_cached_tokens_are_not_computed_again() -> None:
    option = next(option for option in main_options(request()) if option.name == PLAIN)
    load = replace(_LOAD, prompt_tokens=2000)
    whole, cached = (Placed(option, replace(load, cached_tokens=tokens), fixed_k=0).run(20) for tokens in (0, 1600))
    assert cached.first_token_p99 < whole.first_token_p99
    planned = plan(option, replace(load, cached_tokens=1600)).tokens_per_second / load.answer_tokens
    assert cached.requests_per_second == pytest.approx(planned, rel=0.2)
