"""The engine's logits against those of `transformers`, however the work is cut into steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.loader import load_model
from cluster.engine.runner import ModelRunner

from .tokens import random_tokens

BLOCK_SIZE = 4
NUM_BLOCKS = 64
TOLERANCE = 1e-4

Reference = Callable[[list[int]], torch.Tensor]


def logits_of_transformers(folder: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def reference(token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return logits

    return reference


@pytest.fixture(scope="module")
def reference(tiny_llama: Callable[..., Path]) -> Reference:
    return logits_of_transformers(tiny_llama())


@pytest.fixture
def runner(new_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return new_runner(BLOCK_SIZE, NUM_BLOCKS)


def scattered_tables(seed: int, *lengths: int) -> list[list[int]]:
    """Block tables for sequences of `lengths` tokens, in no order, from all over the cache."""
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[blocks.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE, atol=TOLERANCE)


class TestWholePrompt:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"tied": True},
            {"dtype": torch.bfloat16},
            {"num_key_value_heads": 4, "head_dim": 16},
            {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            {"max_shard_size": "100KB"},
        ],
        ids=["untied", "tied", "saved in bfloat16", "no grouping", "one kv head, other theta", "sharded"],
    )
    def test_equals_transformers(
        self, options: dict[str, object], new_runner: Callable[..., ModelRunner], tiny_llama: Callable[..., Path]
    ) -> None:
        tokens = random_tokens(1, 37)
        (table,) = scattered_tables(1, 37)
        logits = new_runner(BLOCK_SIZE, NUM_BLOCKS, **options).run([Segment(tokens, 0, table, num_logits=37)])
        assert_close(logits, logits_of_transformers(tiny_llama(**options))(tokens))

    def test_up_to_the_models_longest_sequence(self, runner: ModelRunner, reference: Reference) -> None:
        tokens = random_tokens(2, 256)
        logits = runner.run([Segment(tokens, 0, list(range(NUM_BLOCKS)), num_logits=2)])
        assert_close(logits, reference(tokens)[-2:])

    @pytest.mark.parametrize("num_logits", [0, 1, 5])
    def test_gives_the_logits_of_the_last_rows_that_are_wanted(
        self, num_logits: int, runner: ModelRunner, reference: Reference
    ) -> None:
        tokens = random_tokens(3, 9)
        logits = runner.run([Segment(tokens, 0, [3, 1, 2], num_logits)])
        assert logits.shape == (num_logits, 512)
        assert_close(logits, reference(tokens)[9 - num_logits :])


class TestSteps:
    @pytest.mark.parametrize("chunks", [[1] * 23, [5, 1, 7, 10], [22, 1], [4, 4, 4, 4, 4, 3], [3, 20]])
    def test_chunks_of_a_prompt_equal_the_whole(
        self, chunks: list[int], runner: ModelRunner, reference: Reference
    ) -> None:
        tokens = random_tokens(4, sum(chunks))
        (table,) = scattered_tables(4, len(tokens))
        rows, start = [], 0
        for chunk in chunks:
            rows.append(runner.run([Segment(tokens[start : start + chunk], start, table, num_logits=chunk)]))
            start += chunk
        assert_close(torch.cat(rows), reference(tokens))

    def test_sequences_packed_in_one_step_do_not_see_each_other(
        self, runner: ModelRunner, reference: Reference
    ) -> None:
        """A prefill, the middle of another, a decode, a verify segment and a chunk without logits, in two orders."""
        prompts = [random_tokens(10 + index, length) for index, length in enumerate([12, 30, 17, 21, 8])]
        tables = scattered_tables(5, *(len(prompt) for prompt in prompts))
        computed, wanted = [0, 11, 16, 16, 0], [1, 0, 1, 5, 0]
        for prompt, table, num_tokens in zip(prompts, tables, computed, strict=True):
            if num_tokens:
                runner.run([Segment(prompt[:num_tokens], 0, table, num_logits=0)])
        for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
            segments = [Segment(prompts[i][computed[i] :], computed[i], tables[i], wanted[i]) for i in order]
            expected = [reference(prompts[i])[len(prompts[i]) - wanted[i] :] for i in order]
            assert_close(runner.run(segments), torch.cat(expected))

    def test_rejected_drafts_leave_no_trace(self, runner: ModelRunner, reference: Reference) -> None:
        """A wrong draft's KV is written over before it is read, within a block and across its border."""
        tokens = random_tokens(6, 24)
        speculative, plain = scattered_tables(6, 30, 30)
        runner.run([Segment(tokens[:10], 0, speculative, num_logits=0)])
        # Round 1: two of five drafts are right. Round 2: none is. Round 3: all are.
        drafts = {10: [*tokens[11:13], 500, 501, 502], 13: [400, 401, 402, 403], 14: tokens[15:19]}
        for start, draft in drafts.items():
            logits = runner.run([Segment([tokens[start], *draft], start, speculative, num_logits=len(draft) + 1)])
            assert_close(logits, reference([*tokens[: start + 1], *draft])[start:])
        rest = runner.run([Segment(tokens[19:], 19, speculative, num_logits=5)])
        runner.run([Segment(tokens[:19], 0, plain, num_logits=0)])
        never_drafted = runner.run([Segment(tokens[19:], 19, plain, num_logits=5)])
        assert_close(rest, never_drafted)
        assert_close(rest, reference(tokens)[19:])

    def test_a_block_can_change_its_owner(self, runner: ModelRunner, reference: Reference) -> None:
        first, second = random_tokens(7, 16), random_tokens(8, 9)
        runner.run([Segment(first, 0, [5, 9, 2, 7], num_logits=0)])
        logits = runner.run([Segment(second, 0, [9, 7, 5], num_logits=9)])
        assert_close(logits, reference(second))


def test_bfloat16_is_near(tiny_llama: Callable[..., Path], reference: Reference) -> None:
    """The likeliest token of float32 is among the likeliest of bfloat16."""
    loaded = load_model(tiny_llama(), torch.bfloat16, torch.device("cpu"))
    tokens = random_tokens(9, 20)
    logits = ModelRunner(loaded, BLOCK_SIZE, NUM_BLOCKS).run([Segment(tokens, 0, list(range(5)), num_logits=20)])
    assert logits.dtype == torch.float32
    likeliest = reference(tokens).argmax(-1, keepdim=True)
    assert (logits.topk(5, dim=-1).indices == likeliest).any(-1).all()
