from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from cluster.speculation.device_noise import signed_word
from cluster.speculation.filters import NO_TOP_P, filter_rows
from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest, noise_of_rows, perturbed_logits
from cluster.speculation.token_counts import TokenCounts

from .logits import random_logits
from .reference import shaped_logits, softmax

INF = math.inf
SAMPLER = Sampler(torch.device("cpu"))
KEY = NoiseKey.derive(1234, 0)
GREEDY = SamplingParams(temperature=0.0)

# One of everything, alone and together.
VARIED_PARAMS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.7, min_p=0.02),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=0.0, presence_penalty=0.8, frequency_penalty=0.4),
    SamplingParams(repetition_penalty=0.7, presence_penalty=-0.6, frequency_penalty=1.1, top_k=7),
    SamplingParams(temperature=0.0, logit_bias=((3, 4.0), (5, -100.0))),
    SamplingParams(
        temperature=0.6,
        top_k=30,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((0, 1.5), (9, -2.0)),
    ),
]


def shaped(
    logits: list[float], params: SamplingParams, prompt: tuple[int, ...] = (0,), generated: tuple[int, ...] = ()
) -> list[float]:
    """One row as the sampler shapes it, before noise."""
    request = SampleRequest(params, KEY, prompt + generated, len(prompt))
    row = perturbed_logits(torch.tensor([logits]), [request])[0].numpy().astype(np.float64)
    if not params.is_greedy:
        row -= gumbel_noise([(KEY, len(prompt) + len(generated))], len(logits))[0]
    return [float(value) for value in row]


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def keeps(logits: list[float], params: SamplingParams) -> list[int]:
    """The tokens that a filter leaves."""
    return [token for token, value in enumerate(shaped(logits, params)) if value > -INF]


