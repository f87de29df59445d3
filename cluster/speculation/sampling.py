"""Samples from logits: shapes the distribution as the request asks, then draws by the Gumbel-max rule.

    choice = argmax_i (log p_i + g_i)            exact sample of p (Gumbel 1954; Maddison et al. 2014)

A constant added to `log p` does not change the choice, so the shaped logits are used without normalisation. Ties go to
the lowest ID (torch.argmax returns the first maximum). Target and draft draw in the same way, so the draft's choice is
a guess of the target's choice.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.speculation.device_noise import gumbel_noise_from, gumbel_noise_on
from cluster.speculation.filters import NO_TOP_P, filter_rows
from cluster.speculation.gumbel_max import MAX_WIDTH, draw, has_kernel, pack_run
from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.speculation.params import SamplingParams
from cluster.speculation.token_counts import TokenCounts

_LIMITS_OF_BYTES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
"For each byte of a mask, the upper bounds of the scores of its eight tokens, [256, 8]."


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Consecutive rows of logits that belong to one sequence.

    `token_ids` followed by `draft_token_ids` are the sequence's tokens, up to and including the input of the last row.
    If they are m tokens and there are n rows, row j draws the token at position `m - n + 1 + j`. Its penalties count
    all tokens before that position, including drafts under verification. `position_shift` shifts these positions.
    """

    params: SamplingParams
    noise_key: NoiseKey
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_rows: int = 1
    draft_token_ids: Sequence[int] = ()  # separate, because appending them to `token_ids` would copy the context
    allowed: torch.Tensor | None = None  # int32 [num_rows, ceil(vocab_size / 32)], one bit per allowed token; None: all
    counts: TokenCounts | None = None  # counts of the leading tokens of `token_ids`; None: nothing is counted yet
    position_shift: int = 0  # position of a token minus its index; not 0 if a target's token has several draft tokens

    @property
    def is_shaped(self) -> bool:
        """True if more than the temperature shapes the distribution."""
        return self.params.is_shaped or self.allowed is not None

    @property
    def first_index(self) -> int:
        """Index of the token that the first row draws."""
        return len(self.token_ids) + len(self.draft_token_ids) - self.num_rows + 1

    @property
    def first_position(self) -> int:
        return self.first_index + self.position_shift


BestTokens = Callable[[torch.Tensor, Sequence[SampleRequest], int], tuple[torch.Tensor, torch.Tensor]]
"""`Sampler.best_tokens` on one kind of device."""


