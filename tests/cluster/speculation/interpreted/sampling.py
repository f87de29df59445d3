"""The kernels choose what the sampler chooses on a CPU, token for token, scores included."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from cluster.speculation import triton_sampler
from cluster.speculation.filters import NO_TOP_P, WEIGHT_BITS, filter_rows, weights
from cluster.speculation.noise import NoiseKey, noise_words
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.speculation.token_counts import TokenCounts
from cluster.speculation.triton_sampler import best_tokens
from tests.cluster.speculation.logits import random_logits
from tests.interpreter import spare_bookkeeping
from tests.soak import length, only_in_soak

CPU = torch.device("cpu")
SAMPLER = Sampler(CPU)


@pytest.fixture(autouse=True, params=[512])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the chunk size; by default so small that most vocabularies have several chunks."""
    spare_bookkeeping(monkeypatch)
    monkeypatch.setattr(triton_sampler, "CHUNK", request.param)
    monkeypatch.setattr(triton_sampler, "STEP", max(512, request.param // 2))


def random_params(rng: random.Random) -> SamplingParams:
    """Any mix: each setting is on in half of them."""

    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.3, 2.0]),
        top_k=rng.choice([0, 0, 1, 2, 17, 100, 1 << 40]),
        top_p=maybe(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.99, 0.99999]), 1.0),
        min_p=maybe(rng.choice([1e-4, 0.05, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=tuple((token, rng.uniform(-20, 20)) for token in rng.sample(range(40), rng.choice([0, 0, 1, 9]))),
    )


def random_request(rng: random.Random, vocab_size: int, params: SamplingParams | None = None) -> SampleRequest:
    """A row, or a chain of drafts under verification, among few tokens, so that these come again."""
    token_ids = [rng.randrange(30) for _ in range(rng.randint(1, 20))]
    num_rows, num_prompt_tokens = rng.choice([1, 1, 4]), rng.randint(1, len(token_ids))
    allowed = counts = None
    if rng.random() < 0.2:
        words = [[rng.getrandbits(32) - 2**31 for _ in range(-(-vocab_size // 32))] for _ in range(num_rows)]
        allowed = torch.tensor(words, dtype=torch.int32)
    params = params or random_params(rng)
    if params.has_penalty and rng.random() < 0.7:
        counts = TokenCounts(vocab_size, CPU)
        counts.count(token_ids, rng.randint(0, len(token_ids)), num_prompt_tokens)
    return SampleRequest(
        params,
        NoiseKey(rng.getrandbits(64), rng.getrandbits(64)),
        token_ids,
        num_prompt_tokens,
        num_rows,
        [rng.randrange(30) for _ in range(num_rows - 1)],
        allowed,
        counts,
    )


def assert_same(logits: torch.Tensor, requests: Sequence[SampleRequest], width: int = 1) -> None:
    before = logits.clone()
    wanted_ids, wanted = SAMPLER.best_tokens(logits.float(), requests, width)
    ids, scores = best_tokens(logits, requests, width)
    has_score = wanted > -torch.inf
    assert torch.equal(scores, wanted)
    assert torch.equal(ids[has_score], wanted_ids[has_score])
    assert (ids[~has_score] == 0).all()
    assert torch.equal(logits, before)


def assert_same_for(seed: int, vocab_size: int, num_requests: int, scale: float = 3.0, width: int = 1) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng, vocab_size) for _ in range(num_requests)]
    logits = random_logits(seed, sum(request.num_rows for request in requests), vocab_size, scale)
    assert_same(logits, requests, width)


@pytest.mark.parametrize("seed", range(length(1, 4)))
def test_all_mixes_of_parameters(seed: int) -> None:
    assert_same_for(seed, 700, length(12, 22))


@pytest.mark.parametrize("vocab_size", length([1, 9, 255, 512], [1, 7, 8, 9, 31, 33, 255, 256, 257, 512]))
def test_vocabularies_of_any_size(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    params = [SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.7, 1.0) for k in (0, 3)]
    requests = [SampleRequest(rng.choice(params), NoiseKey(rng.getrandbits(64), 5), [0], 1) for _ in range(12)]
    assert_same(random_logits(1, 12, vocab_size), requests)


@only_in_soak
@pytest.mark.parametrize(
    ("chunk", "vocab_size", "num_requests"),
    length([(32_768, 128_256, 2)], [(4096, 4096, 20), (32_768, 128_256, 3)]),
    indirect=["chunk"],
)
def test_vocabularies_of_models(vocab_size: int, num_requests: int) -> None:
    """Filters read all chunks about 20 times, so the chunks of the large vocabulary are larger than on a GPU."""
    assert_same_for(vocab_size, vocab_size, num_requests)


@pytest.mark.parametrize("chunk", [4096], indirect=True)
def test_all_chunks_of_a_large_vocabulary_are_merged() -> None:
    params = SamplingParams(temperature=0.7), SamplingParams(temperature=0.0), SamplingParams(repetition_penalty=1.1)
    requests = [SampleRequest(p, NoiseKey(n, 5), [7], 1) for n, p in enumerate(params)]
    assert_same(random_logits(2, len(requests), 128_256), requests, 4)


@pytest.mark.parametrize("width", length([3], [2, 3, 16]))
def test_the_best_of_a_row(width: int) -> None:
    assert_same_for(width, 700, length(5, 20), width=width)


def test_ties_go_to_the_lowest_id() -> None:
    """Scores of bfloat16 and of integers are often equal; filters then cut among equals."""
    rng = random.Random(3)
    mixes = itertools.product([0.0, 1.0], [0, 5, 300], [0.4, 1.0])
    params = [SamplingParams(temperature=t, top_k=top_k, top_p=top_p) for t, top_k, top_p in mixes]
    requests = [SampleRequest(p, NoiseKey(rng.getrandbits(64), 1), [1], 1) for p in params]
    assert_same(torch.zeros(len(params), 600), requests, 3)
    assert_same(random_logits(5, len(params), 600).round().to(torch.bfloat16), requests, 3)


@pytest.mark.parametrize("chunk", [1024], indirect=True)
@pytest.mark.parametrize("seed", range(length(1, 10)))
def test_cuts_keep_the_tokens_that_the_filters_keep(seed: int) -> None:
    """Scores have few distinct values, so most cuts divide equal scores. Rows have random filters, or none."""
    rng = random.Random(seed)
    num_rows, vocab_size = 8, 2500
    values = [torch.tensor([rng.gauss(0, 4) for _ in range(rng.choice([1, 3, 40, 1000]))]) for _ in range(num_rows)]
    scores = torch.stack([own[torch.randint(len(own), (vocab_size,))] for own in values])
    scores[rng.randrange(num_rows), rng.sample(range(vocab_size), 3)] = torch.inf
    scores[rng.randrange(num_rows), : vocab_size // 2] = -torch.inf
    params = [
        SamplingParams(
            top_k=rng.choice([0, 1, 17, 900, 2499, 2500, 1 << 40]),
            top_p=rng.choice([1.0, 1e-6, 0.5, 0.9, 0.99999]),
            min_p=rng.choice([0.0, 0.0, 1e-4, 0.3, 1.0]),
        )
        for _ in range(num_rows)
    ]
    params[0] = SamplingParams(top_p=1e-50)  # 0 in float32: only the best token stays
    table = triton_sampler.table_of([SampleRequest(p, NoiseKey(1, 2), [1], 1) for p in params], vocab_size, CPU)
    cuts, _ = triton_sampler._cut(scores, table, torch.empty(1, 1))
    for own, cut, row in zip(params, cuts, scores, strict=True):
        if not own.has_filter:
            continue
        best, order, num_equal = cut.tolist()
        assert best == row.max().view(torch.int32)
        # The kernels' order is an unsigned number; `cut` has its bits as int32.
        bits = torch.where(row == 0.0, 0.0, row).view(torch.int32).long() & 0xFFFFFFFF
        orders = torch.where(row < 0.0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
        is_equal = orders == order & 0xFFFFFFFF
        kept = (orders > order & 0xFFFFFFFF) | (is_equal & (is_equal.cumsum(0) <= num_equal))
        kept &= weights(row[None], row.max()[None, None])[0] >= torch.tensor(own.min_p).double() * 2.0**WEIGHT_BITS
        wanted = filter_rows(
            row[None],
            min_p=torch.tensor([own.min_p]),
            top_k=torch.tensor([own.top_k or vocab_size]),
            top_p=torch.tensor([own.top_p if own.top_p < 1.0 else NO_TOP_P]),
        )
        assert torch.equal(kept & (row > -torch.inf), wanted[0] > -torch.inf), own


def test_scores_that_are_much_smaller_or_larger_than_the_noise() -> None:
    for scale in length((1e-3, 1e4), (1e-3, 100.0, 1e4)):
        assert_same_for(int(scale), 500, length(6, 20), scale)


def test_infinite_logits_win() -> None:
    rng = random.Random(6)
    mixes = ({}, {"min_p": 0.05}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 1.0, "top_k": 3, "top_p": 0.1})
    params = [SamplingParams(temperature=t, **mix) for t in (0.0, 0.7) for mix in mixes]
    requests = [SampleRequest(p, NoiseKey(rng.getrandbits(64), 1), [1], 1) for p in params]
    logits = random_logits(6, len(params), 600)
    logits[:, [40, 550]] = torch.inf
    assert (SAMPLER.best_tokens(logits, requests, 1)[0] == 40).all()
    assert_same(logits, requests)


def test_what_is_not_allowed_is_not_chosen() -> None:
    none = torch.zeros(1, 20, dtype=torch.int32)
    one = none.clone()
    one[0, 18] = 1 << 9
    rng = random.Random(1)
    for params in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.5, min_p=0.1)):
        request = SampleRequest(params, NoiseKey(1, 2), [3], 1, allowed=one)
        ids, _ = best_tokens(random_logits(rng.randrange(99), 1, 640), [request], 1)
        assert ids.tolist() == [[18 * 32 + 9]]
    ids, scores = best_tokens(
        random_logits(1, 1, 640), [SampleRequest(SamplingParams(), NoiseKey(1, 2), [3], 1, allowed=none)], 1
    )
    assert (ids.tolist(), scores.tolist()) == ([[0]], [[-torch.inf]])


def test_the_word_with_the_most_noise() -> None:
    """Its bound is far above it; a token with it wins as it should, be it among the last."""
    key = next(key for key in (NoiseKey(n, 9) for n in range(10**6)) if noise_words(key, 1, 64).min() < 1000)
    request = SampleRequest(SamplingParams(), key, [1], 1)
    logits = torch.zeros(1, 64)
    assert best_tokens(logits, [request], 1)[0].item() == noise_words(key, 1, 64).argmin()
    assert_same(logits, [request], 16)


def test_positions_and_keys_of_all_sizes() -> None:
    class Long(list[int]):
        """As many tokens as it says, without their memory."""

        def __init__(self, length: int) -> None:
            self._length = length

        def __len__(self) -> int:
            return self._length

    for position in (1, 2**31 - 1, 2**32 + 5, 2**53 + 1, 2**62):
        request = SampleRequest(SamplingParams(), NoiseKey(2**64 - 1, 2**63), Long(position), 1)
        assert_same(random_logits(7, 1, 300), [request])


def test_the_parts_of_a_table_are_aligned_to_16_bytes() -> None:
    """Triton would compile again, in a timed step, for pointers that are not multiples of 16 bytes."""
    params = SamplingParams(repetition_penalty=1.1, logit_bias=((1, 2.0),))
    for num_rows in (1, 2, 3):
        mask = torch.arange(5, dtype=torch.int32)[None]
        for allowed in (None, mask):
            requests = [SampleRequest(params, NoiseKey(1, 2), [3, 4], 1, allowed=allowed) for _ in range(num_rows)]
            table = triton_sampler.table_of(requests, 160, CPU)
            for part in (table.rows, table.shaped_rows, table.appendix, table.masks):
                assert part.data_ptr() % 16 == 0
            assert allowed is None or torch.equal(table.masks, mask.expand(num_rows, -1))