class TestTables:
    @pytest.mark.parametrize(
        ("logits", "params", "expected"),
        [
            ([1, 2, 3], SamplingParams(), [1, 2, 3]),
            ([1, 2, 3], SamplingParams(temperature=0.5), [2, 4, 6]),
            ([1, -2, 3], SamplingParams(temperature=2.0), [0.5, -1, 1.5]),
            ([1, 2, 3], GREEDY, [1, 2, 3]),
            ([1, 2, 3], SamplingParams(temperature=9e-6), [1, 2, 3]),  # as good as 0
            ([1, 3, 2, 0], SamplingParams(top_k=2), [-INF, 3, 2, -INF]),
            ([1, 2, 3], SamplingParams(logit_bias=((2, -5.0), (0, 5.0))), [6, 2, -2]),
            ([1, 2, 3], SamplingParams(temperature=0.5, logit_bias=((0, 1.0),)), [4, 4, 6]),  # bias is not scaled alone
            ([1, 3, 2], SamplingParams(top_k=1, logit_bias=((0, 5.0),)), [6, -INF, -INF]),
        ],
    )
    def test_temperature_bias_and_their_order(
        self, logits: list[float], params: SamplingParams, expected: list[float]
    ) -> None:
        assert shaped(logits, params) == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize(
        ("logits", "params", "kept"),
        [
            ([3, 1, 2], SamplingParams(top_k=0), [0, 1, 2]),
            ([3, 1, 2], SamplingParams(top_k=1), [0]),
            ([3, 1, 2], SamplingParams(top_k=3), [0, 1, 2]),
            ([3, 1, 2], SamplingParams(top_k=100), [0, 1, 2]),
            ([2, 2, 2, 1], SamplingParams(top_k=2), [0, 1]),  # among equals the lowest IDs
            ([1, 2, 2, 2], SamplingParams(top_k=2), [1, 2]),
            (log(0.5, 0.25, 0.15, 0.1), SamplingParams(top_p=0.45), [0]),
            (log(0.5, 0.25, 0.15, 0.1), SamplingParams(top_p=0.55), [0, 1]),
            (log(0.1, 0.15, 0.25, 0.5), SamplingParams(top_p=0.76), [1, 2, 3]),
            (log(0.5, 0.25, 0.15, 0.1), SamplingParams(top_p=0.999), [0, 1, 2, 3]),
            (log(0.5, 0.25, 0.15, 0.1), SamplingParams(top_p=0.0), [0]),  # the likeliest always stays
            (log(0.3, 0.4, 0.3), SamplingParams(top_p=0.5), [0, 1]),  # among equals the lowest ID
            (log(0.5, 0.3, 0.15, 0.05), SamplingParams(min_p=0.5), [0, 1]),
            (log(0.5, 0.3, 0.15, 0.05), SamplingParams(min_p=0.2), [0, 1, 2]),
            (log(0.5, 0.3, 0.15, 0.05), SamplingParams(min_p=1.0), [0]),
            (log(0.4, 0.4, 0.2), SamplingParams(min_p=1.0), [0, 1]),  # none of the likeliest is under the bar
        ],
    )
    def test_each_filter(self, logits: list[float], params: SamplingParams, kept: list[int]) -> None:
        assert keeps(logits, params) == kept

    @pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
    @pytest.mark.parametrize(
        "filters", [{}, {"min_p": 0.05}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 1.0, "top_k": 2, "top_p": 0.1}]
    )
    def test_an_infinite_logit_wins(self, temperature: float, filters: dict[str, Any]) -> None:
        params = SamplingParams(temperature=temperature, repetition_penalty=1.2, presence_penalty=0.5, **filters)
        logits = torch.tensor([[1.0, INF, 50.0, -INF], [INF, 2.0, 3.0, 4.0]])
        assert SAMPLER.sample(logits, [SampleRequest(params, KEY, [1], 1, 2, [0])]) == [1, 0]

    def test_an_infinite_logit_that_is_not_allowed_does_not(self) -> None:
        logits, allowed = torch.tensor([[1.0, INF, 2.0, -5.0]]), torch.tensor([[0b1101]], dtype=torch.int32)
        for company in ([], [SampleRequest(GREEDY, KEY, [0], 1)]):
            request = SampleRequest(SamplingParams(top_k=1, min_p=0.1), KEY, [0], 1, allowed=allowed)
            rows = logits.expand(1 + len(company), -1).clone()
            assert SAMPLER.sample(rows, [request, *company])[0] == 2

    def test_among_many_equals_the_lowest_ids_stay(self) -> None:
        logits = [1.0] * 1000 + [2.0] + [1.0] * 3000
        assert keeps(logits, SamplingParams(top_k=601)) == [*range(600), 1000]
        assert keeps([1.0] * 4000, SamplingParams(top_p=0.2501)) == list(range(1001))

    @pytest.mark.parametrize(
        ("params", "kept"),
        [
            (SamplingParams(top_p=0.52), [0, 1]),
            (SamplingParams(top_p=0.52, top_k=2), [0]),  # of the two that are left the first has more than 0.52
            (SamplingParams(top_p=0.52, min_p=0.6), [0]),
            (SamplingParams(top_p=0.52, temperature=0.5), [0]),  # the mass is counted after temperature
            (SamplingParams(min_p=0.6, temperature=0.5), [0]),
            (SamplingParams(min_p=0.6, top_k=3), [0, 1]),
        ],
    )
    def test_filters_follow_one_another(self, params: SamplingParams, kept: list[int]) -> None:
        assert keeps(log(0.4, 0.3, 0.2, 0.1), params) == kept

    @pytest.mark.parametrize(
        ("logits", "params", "prompt", "generated", "expected"),
        [
            ([2, -2, 1, -1], SamplingParams(repetition_penalty=2.0), (0, 1), (), [1, -4, 1, -1]),
            ([2, -2, 1, -1], SamplingParams(repetition_penalty=2.0), (0,), (1, 2), [1, -4, 0.5, -1]),
            ([2, -2, 1, -1], SamplingParams(repetition_penalty=2.0), (0,), (0, 0), [1, -2, 1, -1]),  # counted once
            ([1, 1, 1, 1], SamplingParams(presence_penalty=0.5), (0,), (1, 1, 2), [1, 0.5, 0.5, 1]),
            ([1, 1, 1, 1], SamplingParams(frequency_penalty=0.5), (0,), (1, 1, 2), [1, 0, 0.5, 1]),
            ([1, 1, 1, 1], SamplingParams(presence_penalty=-0.5), (0,), (1,), [1, 1.5, 1, 1]),
            (
                [1, 1, 1, 1],
                SamplingParams(presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=2.0),
                (0,),
                (1, 1),
                [0.5, -0.75, 1, 1],  # repetition first
            ),
            ([1, -1, 1], SamplingParams(repetition_penalty=2.0, logit_bias=((1, 3.0),)), (1,), (), [1, 1, 1]),
            ([4, 1, 1], SamplingParams(temperature=2.0, presence_penalty=1.0), (1,), (0,), [1.5, 0.5, 0.5]),
        ],
    )
    @pytest.mark.parametrize("is_greedy", [False, True])
    def test_penalties(
        self,
        logits: list[float],
        params: SamplingParams,
        prompt: tuple[int, ...],
        generated: tuple[int, ...],
        expected: list[float],
        is_greedy: bool,
    ) -> None:
        if is_greedy:
            expected = [value * params.temperature for value in expected]
            params = replace(params, temperature=0.0)
        assert shaped(logits, params, prompt, generated) == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize(
        "params",
        [GREEDY, replace(GREEDY, top_k=1), replace(GREEDY, top_p=0.1), replace(GREEDY, min_p=0.9)],
    )
    @pytest.mark.parametrize(("logits", "choice"), [([1, 3, 2], 1), ([3, 3, 1], 0), ([1, 2, 2], 1), ([-5, -5, -5], 0)])
    def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(
        self, params: SamplingParams, logits: list[float], choice: int
    ) -> None:
        assert SAMPLER.sample(torch.tensor([logits]), [SampleRequest(params, KEY, [0], 1)]) == [choice]

    def test_the_callers_logits_are_left_alone(self) -> None:
        logits = torch.randn(1, 32)
        before = logits.clone()
        SAMPLER.sample(logits, [SampleRequest(VARIED_PARAMS[-1], KEY, [1, 2], 1)])
        assert torch.equal(logits, before)

    def test_logits_in_bfloat16_are_shaped_in_float32(self) -> None:
        logits = torch.randn(1, 32).to(torch.bfloat16)
        requests = [SampleRequest(SamplingParams(temperature=0.7), KEY, [1], 1)]
        assert torch.equal(perturbed_logits(logits, requests), perturbed_logits(logits.float(), requests))