class Sampler:
    """Draws from logits on one device; chooses the fastest implementation for that device when it is created."""

    def __init__(self, device: torch.device) -> None:
        self._best_tokens: BestTokens
        if device.type == "cpu":
            self._best_tokens = _best_by_kernel if has_kernel() else _best_by_definition
        elif importlib.util.find_spec("triton") is not None:
            # Imported here: PyTorch's builds for CPUs come without Triton, and the module imports `SampleRequest`.
            from cluster.speculation.triton_sampler import best_tokens, warm_up

            self._best_tokens = best_tokens
            warm_up(device)
        else:
            self._best_tokens = _best_by_definition
            gumbel_noise_on(device, [(NoiseKey(0, 0), 0)], 16)  # compiles its kernel before the first timed step

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
        """Returns the choice of every row.

        `logits` [num_rows, vocab_size], any float dtype, rows in the order of `requests`.
        """
        ids, _ = self._best_tokens(logits, requests, 1)
        choices: list[int] = ids.flatten().tolist()
        return choices

    def best_tokens(
        self, logits: torch.Tensor, requests: Sequence[SampleRequest], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `width` best tokens of every row: IDs and perturbed scores, [num_rows, width] each, best first.

        The first token is the row's choice. If a draft's first token is wrong, the target's choice is most likely one
        of the others, so all of them become children of a tree's node. Among equals the lowest ID comes first; an ID
        whose score is -inf is meaningless.
        """
        return self._best_tokens(logits, requests, width)

    def best_choices(
        self, logits: torch.Tensor, requests: Sequence[SampleRequest], width: int
    ) -> list[tuple[list[int], list[float]]]:
        """Returns for each row the IDs of `best_tokens`, and the distance of each ID's score from the first score.

        If a row's filters keep fewer than `width` tokens, the row has fewer IDs, but at least one.
        """
        ids, scores = self._best_tokens(logits, requests, min(width, logits.shape[-1]))
        distances = scores[:, :1] - scores
        distances[:, 0] = 0.0  # also if the first score is infinite
        gaps = distances.tolist()
        best = []
        for row_tokens, row_gaps in zip(ids.tolist(), gaps, strict=True):
            num_left = max(1, sum(gap < math.inf for gap in row_gaps))
            best.append((row_tokens[:num_left], row_gaps[:num_left]))
        return best


def perturbed_logits(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Returns `logits / T + g` after every filter, float32 [num_rows, vocab_size]; its argmax is the choice.

    Filtered tokens are -inf. A greedy row contains its logits after bias and penalties.
    """
    scores = logits.to(torch.float32, copy=True)
    _shape(scores, requests)
    _add_noise(scores, requests)
    return scores


def probabilities(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Returns the distribution of every row's choice, after every filter: float32 [num_rows, vocab_size].

    Requires that no request is greedy.
    """
    scores = logits.to(torch.float32, copy=True)
    _shape(scores, requests)
    return scores.softmax(dim=-1)


def _best_by_definition(
    logits: torch.Tensor, requests: Sequence[SampleRequest], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implements `Sampler.best_tokens` in PyTorch on any device. Computes the noise of all tokens."""
    scores = perturbed_logits(logits, requests)
    if width == 1:
        ids = scores.argmax(dim=-1, keepdim=True)
        return ids, scores.gather(-1, ids)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    return order[:, :width], ordered[:, :width]


def _best_by_kernel(
    logits: torch.Tensor, requests: Sequence[SampleRequest], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implements `Sampler.best_tokens` with the CPU kernel.

    Reads rows in place, except for rows of requests with `is_shaped`. `logits` may be a slice of wider rows.
    """
    if width > MAX_WIDTH:
        return _best_by_definition(logits, requests, width)
    logits = logits.to(torch.float32)
    num_rows, vocab_size = logits.shape
    row_bytes, shaped_row_bytes = logits.stride(0) * logits.itemsize, vocab_size * logits.itemsize
    shaped = _shaped_rows(logits, requests)
    address, shaped_address = logits.data_ptr(), 0 if shaped is None else shaped.data_ptr()
    runs: list[bytes] = []
    for request in requests:
        params, key, count, first = request.params, request.noise_key, request.num_rows, request.first_position
        temperature = 0.0 if params.is_greedy else params.temperature
        if request.is_shaped:
            runs.append(pack_run(shaped_address, count, key.low, key.high, first, 1.0 if temperature else 0.0))
            shaped_address += count * shaped_row_bytes
        elif row_bytes == shaped_row_bytes:
            runs.append(pack_run(address, count, key.low, key.high, first, temperature))
        else:
            for row in range(count):
                runs.append(pack_run(address + row * row_bytes, 1, key.low, key.high, first + row, temperature))
        address += count * row_bytes
    assert address == logits.data_ptr() + num_rows * row_bytes, "rows and requests disagree"
    return draw(b"".join(runs), num_rows, vocab_size, width)


def _shaped_rows(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor | None:
    """Returns shaped copies of the rows of requests with `is_shaped`; None if there are none."""
    shaped_requests: list[SampleRequest] = []
    rows: list[int] = []
    start = 0
    for request in requests:
        if request.is_shaped:
            shaped_requests.append(request)
            rows.extend(range(start, start + request.num_rows))
        start += request.num_rows
    if not rows:
        return None
    scores = logits[rows]
    _shape(scores, shaped_requests)
    return scores


def _shape(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    """Applies everything except the noise, in place."""
    _bias_and_penalise(scores, requests)
    params = [request.params for request in requests for _ in range(request.num_rows)]
    temperatures = [1.0 if row.is_greedy else row.temperature for row in params]
    if any(temperature != 1.0 for temperature in temperatures):
        scores /= torch.tensor(temperatures, dtype=torch.float32, device=scores.device)[:, None]
    filtered = [i for i, row in enumerate(params) if row.has_filter]
    if filtered:
        scores[filtered] = _filter(scores[filtered], [params[i] for i in filtered])


def _bias_and_penalise(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    """Excludes forbidden tokens, adds logit bias and applies the penalties, in place."""
    _mask(scores, requests)
    start = 0
    for request in requests:
        rows = scores[start : start + request.num_rows]
        start += request.num_rows
        params = request.params
        if params.logit_bias:
            token_ids, biases = _biases(params.logit_bias, scores.device)
            rows[:, token_ids] += biases
        if params.has_penalty:
            _penalise(rows, request)


@functools.lru_cache(maxsize=1024)  # parameters of running sequences
def _biases(logit_bias: tuple[tuple[int, float], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, biases = zip(*logit_bias, strict=True)
    return torch.tensor(token_ids, device=device), torch.tensor(biases, device=device)


def _mask(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    """Sets forbidden tokens to -inf, in place. One call for all rows takes as long as a call for one row."""
    masks = [request.allowed for request in requests if request.allowed is not None]
    if not masks:
        return
    allowed = torch.cat(masks) if len(masks) > 1 else masks[0]
    limits = _limits(allowed, scores.shape[-1], scores.device)
    if len(allowed) == len(scores):
        torch.minimum(scores, limits, out=scores)
        return
    rows: list[int] = []
    start = 0
    for request in requests:
        if request.allowed is not None:
            rows.extend(range(start, start + request.num_rows))
        start += request.num_rows
    scores[rows] = scores[rows].minimum(limits)


def _limits(allowed: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Returns +inf where the bit in `allowed` is set and -inf elsewhere: float32 [num_rows, vocab_size].

    On a CPU, a lookup table of all bytes takes a fortieth of the time of `masked_fill`, which suffers from branch
    mispredictions.
    """
    if device.type == "cpu":
        limits = np.take(_LIMITS_OF_BYTES, allowed.numpy().view(np.uint8), axis=0)
        return torch.from_numpy(limits.reshape(len(allowed), -1)[:, :vocab_size])
    words = allowed.to(device, non_blocking=True)
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    return (
        torch.full(bits.shape, torch.inf, device=device).masked_fill_(bits == 0, -torch.inf).flatten(1)[:, :vocab_size]
    )


def counts_before(
    request: SampleRequest, vocab_size: int, device: torch.device
) -> tuple[TokenCounts, Sequence[int], int]:
    """Returns counts of the leading tokens of `request`, the uncounted tokens, and a number.

    The number is how many uncounted tokens precede the token that the request's first row draws.
    """
    first, counts = request.first_index, request.counts
    if counts is None:
        counts = TokenCounts(vocab_size, device)
        counts.count(request.token_ids, min(first, len(request.token_ids)), request.num_prompt_tokens)
    tail = [*request.token_ids[counts.num_counted :], *request.draft_token_ids]
    return counts, tail, first - counts.num_counted


def _penalise(rows: torch.Tensor, request: SampleRequest) -> None:
    """Applies repetition (Keskar et al. 2019, equation 2), frequency and presence penalties.

    Each row's penalties count the tokens before it. Tokens outside the vocabulary, such as the mask tokens of a draft
    with more rows than the target has tokens, are not counted.
    """
    params = request.params
    counts, tail, num_added = counts_before(request, rows.shape[-1], rows.device)
    generated = counts.generated.clone() if tail else counts.generated
    for j, row in enumerate(rows):
        for token in tail[num_added + j - 1 : num_added + j] if j else tail[:num_added]:
            if token < len(generated):
                generated[token] += 1
        is_generated = generated > 0
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            penalised = torch.where(row > 0, row / penalty, row * penalty)
            row.copy_(torch.where(counts.in_prompt | is_generated, penalised, row))
        row -= params.frequency_penalty * generated
        row -= params.presence_penalty * is_generated


def _filter(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Applies `filter_rows` with `params`, one for each row."""
    device, vocab_size = scores.device, scores.shape[-1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    has_top = any(p.top_k > 0 or p.top_p < 1.0 for p in params)
    return filter_rows(
        scores,
        min_p=column([p.min_p for p in params]) if any(p.min_p > 0 for p in params) else None,
        top_k=column([p.top_k if p.top_k > 0 else vocab_size for p in params]) if has_top else None,
        top_p=column([p.top_p if p.top_p < 1.0 else NO_TOP_P for p in params]) if has_top else None,
    )


def _add_noise(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    """Adds the Gumbel noise of every row that is not greedy, in place."""
    rows: list[int] = []
    draws: list[tuple[NoiseKey, int]] = []
    start = 0
    for request in requests:
        if not request.params.is_greedy:
            rows.extend(range(start, start + request.num_rows))
            draws.extend((request.noise_key, request.first_position + j) for j in range(request.num_rows))
        start += request.num_rows
    if not draws:
        return
    noise = _noise(scores.device, draws, scores.shape[-1])
    if len(rows) == len(scores):
        scores += noise
    else:
        scores[rows] += noise


def _noise(device: torch.device, draws: Sequence[tuple[NoiseKey, int]], vocab_size: int) -> torch.Tensor:
    """Returns the noise of `draws`, [len(draws), vocab_size].

    NumPy is by far the fastest implementation on a CPU. A GPU computes its own noise, which saves the copy.
    """
    if device.type == "cpu":
        return torch.from_numpy(gumbel_noise(draws, vocab_size))
    return gumbel_noise_on(device, draws, vocab_size)


def noise_of_rows(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns the same noise as `_noise`, for keys and positions on the logits' device. Does not wait for a GPU.

    `keys` int64 [num_rows, 2], the bits of `NoiseKey`'s words, the low one first; `positions` int64 [num_rows].
    """
    if keys.device.type != "cpu":
        return gumbel_noise_from(keys[:, 0], keys[:, 1], positions, vocab_size)
    words = keys.numpy().view(np.uint64).tolist()
    draws = [(NoiseKey(*key), position) for key, position in zip(words, positions.tolist(), strict=True)]
    return torch.from_numpy(gumbel_noise(draws, vocab_size))
