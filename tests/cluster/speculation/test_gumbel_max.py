"""The kernel's choices are those of the definition: the argmax of `perturbed_logits`, which computes all the noise."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from cluster.speculation.gumbel_max import MAX_WIDTH, has_kernel
from cluster.speculation.noise import NoiseKey, noise_words
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest, perturbed_logits

from .logits import random_logits

pytestmark = pytest.mark.skipif(not has_kernel(), reason="the kernel was not built")

SAMPLER = Sampler(torch.device("cpu"))
TEMPERATURES = [0.0, 2e-5, 0.1, 0.7, 1.0, 1.3, 50.0, 1e6]
# Around the widths of a counter (8), of a vector (16), and of what is computed at a time (128).
VOCAB_SIZES = [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096, 32003]
# Shaped by more than the temperature.
SHAPING = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"logit_bias": ((0, 50.0), (3, -50.0))},
]


def request_at(position: int, params: SamplingParams, key: NoiseKey, num_rows: int = 1) -> SampleRequest:
    """Draws at `position` and after. A range has a length without having its tokens in memory."""
    return SampleRequest(params, key, range(position + num_rows - 1), 1, num_rows)


def random_requests(seed: int, num_rows: int, params: list[SamplingParams]) -> list[SampleRequest]:
    rng = random.Random(seed)
    keys = [NoiseKey(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(num_rows)]
    return [request_at(rng.randrange(1, 5000), rng.choice(params), key) for key in keys]


def assert_chosen_as_defined(logits: torch.Tensor, requests: list[SampleRequest]) -> None:
    before = logits.clone()
    scores = perturbed_logits(logits, requests)
    assert SAMPLER.sample(logits, requests) == scores.argmax(dim=-1).tolist()
    for width in {1, 2, 4, MAX_WIDTH}:
        if width > logits.shape[-1]:
            continue
        ids, best = SAMPLER.best_tokens(logits, requests, width)
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(best, ordered[:, :width])
        has_score = best > -math.inf
        assert torch.equal(ids[has_score], order[:, :width][has_score])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0, 1e4])
def test_at_every_temperature(vocab_size: int, scale: float) -> None:
    """A scale of 0 leaves the choice to the noise; at 1e4 float32 cannot tell most of the noise."""
    params = [SamplingParams(temperature=temperature) for temperature in TEMPERATURES]
    logits = random_logits(vocab_size, 48, vocab_size, scale)
    assert_chosen_as_defined(logits, random_requests(vocab_size, 48, params))


def test_over_many_keys_and_positions() -> None:
    for seed in range(40):
        logits = random_logits(seed, 64, 1500)
        assert_chosen_as_defined(logits, random_requests(seed, 64, [SamplingParams(), SamplingParams(temperature=0.6)]))


@pytest.mark.parametrize("position", [1, 2**31 - 1, 2**32 - 2, 2**32 + 5, 2**53 + 1, 2**62])
def test_at_large_positions_and_across_the_rows_of_a_run(position: int) -> None:
    requests = [request_at(position, SamplingParams(), NoiseKey(2**64 - 1 - i, 2**63 + i), 4) for i in range(3)]
    assert_chosen_as_defined(random_logits(4, 12, 777), requests)


def test_shaped_rows_lie_among_others() -> None:
    plain = [SamplingParams(temperature=temperature) for temperature in TEMPERATURES]
    shaped = [replace(params, **kind) for params in plain for kind in SHAPING]  # type: ignore[arg-type]
    rng = random.Random(3)
    for seed in range(10):
        requests = []
        for index in range(24):
            tokens, num_rows = [rng.randrange(300) for _ in range(12)], rng.randint(1, 4)
            params = rng.choice(shaped if rng.random() < 0.5 else plain)
            num_drafts = rng.randint(0, num_rows - 1)
            committed, drafts = tokens[: 12 - num_drafts], tokens[12 - num_drafts :]
            requests.append(SampleRequest(params, NoiseKey.derive(seed, index), committed, 5, num_rows, drafts))
        assert_chosen_as_defined(random_logits(seed, sum(r.num_rows for r in requests), 300), requests)


def test_minus_infinity_is_never_chosen_while_anything_else_is_there() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(temperature=0.0)]
    logits = random_logits(6, 60, 500)
    for row, left in enumerate([1, 2, 3, 15, 200] * 12):
        gone = torch.randperm(500, generator=torch.Generator().manual_seed(row))[left:]
        logits[row, gone] = -math.inf
    assert_chosen_as_defined(logits, random_requests(6, 60, params))


def test_without_any_token_the_choice_is_the_first() -> None:
    logits = torch.full((2, 100), -math.inf)
    assert SAMPLER.sample(
        logits, [request_at(9, p, NoiseKey(1, 2)) for p in (SamplingParams(), SamplingParams(0.0))]
    ) == [0, 0]


@pytest.mark.parametrize("vocab_size", [20, 100, 4096])
def test_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    """At 1e9 float32 rounds all noise away; two values leave many equals for greedy rows."""
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, 1.0)]
    high = (random_logits(2, 32, vocab_size) > 0.5).float()
    for logits in (high, 1e9 * high, torch.full((32, vocab_size), 1e9), torch.zeros(32, vocab_size)):
        assert_chosen_as_defined(logits, random_requests(vocab_size, 32, params))


@pytest.mark.parametrize("magnitude", [2.0**20, 2.0**23, 2.0**26, 2.0**27, 2.0**28])
def test_where_float32_rounds_much_of_the_noise_away(magnitude: float) -> None:
    """Scores next to each other in float32, on both sides of a power of 2, where their distance changes."""
    logits = torch.full((64, 400), -magnitude)
    for row in range(64):
        steps = torch.randint(-6, 2, (400,), generator=torch.Generator().manual_seed(row))
        logits[row] += steps * magnitude * 2.0**-24
    assert_chosen_as_defined(logits, random_requests(8, 64, [SamplingParams()]))
    assert_chosen_as_defined(-logits, random_requests(9, 64, [SamplingParams()]))


def test_infinite_and_huge_logits() -> None:
    logits = random_logits(1, 16, 200)
    logits[:, 50] = logits[:, 120] = math.inf
    logits[8:] = 3e38 * torch.sign(random_logits(2, 8, 200))
    assert_chosen_as_defined(logits, random_requests(1, 16, [SamplingParams(), SamplingParams(temperature=0.1)]))


def test_more_tokens_than_the_kernel_gives_continue_its_order() -> None:
    logits, requests = random_logits(7, 5, 600), random_requests(7, 5, [SamplingParams()])
    ids, scores = SAMPLER.best_tokens(logits, requests, MAX_WIDTH)
    more_ids, more_scores = SAMPLER.best_tokens(logits, requests, MAX_WIDTH + 1)
    assert torch.equal(more_ids[:, :-1], ids)
    assert torch.equal(more_scores[:, :-1], scores)


def test_a_sampler_made_without_the_kernel_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.speculation.sampling.has_kernel", lambda: False)
    without = Sampler(torch.device("cpu"))
    logits, requests = random_logits(11, 40, 600), random_requests(11, 40, [SamplingParams(), SamplingParams(0.0)])
    assert without.sample(logits, requests) == SAMPLER.sample(logits, requests)
    assert without.best_choices(logits, requests, 4) == SAMPLER.best_choices(logits, requests, 4)


@pytest.mark.parametrize("logit", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_numbers_has_a_choice_all_the_same(logit: float) -> None:
    """A node that is given no child would be extended again and again."""
    choices = SAMPLER.best_choices(torch.full((1, 600), logit), random_requests(1, 1, [SamplingParams()]), 4)
    assert len(choices[0][0]) == 1
    assert choices[0][1] == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    logits = random_logits(5, 8, 2 * 300).to(dtype)[:, ::2]
    assert_chosen_as_defined(logits, random_requests(5, 8, [SamplingParams()]))


def test_the_kernels_words_are_those_of_the_definition() -> None:
    """A logit so far above the others that its token wins, with a score that shows its noise."""
    key, vocab_size = NoiseKey.derive(12, 3), 200
    words = noise_words(key, 70, vocab_size)
    for token in range(vocab_size):
        logits = torch.full((1, vocab_size), -1e4)
        logits[0, token] = 0.0
        ids, scores = SAMPLER.best_tokens(logits, [request_at(70, SamplingParams(), key)], 1)
        assert ids.item() == token
        expected = -math.log(-math.log1p(-(int(words[token]) + 0.5) / 2**32))
        assert scores.item() == pytest.approx(expected, rel=1e-7, abs=1e-7)


def test_the_largest_noise_is_not_missed() -> None:
    """A token at the bottom whose word is among the smallest of a million still wins against what it beats."""
    key, vocab_size = NoiseKey.derive(5, 0), 2**20
    words = torch.from_numpy(noise_words(key, 3, vocab_size).astype("int64"))
    lucky = int(words.argmin())
    noise = -math.log(-math.log1p(-(int(words[lucky]) + 0.5) / 2**32))
    assert noise > 12
    for gap, wins in ((noise - 1e-3, True), (noise + 1e-3, False)):
        logits = torch.full((1, vocab_size), -math.inf)
        logits[0, lucky] = 0.0
        request = request_at(3, SamplingParams(), key)
        rival = (lucky + 999) % vocab_size
        rival_noise = -math.log(-math.log1p(-(int(words[rival]) + 0.5) / 2**32))
        logits[0, rival] = gap - rival_noise
        assert SAMPLER.sample(logits, [request]) == [lucky if wins else rival]
