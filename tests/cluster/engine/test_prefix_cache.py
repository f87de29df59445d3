"""A prefix that is read from the cache gives the logits that computing it would have given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.runner import ModelRunner

from .tokens import random_tokens

BLOCK_SIZE = 4
NewRunner = Callable[..., ModelRunner]


def run_sequence(
    runner: ModelRunner, token_ids: list[int], num_logits: int, chunk: int = 10**6
) -> tuple[torch.Tensor, int]:
    """The last `num_logits` logits of a sequence that comes, is computed in chunks, and goes; how much was cached."""
    blocks = runner.blocks
    allocated = blocks.allocate_for(token_ids, len(token_ids))
    assert allocated is not None
    table, num_cached = allocated
    rows = []
    for start in range(num_cached, len(token_ids), chunk):
        end = min(start + chunk, len(token_ids))
        rows.append(runner.run([Segment(token_ids[start:end], start, table, num_logits=end - start)]))
        blocks.cache(table, token_ids, end)
    blocks.free(table)
    return torch.cat(rows)[-num_logits:], num_cached


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if has_kernels():
        assert torch.equal(actual, expected), "not the same to the bit"
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_common", [4, 8, 23, 24, 40])
def test_a_hit_gives_the_same_logits(num_common: int, new_runner: NewRunner) -> None:
    common = random_tokens(1, num_common)
    first, second = common + random_tokens(2, 9), common + random_tokens(3, 6)
    runner = new_runner(BLOCK_SIZE, 64)
    run_sequence(runner, first, 1)
    logits, num_cached = run_sequence(runner, second, 6)
    assert num_cached == num_common // BLOCK_SIZE * BLOCK_SIZE
    expected, nothing = run_sequence(new_runner(BLOCK_SIZE, 64), second, 6, chunk=5)
    assert nothing == 0
    assert_same(logits, expected)


def test_the_same_prompt_again_computes_its_end_alone(new_runner: NewRunner) -> None:
    runner, prompt = new_runner(BLOCK_SIZE, 64), random_tokens(4, 32)
    first, _ = run_sequence(runner, prompt, 1)
    again, num_cached = run_sequence(runner, prompt, 1)
    assert num_cached == 28
    assert_same(again, first)


def test_after_eviction_it_is_computed_and_found_again(new_runner: NewRunner) -> None:
    runner, prompt, other = new_runner(BLOCK_SIZE, 12), random_tokens(5, 40), random_tokens(6, 48)
    first, _ = run_sequence(runner, prompt, 1)
    _, nothing = run_sequence(runner, other, 1)  # takes every block
    assert nothing == 0
    after, num_cached = run_sequence(runner, prompt, 1)
    assert num_cached == 0
    assert_same(after, first)
    again, num_cached = run_sequence(runner, prompt, 1)
    assert num_cached == 36
    assert_same(again, first)


def test_rejected_drafts_do_not_get_into_it(new_runner: NewRunner) -> None:
    """A block that held drafts is known by the tokens that were committed in their place."""
    runner, tokens = new_runner(BLOCK_SIZE, 64), random_tokens(7, 16)
    allocated = runner.blocks.allocate_for(tokens[:6], 16)
    assert allocated is not None
    table, _ = allocated
    runner.run([Segment([*tokens[:6], 500, 501, 502, 503, 504], 0, table, num_logits=0)])
    runner.blocks.cache(table, tokens[:7], 6)
    runner.run([Segment(tokens[6:], 6, table, num_logits=0)])
    runner.blocks.cache(table, tokens, 16)
    runner.blocks.free(table)
    drafted = [*tokens[:6], 500, 501, 502]
    _, num_cached = run_sequence(runner, drafted, 1)
    assert num_cached == 4
    logits, num_cached = run_sequence(runner, [*tokens, 9], 1)
    assert num_cached == 16
    expected, _ = run_sequence(new_runner(BLOCK_SIZE, 64), [*tokens, 9], 1)
    assert_same(logits, expected)
