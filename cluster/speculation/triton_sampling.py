"""Samples on a GPU in Triton: the kernels shape and filter logits, make the noise and draw.

    shape    applies bias, penalties and masks to the rows that have any of these
    cut      finds the border of a row's filters: a score, and an ID among the tokens with that score
    draw     finds the best of `score + noise` in each chunk of a row's vocabulary
    merge    finds the best of a row's chunks

`sampling.py` defines the results. Every operation rounds as PyTorch does on a CPU: no fused products, IEEE division,
and filters sum the integer weights of `filters.py`. Only the float64 logarithms of the noise are the device's. They are
within 2 units in the last place, so the noise rounded to float32 differs for about one word in 2**27. A choice differs
only if the two best scores are equal except for that last bit.

`draw` computes noise in float64 only for the few tokens that an upper bound of the noise does not rule out, because
consumer GPUs compute float64 at a 64th of the speed of float32. The CPU's kernel (`kernels/sampling.c`) uses the same
bound.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cluster.speculation import filters
from cluster.speculation.triton_noise import philox

OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
CHUNK = 4096  # tokens of a row that one program processes
BIAS_STEP = 128  # biased tokens that one program shapes

# Columns of the table of rows, int64. A column for a fraction contains the bits of a float32.
COLUMNS = (
    "key_low",
    "key_high",
    "position",
    "source",  # the row of shaped scores; -1: the logits divided by the temperature
    "logit_row",
    "mask_row",  # row of the allowed tokens' mask; -1: all are allowed
    "in_prompt",  # addresses of the arrays of `TokenCounts`; 0: no penalties
    "generated",
    "tail_start",  # uncounted tokens, in the table's appendix
    "tail_end",
    "bias_start",  # biased tokens, in the table's appendix, followed by their biases
    "num_biases",
    "top_k",  # 0: off
    "temperature",  # 0: no noise
    "min_p",
    "top_p",  # 2: off
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "has_filter",
)
WIDTH = tl.constexpr(len(COLUMNS))
_KEY_LOW = tl.constexpr(0)
_KEY_HIGH = tl.constexpr(1)
_POSITION = tl.constexpr(2)
_SOURCE = tl.constexpr(3)
_LOGIT_ROW = tl.constexpr(4)
_MASK_ROW = tl.constexpr(5)
_IN_PROMPT = tl.constexpr(6)
_GENERATED = tl.constexpr(7)
_TAIL_START = tl.constexpr(8)
_TAIL_END = tl.constexpr(9)
_BIAS_START = tl.constexpr(10)
_NUM_BIASES = tl.constexpr(11)
_TOP_K = tl.constexpr(12)
_TEMPERATURE = tl.constexpr(13)
_MIN_P = tl.constexpr(14)
_TOP_P = tl.constexpr(15)
_REPETITION = tl.constexpr(16)
_FREQUENCY = tl.constexpr(17)
_PRESENCE = tl.constexpr(18)
_HAS_FILTER = tl.constexpr(19)

_LOG2_E = tl.constexpr(filters.LOG2_E)
_LN2_HIGH = tl.constexpr(filters.LN2_HIGH)
_LN2_LOW = tl.constexpr(filters.LN2_LOW)
_COEFFICIENT_0 = tl.constexpr(filters.COEFFICIENTS[0])
_COEFFICIENT_1 = tl.constexpr(filters.COEFFICIENTS[1])
_COEFFICIENT_2 = tl.constexpr(filters.COEFFICIENTS[2])
_COEFFICIENT_3 = tl.constexpr(filters.COEFFICIENTS[3])
_COEFFICIENT_4 = tl.constexpr(filters.COEFFICIENTS[4])
_COEFFICIENT_5 = tl.constexpr(filters.COEFFICIENTS[5])
_LOWEST = tl.constexpr(filters.LOWEST)
_ONE = tl.constexpr(2.0**filters.MANTISSA_BITS)
_BEST_WEIGHT = tl.constexpr(2.0**filters.WEIGHT_BITS)
_SHIFT = tl.constexpr(filters.WEIGHT_BITS - filters.MANTISSA_BITS)

_NO_SCORE = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**31))  # below the key of any score
_NO_ID = tl.constexpr(2**30)


@triton.jit
def _number(row, column):  # type: ignore[no-untyped-def]
    """Returns the float32 in a column."""
    return tl.load(row + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _shaped(value, tokens, bias, row, appendix, allowed, mask_words, is_there):  # type: ignore[no-untyped-def]
    """Returns `value`, the logits of `tokens`, shaped as the row's request asks, including temperature."""
    mask_row = tl.load(row + _MASK_ROW)
    if mask_row >= 0:
        word = tl.load(allowed + mask_row * mask_words + tokens // 32, mask=is_there, other=0)
        value = tl.where(((word >> (tokens % 32)) & 1) == 1, value, _NO_SCORE)
    value = value + bias
    in_prompt = tl.load(row + _IN_PROMPT)
    if in_prompt != 0:
        counts = tl.load(row + _GENERATED).to(tl.pointer_type(tl.float32))
        generated = tl.load(counts + tokens, mask=is_there, other=0.0)
        for place in range(tl.load(row + _TAIL_START), tl.load(row + _TAIL_END)):
            generated += tl.where(tokens == tl.load(appendix + place), 1.0, 0.0)
        is_generated = generated > 0
        is_known = tl.load(in_prompt.to(tl.pointer_type(tl.int8)) + tokens, mask=is_there, other=0) != 0
        penalty = _number(row, _REPETITION)
        lowered = tl.where(value > 0, tl.div_rn(value, penalty + tl.zeros_like(value)), value * penalty)
        value = tl.where(is_known | is_generated, lowered, value)
        value = value - generated * _number(row, _FREQUENCY)
        value = value - tl.where(is_generated, _number(row, _PRESENCE), 0.0)
    temperature = _number(row, _TEMPERATURE)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.div_rn(value, divisor + tl.zeros_like(value))


@triton.jit(do_not_specialize=["logit_stride", "vocab_size", "mask_words"])  # type: ignore[untyped-decorator]
def shape_kernel(  # type: ignore[no-untyped-def]
    shaped, logits, table, shaped_rows, allowed, appendix, logit_stride, vocab_size, mask_words, chunk: tl.constexpr
):
    """Program (row of `shaped_rows`, chunk): shapes all tokens, without biases."""
    row = table + tl.load(shaped_rows + tl.program_id(0)) * WIDTH
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    is_there = tokens < vocab_size
    value = tl.load(logits + tl.load(row + _LOGIT_ROW) * logit_stride + tokens, mask=is_there, other=0.0)
    value = _shaped(value.to(tl.float32), tokens, 0.0, row, appendix, allowed, mask_words, is_there)
    tl.store(shaped + tl.load(row + _SOURCE) * vocab_size + tokens, value, mask=is_there)


@triton.jit(do_not_specialize=["logit_stride", "vocab_size", "mask_words"])  # type: ignore[untyped-decorator]
def bias_kernel(  # type: ignore[no-untyped-def]
    shaped, logits, table, shaped_rows, allowed, appendix, logit_stride, vocab_size, mask_words, step: tl.constexpr
):
    """Program (row of `shaped_rows`, biased tokens): shapes these tokens again, with their biases."""
    row = table + tl.load(shaped_rows + tl.program_id(0)) * WIDTH
    start, count = tl.load(row + _BIAS_START), tl.load(row + _NUM_BIASES)
    place = tl.program_id(1) * step + tl.arange(0, step)
    is_there = place < count
    tokens = tl.load(appendix + start + place, mask=is_there, other=0)
    bias = tl.load(appendix + start + count + place, mask=is_there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    value = tl.load(logits + tl.load(row + _LOGIT_ROW) * logit_stride + tokens, mask=is_there, other=0.0)
    value = _shaped(value.to(tl.float32), tokens, bias, row, appendix, allowed, mask_words, is_there)
    tl.store(shaped + tl.load(row + _SOURCE) * vocab_size + tokens, value, mask=is_there)


@triton.jit
def _scores(row, shaped, logits, logit_stride, vocab_size, tokens):  # type: ignore[no-untyped-def]
    """Returns the shaped logits of `tokens`, before the filters of the row's request; -inf past the vocabulary."""
    is_there = tokens < vocab_size
    source = tl.load(row + _SOURCE)
    if source >= 0:
        value = tl.load(shaped + source * vocab_size + tokens, mask=is_there, other=_NO_SCORE)
    else:
        value = tl.load(logits + tl.load(row + _LOGIT_ROW) * logit_stride + tokens, mask=is_there, other=_NO_SCORE)
        value = value.to(tl.float32)
        temperature = _number(row, _TEMPERATURE)
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
        value = tl.div_rn(value, divisor + tl.zeros_like(value))
    return value


@triton.jit
def _weights(scores, best):  # type: ignore[no-untyped-def]
    """Computes `filters.weights`, operation by operation."""
    from_best = tl.where(scores == best, 0.0, scores - best)
    distance = tl.where(scores > _NO_SCORE, from_best, _LOWEST)
    distance = tl.maximum(distance, _LOWEST)
    power = tl.floor(distance * _LOG2_E + 0.5)
    rest = (distance - power * _LN2_HIGH) - power * _LN2_LOW
    polynomial = _COEFFICIENT_0 * rest + _COEFFICIENT_1
    polynomial = polynomial * rest + _COEFFICIENT_2
    polynomial = polynomial * rest + _COEFFICIENT_3
    polynomial = polynomial * rest + _COEFFICIENT_4
    polynomial = polynomial * rest + _COEFFICIENT_5
    mantissa = (polynomial * (rest * rest) + rest) + 1.0
    integer = (mantissa * _ONE).to(tl.int64) << _SHIFT
    return integer >> tl.minimum(0.0 - power, 63.0).to(tl.int64)


@triton.jit
def _order(scores):  # type: ignore[no-untyped-def]
    """Returns int32 with the order of `scores`; equal scores give equal numbers."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _is_kept(order, tokens, cut_order, cut_id):  # type: ignore[no-untyped-def]
    return (order > cut_order) | ((order == cut_order) & (tokens <= cut_id))


@triton.jit(do_not_specialize=["logit_stride", "vocab_size"])  # type: ignore[untyped-decorator]
def cut_kernel(  # type: ignore[no-untyped-def]
    cuts, shaped, logits, table, logit_stride, vocab_size, chunk: tl.constexpr
):
    """Program (row): writes the bits of the best score, and the cut: a score's order and an ID. int32 [num_rows, 3].

    Tokens with a lower order are removed, and at the cut's order those with a higher ID. All counts and sums are
    integers, so neither the order of sums nor the division into chunks matters.
    """
    row = table + tl.program_id(0) * WIDTH
    cuts += tl.program_id(0) * 3
    if tl.load(row + _HAS_FILTER) == 0:
        return
    lanes = tl.arange(0, chunk)
    top_k = tl.load(row + _TOP_K)
    top_p = _number(row, _TOP_P).to(tl.float64)
    least = _number(row, _MIN_P).to(tl.float64) * _BEST_WEIGHT

    bests = tl.full([chunk], _NO_SCORE, tl.float32)
    for first in range(0, vocab_size, chunk):
        bests = tl.maximum(bests, _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes))
    best = tl.max(bests, 0)

    lowest = tl.full([chunk], 2**31 - 1, tl.int32)
    for first in range(0, vocab_size, chunk):
        scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
        survives = (_weights(scores, best).to(tl.float64) >= least) & (scores > _NO_SCORE)
        lowest = tl.minimum(lowest, tl.where(survives, _order(scores), 2**31 - 1))
    low = tl.min(lowest, 0).to(tl.int64) - 1
    high = _order(best + tl.zeros([1], tl.float32))
    high = tl.max(high, 0).to(tl.int64)

    # Find the lowest order with at most k tokens above it. Tokens of that order are kept until k tokens are kept.
    cut_order = low
    num_equal = tl.zeros([], tl.int64) + vocab_size
    if top_k > 0:
        start, end = low, high
        while start < end:
            middle = start + ((end - start) >> 1)
            counts = tl.zeros([chunk], tl.int64)
            for first in range(0, vocab_size, chunk):
                scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
                survives = (_weights(scores, best).to(tl.float64) >= least) & (scores > _NO_SCORE)
                counts += (survives & (_order(scores) > middle)).to(tl.int64)
            above = tl.sum(counts, 0)
            start = tl.where(above < top_k, start, tl.where(above == top_k, middle, middle + 1))
            end = tl.where(above <= top_k, middle, end)
        cut_order = start
        counts = tl.zeros([chunk], tl.int64)
        for first in range(0, vocab_size, chunk):
            scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
            survives = (_weights(scores, best).to(tl.float64) >= least) & (scores > _NO_SCORE)
            counts += (survives & (_order(scores) > cut_order)).to(tl.int64)
        num_equal = top_k - tl.sum(counts, 0)

    if top_p < 1.0:
        # Sum the weights of the tokens above the cut. All tokens at the cut have the same weight.
        masses = tl.zeros([chunk], tl.int64)
        equals = tl.zeros([chunk], tl.int64)
        weight_of_equals = tl.zeros([chunk], tl.int64)
        for first in range(0, vocab_size, chunk):
            scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
            weights = _weights(scores, best)
            order = _order(scores)
            survives = (weights.to(tl.float64) >= least) & (scores > _NO_SCORE)
            masses += tl.where(survives & (order > cut_order), weights, 0)
            equals += (survives & (order == cut_order)).to(tl.int64)
            weight_of_equals = tl.maximum(weight_of_equals, tl.where(survives & (order == cut_order), weights, 0))
        kept_equals = tl.minimum(tl.sum(equals, 0), num_equal)
        weight = tl.max(weight_of_equals, 0)
        mass = top_p * (tl.sum(masses, 0) + kept_equals * weight).to(tl.float64)
        # Find the lowest order such that the tokens above it have less than `mass`.
        start, end = cut_order, high
        while start < end:
            middle = start + ((end - start) >> 1)
            masses = tl.zeros([chunk], tl.int64)
            for first in range(0, vocab_size, chunk):
                scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
                weights = _weights(scores, best)
                survives = (weights.to(tl.float64) >= least) & (scores > _NO_SCORE)
                masses += tl.where(survives & (_order(scores) > middle), weights, 0)
            is_less = tl.sum(masses, 0).to(tl.float64) < mass
            start = tl.where(is_less, start, middle + 1)
            end = tl.where(is_less, middle, end)
        masses = tl.zeros([chunk], tl.int64)
        weight_of_equals = tl.zeros([chunk], tl.int64)
        for first in range(0, vocab_size, chunk):
            scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
            weights = _weights(scores, best)
            order = _order(scores)
            survives = (weights.to(tl.float64) >= least) & (scores > _NO_SCORE)
            masses += tl.where(survives & (order > start), weights, 0)
            weight_of_equals = tl.maximum(weight_of_equals, tl.where(survives & (order == start), weights, 0))
        above, weight = tl.sum(masses, 0), tl.max(weight_of_equals, 0)
        # Count the tokens of that order with less than `mass` before them. The first one always stays.
        first_out, last_out = tl.zeros([], tl.int64) + 1, tl.zeros([], tl.int64) + vocab_size
        while first_out < last_out:
            middle = first_out + ((last_out - first_out) >> 1)
            is_less = (above + middle * weight).to(tl.float64) < mass
            first_out = tl.where(is_less, middle + 1, first_out)
            last_out = tl.where(is_less, last_out, middle)
        num_equal = tl.where(start == cut_order, tl.minimum(num_equal, first_out), first_out)
        cut_order = start

    # Find the ID up to which `num_equal` tokens have that order. Rarely more tokens have it.
    equals = tl.zeros([chunk], tl.int64)
    for first in range(0, vocab_size, chunk):
        scores = _scores(row, shaped, logits, logit_stride, vocab_size, first + lanes)
        equals += ((_order(scores) == cut_order) & (scores > _NO_SCORE)).to(tl.int64)
    first_id = tl.where(tl.sum(equals, 0) <= num_equal, tl.zeros([], tl.int64) + vocab_size, -1)
    last_id = tl.where(num_equal == 0, tl.zeros([], tl.int64) - 1, vocab_size)
    while first_id < last_id:
        middle = first_id + ((last_id - first_id) >> 1)
        counts = tl.zeros([chunk], tl.int64)
        for first in range(0, vocab_size, chunk):
            tokens = first + lanes
            scores = _scores(row, shaped, logits, logit_stride, vocab_size, tokens)
            counts += ((_order(scores) == cut_order) & (scores > _NO_SCORE) & (tokens <= middle)).to(tl.int64)
        is_enough = tl.sum(counts, 0) >= num_equal
        first_id = tl.where(is_enough, first_id, middle + 1)
        last_id = tl.where(is_enough, middle, last_id)
    tl.store(cuts, best.to(tl.int32, bitcast=True))
    tl.store(cuts + 1, cut_order.to(tl.int32))
    tl.store(cuts + 2, first_id.to(tl.int32))


@triton.jit
def _noise_bound(words):  # type: ignore[no-untyped-def]
    """Returns an upper bound of the noise of `words`, tight where the noise is large.

    The same as `noise_bound` of kernels/sampling.c.
    """
    bits = words.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    return bits * (-0.693147181 * (1.0 / 8388608.0)) + ((32 + 127) * 0.693147181 + 1e-3)


@triton.jit
def _noise(word):  # type: ignore[no-untyped-def]
    """Returns the noise as noise.py defines it.

    1 - v has 33 bits, so log(1 - v) equals log1p(-v) there.
    """
    v = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (0.0 - tl.log(0.0 - tl.log(1.0 - v))).to(tl.float32)


@triton.jit(do_not_specialize=["logit_stride", "vocab_size", "num_chunks"])  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    chunk_scores, chunk_ids, cuts, shaped, logits, table, logit_stride, vocab_size, num_chunks,
    chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): finds the `width` best tokens of the chunk, in no order."""
    index = tl.program_id(0)
    row = table + index * WIDTH
    block = tl.program_id(1) * (chunk // 8) + tl.arange(0, chunk // 8)
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    scores = _scores(row, shaped, logits, logit_stride, vocab_size, tokens)
    if tl.load(row + _HAS_FILTER) != 0:
        best = tl.load(cuts + index * 3).to(tl.float32, bitcast=True)
        kept = _is_kept(_order(scores), tokens, tl.load(cuts + index * 3 + 1), tl.load(cuts + index * 3 + 2))
        kept = kept & (_weights(scores, best).to(tl.float64) >= _number(row, _MIN_P).to(tl.float64) * _BEST_WEIGHT)
        scores = tl.where(kept, scores, _NO_SCORE)
    bounds = scores
    words = tl.zeros([chunk], tl.uint32)
    is_drawn = _number(row, _TEMPERATURE) > 0.0
    if is_drawn:
        key_low, key_high = tl.load(row + _KEY_LOW), tl.load(row + _KEY_HIGH)
        c0, c1, c2, c3 = philox(key_low, key_high, tl.load(row + _POSITION), block)
        # Token 8b + 2w + h gets half h of word w. Each join adds the lowest binary digit of the token's number.
        even = tl.join(tl.join(c0.to(tl.uint32), c2.to(tl.uint32)), tl.join(c1.to(tl.uint32), c3.to(tl.uint32)))
        odd = tl.join(
            tl.join((c0 >> 32).to(tl.uint32), (c2 >> 32).to(tl.uint32)),
            tl.join((c1 >> 32).to(tl.uint32), (c3 >> 32).to(tl.uint32)),
        )
        words = tl.reshape(tl.join(even, odd), [chunk])
        bounds = scores + _noise_bound(words)

    # Score the token with the largest bound, until all bounds are below the worst of the best scores. A token whose
    # bound equals that score may still win, because its ID may be lower.
    best_scores = tl.full([width], _NO_SCORE, tl.float32)
    best_ids = _NO_ID + tl.arange(0, width)
    worst = tl.min(best_scores, 0)
    largest = tl.max(bounds, 0)
    while (largest > _NO_SCORE) & (largest >= worst):
        token = tl.min(tl.where(bounds == largest, tokens, _NO_ID), 0)
        is_token = tokens == token
        score = tl.max(tl.where(is_token, scores, _NO_SCORE), 0)
        if is_drawn:
            score = score + _noise(tl.sum(tl.where(is_token, words, tl.zeros_like(words)), 0))
        last = tl.max(tl.where(best_scores == worst, best_ids, -1), 0)
        replaced = tl.where((score > worst) | ((score == worst) & (token < last)), last, -1)
        is_replaced = (best_scores == worst) & (best_ids == replaced)
        best_scores = tl.where(is_replaced, score, best_scores)
        best_ids = tl.where(is_replaced, token, best_ids)
        bounds = tl.where(is_token, _NO_SCORE, bounds)
        worst = tl.min(best_scores, 0)
        largest = tl.max(bounds, 0)
    place = (index * num_chunks + tl.program_id(1)) * width + tl.arange(0, width)
    tl.store(chunk_scores + place, best_scores)
    tl.store(chunk_ids + place, best_ids)


@triton.jit(do_not_specialize=["num_entries", "num_wanted"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    ids, scores, chunk_scores, chunk_ids, num_entries, num_wanted, entries: tl.constexpr
):
    """Program (row): sorts the best of its entries in descending order, among equals the lowest ID first."""
    index = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, entries)
    left = tl.load(chunk_scores + index * num_entries + place, mask=place < num_entries, other=_NO_SCORE)
    tokens = tl.load(chunk_ids + index * num_entries + place, mask=place < num_entries, other=_NO_ID)
    for rank in range(num_wanted):
        score = tl.max(left, 0)
        token = tl.min(tl.where(left == score, tokens, _NO_ID), 0)
        token = tl.where(score > _NO_SCORE, token, 0)
        tl.store(ids + index * num_wanted + rank, token.to(tl.int64))
        tl.store(scores + index * num_wanted + rank, score)
        left = tl.where(tokens == token, _NO_SCORE, left)