def random_tokens(seed: int, length: int, vocab_size: int) -> list[int]:
    """Few different tokens, so that many occur several times."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, min(vocab_size, 12), size=length).tolist()
    return tokens


class TestAgainstTheReference:
    @pytest.mark.parametrize("params", VARIED_PARAMS, ids=str)
    @pytest.mark.parametrize("vocab_size", [12, 257])
    def test_a_row_is_shaped_and_chosen_as_the_reference_does(self, params: SamplingParams, vocab_size: int) -> None:
        params = replace(params, top_k=min(params.top_k, vocab_size))
        for seed in range(8):
            logits = random_logits(seed, 1, vocab_size)
            tokens = random_tokens(seed, 3 + seed, vocab_size)
            num_prompt = 1 + seed % len(tokens)
            request = SampleRequest(params, NoiseKey.derive(seed, 0), tokens, num_prompt)
            expected = shaped_logits(logits[0].numpy(), params, tokens, num_prompt)
            if not params.is_greedy:
                expected = expected + gumbel_noise([(request.noise_key, len(tokens))], vocab_size)[0]
            np.testing.assert_allclose(perturbed_logits(logits, [request])[0], expected, rtol=1e-5, atol=1e-5)
            assert SAMPLER.sample(logits, [request]) == [int(expected.argmax())]

    @pytest.mark.parametrize("params", VARIED_PARAMS, ids=str)
    @pytest.mark.parametrize("num_rows", [2, 6])
    def test_a_verify_segment_equals_single_rows_with_growing_prefixes(
        self, params: SamplingParams, num_rows: int
    ) -> None:
        logits = random_logits(5, num_rows, 64)
        tokens, num_prompt = random_tokens(9, 14, 64), 5
        together = perturbed_logits(logits, [SampleRequest(params, KEY, tokens, num_prompt, num_rows)])
        for row in range(num_rows):
            prefix = tokens[: len(tokens) - num_rows + 1 + row]
            alone = perturbed_logits(logits[row : row + 1], [SampleRequest(params, KEY, prefix, num_prompt)])
            assert torch.equal(together[row], alone[0])

    def test_a_verify_segment_right_after_the_prompt(self) -> None:
        """No token is generated yet, and the drafts of the segment are."""
        params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
        request = SampleRequest(params, KEY, [1, 1, 2, 2, 3], num_prompt_tokens=2, num_rows=4)
        penalties = -perturbed_logits(torch.zeros(4, 4), [request])
        assert penalties.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 2, 1]]

    @pytest.mark.parametrize("params", [params for params in VARIED_PARAMS if params.has_penalty], ids=str)
    @pytest.mark.parametrize("num_prompt", [1, 4, 9])
    def test_counts_that_are_kept_say_what_all_tokens_say(self, params: SamplingParams, num_prompt: int) -> None:
        """Over rounds, of chains of every length, of drafts that are some of the tokens, or known to nobody yet."""
        tokens, drafts = random_tokens(9, 40, 64), random_tokens(10, 40, 64)
        counts = TokenCounts(64, torch.device("cpu"))
        for length in (9, 10, 14, 15, 22):
            counts.count(tokens, length, num_prompt)
            for num_drafts in (0, 1, 5):
                logits = random_logits(length, num_drafts + 1, 64)
                asked = SampleRequest(
                    params, KEY, tokens[:length], num_prompt, num_drafts + 1, drafts[:num_drafts], counts=counts
                )
                alone = replace(asked, counts=None)
                assert torch.equal(perturbed_logits(logits, [asked]), perturbed_logits(logits, [alone]))
                path = [*tokens[:length], *drafts[:num_drafts]]  # of a drafter, and of a tree's node
                asked = SampleRequest(params, KEY, path, num_prompt, counts=counts)
                alone = replace(asked, counts=None)
                assert torch.equal(perturbed_logits(logits[:1], [asked]), perturbed_logits(logits[:1], [alone]))

    def test_tokens_that_are_counted_are_not_looked_at_again(self) -> None:
        class Unread(Sequence[int]):
            def __len__(self) -> int:
                return 100_000

            def __getitem__(self, index: Any) -> Any:
                assert index == slice(100_000, None)
                return []

        params = SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2)
        counts = TokenCounts(64, torch.device("cpu"))
        counts.count([7] * 100_000, 100_000, 50_000)
        request = SampleRequest(params, KEY, Unread(), 50_000, counts=counts)
        assert perturbed_logits(torch.ones(1, 64), [request])[0, 7] == pytest.approx(1 / 1.2 - 25_000)

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        requests, logits = [], []
        for index, params in enumerate(VARIED_PARAMS):
            num_rows = 1 + index % 3
            tokens = random_tokens(index, 6 + index, 64)
            requests.append(SampleRequest(params, NoiseKey.derive(index, 0), tokens, 3, num_rows))
            logits.append(random_logits(index, num_rows, 64))
        together = perturbed_logits(torch.cat(logits), requests)
        alone = [perturbed_logits(rows, [request]) for rows, request in zip(logits, requests, strict=True)]
        assert torch.equal(together, torch.cat(alone))
        backwards = perturbed_logits(torch.cat(logits[::-1]), requests[::-1])
        assert torch.equal(backwards, torch.cat(alone[::-1]))


class TestDistribution:
    """Frequencies over many seeds or positions follow the distribution; chance of a false alarm 1e-6 each."""

    FALSE_ALARM = 1e-6
    NUM_DRAWS = 8000
    LOGITS = random_logits(21, 1, 24)

    def assert_follows(self, choices: list[int], probabilities: npt.NDArray[np.float64]) -> None:
        observed = np.bincount(choices, minlength=len(probabilities)).astype(np.float64)
        assert observed[probabilities == 0].sum() == 0
        expected = probabilities * len(choices)
        # Rare tokens are counted together, so that every expected count is large enough for the test.
        rare = expected < 10
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        if expected[-1] < 10:
            observed = np.append(observed[:-2], observed[-2:].sum())
            expected = np.append(expected[:-2], expected[-2:].sum())
        assert stats.chisquare(observed, expected).pvalue > self.FALSE_ALARM

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(),
            SamplingParams(temperature=0.6),
            SamplingParams(top_k=6),
            SamplingParams(temperature=1.5, top_p=0.7),
            SamplingParams(temperature=2.0, min_p=0.2),
            SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias=((4, 1.0),)),
        ],
        ids=str,
    )
    def test_over_seeds(self, params: SamplingParams) -> None:
        tokens = [1, 2, 3, 2]
        requests = [SampleRequest(params, NoiseKey.derive(seed, 0), tokens, 2) for seed in range(self.NUM_DRAWS)]
        choices = SAMPLER.sample(self.LOGITS.expand(self.NUM_DRAWS, -1), requests)
        self.assert_follows(choices, softmax(shaped_logits(self.LOGITS[0].numpy(), params, tokens, 2)))

    def test_over_positions(self) -> None:
        request = SampleRequest(SamplingParams(), KEY, [0] * self.NUM_DRAWS, 1, num_rows=self.NUM_DRAWS)
        choices = SAMPLER.sample(self.LOGITS.expand(self.NUM_DRAWS, -1), [request])
        self.assert_follows(choices, softmax(self.LOGITS[0].numpy().astype(np.float64)))

    def test_the_assertion_notices_another_temperature(self) -> None:
        request = SampleRequest(SamplingParams(temperature=0.9), KEY, [0] * self.NUM_DRAWS, 1, self.NUM_DRAWS)
        choices = SAMPLER.sample(self.LOGITS.expand(self.NUM_DRAWS, -1), [request])
        with pytest.raises(AssertionError):
            self.assert_follows(choices, softmax(self.LOGITS[0].numpy().astype(np.float64)))


class TestRows:
    """Tests of shaping logits by rows, for engines that keep their requests' parameters as tensors."""

    PARAMS = tuple(
        params for params in VARIED_PARAMS if not (params.has_penalty or params.logit_bias or params.is_greedy)
    )

    def test_filters_and_noise_are_those_of_requests(self) -> None:
        logits = random_logits(5, len(self.PARAMS), 50)
        keys = [NoiseKey.derive(-seed, seed) for seed in range(len(self.PARAMS))]
        positions = [7 + 3 * i for i in range(len(self.PARAMS))]
        requests = [
            SampleRequest(params, key, [1] * position, 1)
            for params, key, position in zip(self.PARAMS, keys, positions, strict=True)
        ]
        scores = logits / torch.tensor([params.temperature for params in self.PARAMS])[:, None]
        scores = filter_rows(
            scores,
            min_p=torch.tensor([params.min_p for params in self.PARAMS]),
            top_k=torch.tensor([params.top_k or 2**63 - 1 for params in self.PARAMS]),
            top_p=torch.tensor([params.top_p if params.top_p < 1.0 else NO_TOP_P for params in self.PARAMS]),
        )
        words = [(signed_word(key.low), signed_word(key.high)) for key in keys]
        scores += noise_of_rows(torch.tensor(words), torch.tensor(positions), 50)
        torch.testing.assert_close(scores, perturbed_logits(logits, requests), rtol=0, atol=0)

    def test_rows_stay_as_they_are_where_nobody_filters(self) -> None:
        logits = random_logits(5, 3, 50)
        assert filter_rows(logits, min_p=None, top_k=None, top_p=None) is logits
