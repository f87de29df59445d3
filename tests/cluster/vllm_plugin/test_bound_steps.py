"""A step that is submitted before its drafts are known commits the same tokens: over two ranks, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from bench.workload import held_out_prompts
from cluster.model_folder import resolve_model_folder
from tests.soak import length, only_in_soak

from .scheduled_engine import run_program
from .test_exactness import SAMPLING

NUM_CASES = 8
ENGINE = {
    "model": str(resolve_model_folder("outrider-target-12m")),
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 6,  # so that requests wait, and join those that decode
    "max_num_batched_tokens": 64,  # so that prompts come in chunks
    "block_size": 32,
    "num_gpu_blocks_override": 10,  # so that sequences are preempted
    "kv_cache_memory_bytes": 64 * 2**20,
    "gpu_memory_utilization": 0.05,
    "enable_prefix_caching": False,
    "tensor_parallel_size": 2,
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Output of the program for each way to draft."""
    lengths = (1, 31, 33, 60)
    cases = [
        {"prompt": prompt[: lengths[index % len(lengths)]], "fields": SAMPLING[index % len(SAMPLING)]}
        for index, prompt in enumerate(held_out_prompts(NUM_CASES, seed=3))
    ]
    return run_program("bound_steps_program", {"engine": ENGINE, "cases": cases}, tmp_path_factory.mktemp("plugin"))


@pytest.mark.parametrize("way", ["good", "missing", "late", *length((), ("random", "too few"))])
def test_drafts_change_no_token(told: dict[str, dict[str, Any]], way: str) -> None:
    assert told[way]["num_answers"] == NUM_CASES
    assert told[way]["different"] == []


@only_in_soak
def test_requests_that_are_aborted_change_no_other(told: dict[str, dict[str, Any]]) -> None:
    assert 0 < told["aborted"]["num_answers"] < NUM_CASES
    assert told["aborted"]["different"] == []


def test_drafts_are_verified_and_counted(told: dict[str, dict[str, Any]]) -> None:
    assert told["without drafts"]["drafted"] == told["missing"]["drafted"] == 0
    assert told["good"]["accepted"] > 0.4 * told["good"]["drafted"] > 0
    assert "random" not in told or told["random"]["accepted"] < 0.1 * told["random"]["drafted"]


def test_a_gate_that_stays_closed_is_opened(told: dict[str, dict[str, Any]]) -> None:
    assert told["late"]["without_drafts"] > told["missing"]["without_drafts"]


def test_sequences_were_preempted(told: dict[str, dict[str, Any]]) -> None:
    assert told["good"]["preemptions"] > 0
