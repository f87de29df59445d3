"""Drafts that the runner makes on its device change no token, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from bench.workload import held_out_prompts
from cluster.model_folder import resolve_model_folder
from cluster.speculation.tuning import TRIAL_DEPTHS
from tests.soak import only_in_soak

from .scheduled_engine import run_program
from .test_bound_steps import ENGINE, NUM_CASES
from .test_exactness import SAMPLING

METHODS = {
    "draft model": {"method": "draft_model", "model": str(resolve_model_folder("outrider-draft-2m"))},
    "eagle": {"method": "eagle", "model": str(resolve_model_folder("outrider-eagle-12m"))},
}
# Both methods share the code that chooses depths. Only a draft model has recorded steps, which are padded.
WAYS = {
    "draft model": ("without drafts", "of one depth", "tried", "chosen", "aborted", "padded"),
    "eagle": ("without drafts", "of one depth", "of several depths", "tried", "aborted", "chosen"),
}
MAX_DRAFTS = 4
pytestmark = only_in_soak  # the interpreter takes minutes


# `cluster/vllm/test_eagle.py` has EAGLE on the processor.
@pytest.fixture(scope="module", params=tuple(METHODS))
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Output of the program for each way to ask for drafts."""
    lengths = (1, 31, 33, 60)
    cases = [
        {"prompt": prompt[: lengths[index % len(lengths)]], "fields": SAMPLING[index % len(SAMPLING)]}
        for index, prompt in enumerate(held_out_prompts(NUM_CASES, seed=3))
    ]
    own = {
        "speculative_config": METHODS[request.param] | {"num_speculative_tokens": MAX_DRAFTS},
        "tensor_parallel_size": 1,  # the bundled draft has three heads
    }
    asked = {"engine": ENGINE | own, "cases": cases, "ways": WAYS[request.param]}
    return run_program("device_drafts_program", asked, tmp_path_factory.mktemp("plugin"))


def test_drafts_change_no_token(told: dict[str, dict[str, Any]]) -> None:
    assert {way: line["different"] for way, line in told.items()} == {way: [] for way in told}
    assert {line["num_answers"] for way, line in told.items() if way != "aborted"} == {NUM_CASES}


def test_requests_were_aborted(told: dict[str, dict[str, Any]]) -> None:
    assert "aborted" not in told or 0 < told["aborted"]["num_answers"] < NUM_CASES


def test_drafts_are_accepted_where_the_target_draws(told: dict[str, dict[str, Any]]) -> None:
    assert told["without drafts"]["drafted"] == 0
    assert told["of one depth"]["accepted"] > 0.2 * told["of one depth"]["drafted"] > 0


def test_depth_changes_between_steps(told: dict[str, dict[str, Any]]) -> None:
    assert told["without drafts"]["depths"] == [0]
    assert "tried" not in told or told["tried"]["depths"] == sorted({min(depth, MAX_DRAFTS) for depth in TRIAL_DEPTHS})
    assert told["chosen"]["drafted"] > 0


def test_sequences_were_preempted(told: dict[str, dict[str, Any]]) -> None:
    assert told["of one depth"]["preemptions"] > 0
