"""Bookkeeping of the drafts that the model runner makes itself, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.vllm.core.device_rounds import DeviceRounds
from cluster.vllm.coupling import Coupling

MAX_DEPTH = 4


def request(name: str, asked: int | None = None) -> Any:
    coupling = Coupling(SamplingParams(temperature=0.0), NoiseKey(1, 2), 1, asked)
    params = SimpleNamespace(extra_args=coupling.to_extra_args(), structured_outputs=None)
    return SimpleNamespace(request_id=name, sampling_params=params)


def tried() -> DeviceRounds:
    rounds = DeviceRounds(MAX_DEPTH, initial_depth=3, is_fixed=True)
    rounds.tried()
    return rounds


def test_a_sequence_verifies_at_most_the_drafts_of_its_last_step() -> None:
    rounds, own, other = tried(), request("a"), request("b", asked=1)
    assert rounds.next_depth([own, other]) == 3
    assert rounds.plan([own], []) == {}
    rounds.ran([own, other], 2)
    assert rounds.plan([own, other], []) == {"a": 2, "b": 1}


def test_nothing_is_drafted_where_only_sequences_run_that_lack_a_step() -> None:
    rounds, without, own = tried(), request("a"), request("b")
    assert rounds.next_depth([without]) == 3
    rounds.ran([without], 0)
    assert rounds.plan([without], []) == {}
    assert rounds.next_depth([without]) == 0
    assert rounds.next_depth([without, own]) == 3
    rounds.ran([without, own], 3)
    assert rounds.plan([without, own], []) == {"a": 0, "b": 3}


def test_a_request_counts_from_the_step_that_first_has_it() -> None:
    """vLLM may admit one from further back in its queue than `next_depth` was asked about."""
    rounds, first, second = tried(), request("a"), request("b")
    rounds.ran([first], 3)
    assert rounds.plan([first], []) == {"a": 3}
    rounds.ran([second], 0)
    rounds.ran([second], 3)
    assert rounds.plan([second], []) == {}
