"""Samples on a GPU in Triton: the kernels shape and filter logits, make the noise and draw.

    shape    applies bias, penalties and masks to the rows that have any of these
    (the kernels of `triton_cut.py` find the cut of each row's filters)
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
TOP_K = tl.constexpr(12)
_TEMPERATURE = tl.constexpr(13)
_MIN_P = tl.constexpr(14)
TOP_P = tl.constexpr(15)
_REPETITION = tl.constexpr(16)
_FREQUENCY = tl.constexpr(17)
_PRESENCE = tl.constexpr(18)
HAS_FILTER = tl.constexpr(19)

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

NO_SCORE = tl.constexpr(float("-inf"))
_NO_ID = tl.constexpr(2**30)
ALL_EQUAL = tl.constexpr(2**30)  # larger than any vocabulary: a cut with this number keeps all tokens of its order


@triton.jit
def number(row, column):  # type: ignore[no-untyped-def]
    """Returns the float32 in a column."""
    return tl.load(row + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _shaped(value, tokens, bias, row, appendix, allowed, mask_words, is_there):  # type: ignore[no-untyped-def]
    """Returns `value`, the logits of `tokens`, shaped as the row's request asks, including temperature."""
    mask_row = tl.load(row + _MASK_ROW)
    if mask_row >= 0:
        word = tl.load(allowed + mask_row * mask_words + tokens // 32, mask=is_there, other=0)
        value = tl.where(((word >> (tokens % 32)) & 1) == 1, value, NO_SCORE)
    value = value + bias
    in_prompt = tl.load(row + _IN_PROMPT)
    if in_prompt != 0:
        counts = tl.load(row + _GENERATED).to(tl.pointer_type(tl.float32))
        generated = tl.load(counts + tokens, mask=is_there, other=0.0)
        for place in range(tl.load(row + _TAIL_START), tl.load(row + _TAIL_END)):
            generated += tl.where(tokens == tl.load(appendix + place), 1.0, 0.0)
        is_generated = generated > 0
        is_known = tl.load(in_prompt.to(tl.pointer_type(tl.int8)) + tokens, mask=is_there, other=0) != 0
        penalty = number(row, _REPETITION)
        lowered = tl.where(value > 0, tl.div_rn(value, penalty + tl.zeros_like(value)), value * penalty)
        value = tl.where(is_known | is_generated, lowered, value)
        value = value - generated * number(row, _FREQUENCY)
        value = value - tl.where(is_generated, number(row, _PRESENCE), 0.0)
    temperature = number(row, _TEMPERATURE)
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
def scores_of(row, shaped, logits, logit_stride, vocab_size, tokens):  # type: ignore[no-untyped-def]
    """Returns the shaped logits of `tokens`, before the filters of the row's request; -inf past the vocabulary."""
    is_there = tokens < vocab_size
    source = tl.load(row + _SOURCE)
    if source >= 0:
        value = tl.load(shaped + source * vocab_size + tokens, mask=is_there, other=NO_SCORE)
    else:
        value = tl.load(logits + tl.load(row + _LOGIT_ROW) * logit_stride + tokens, mask=is_there, other=NO_SCORE)
        value = value.to(tl.float32)
        temperature = number(row, _TEMPERATURE)
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
        value = tl.div_rn(value, divisor + tl.zeros_like(value))
    return value


@triton.jit
def weights_of(scores, best):  # type: ignore[no-untyped-def]
    """Computes `filters.weights`, operation by operation."""
    from_best = tl.where(scores == best, 0.0, scores - best)
    distance = tl.where(scores > NO_SCORE, from_best, _LOWEST)
    distance = tl.maximum(distance, _LOWEST)
    power = tl.floor(distance * _LOG2_E + 0.5)
    rest = (distance - power * _LN2_HIGH) - power * _LN2_LOW
    polynomial = _COEFFICIENT_0 * rest + _COEFFICIENT_1
    polynomial = polynomial * rest + _COEFFICIENT_2
    polynomial = polynomial * rest + _COEFFICIENT_3
    polynomial = polynomial * rest + _COEFFICIENT_4
    polynomial = polynomial * rest + _COEFFICIENT_5
    mantissa = (polynomial * (rest * rest) + rest) + 1.0
    integer = (mantissa * _ONE).to(tl.int32).to(tl.int64) << _SHIFT  # GPUs convert to int64 slowly
    return integer >> tl.minimum(0.0 - power, 63.0).to(tl.int32).to(tl.int64)


@triton.jit
def order_of(scores):  # type: ignore[no-untyped-def]
    """Returns uint32 numbers that compare like `scores`, equal for equal scores. No score has the number 0."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(scores < 0.0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def score_of(order):  # type: ignore[no-untyped-def]
    """Returns the score, a scalar, that has this order."""
    bits = order ^ tl.where(order >= 0x80000000, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def least_weight(row):  # type: ignore[no-untyped-def]
    """Returns the minimum weight of the tokens that min-p keeps; 0 without min-p."""
    return tl.ceil(number(row, _MIN_P).to(tl.float64) * _BEST_WEIGHT).to(tl.int64)


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
    chunk_scores, chunk_ids, cuts, chunk_equals, shaped, logits, table, logit_stride, vocab_size, num_chunks,
    chunk: tl.constexpr, width: tl.constexpr, max_chunks: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): finds the `width` best tokens of the chunk, in no order."""
    index = tl.program_id(0)
    row = table + index * WIDTH
    block = tl.program_id(1) * (chunk // 8) + tl.arange(0, chunk // 8)
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    scores = scores_of(row, shaped, logits, logit_stride, vocab_size, tokens)
    if tl.load(row + HAS_FILTER) != 0:
        best = tl.load(cuts + index * 3).to(tl.float32, bitcast=True)
        cut_order = tl.load(cuts + index * 3 + 1).to(tl.uint32, bitcast=True)
        num_equal = tl.load(cuts + index * 3 + 2)
        order = order_of(scores)
        is_equal = order == cut_order
        if num_equal < ALL_EQUAL:  # the tokens with the lowest IDs stay
            chunks = tl.arange(0, max_chunks)
            is_before = chunks < tl.program_id(1)
            num_before = tl.sum(tl.load(chunk_equals + index * num_chunks + chunks, mask=is_before, other=0), 0)
            is_equal = is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal - num_before)
        kept = ((order > cut_order) | is_equal) & (weights_of(scores, best) >= least_weight(row))
        scores = tl.where(kept, scores, NO_SCORE)
    bounds = scores
    words = tl.zeros([chunk], tl.uint32)
    is_drawn = number(row, _TEMPERATURE) > 0.0
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
    best_scores = tl.full([width], NO_SCORE, tl.float32)
    best_ids = _NO_ID + tl.arange(0, width)
    worst = tl.min(best_scores, 0)
    largest = tl.max(bounds, 0)
    while (largest > NO_SCORE) & (largest >= worst):
        token = tl.min(tl.where(bounds == largest, tokens, _NO_ID), 0)
        is_token = tokens == token
        score = tl.max(tl.where(is_token, scores, NO_SCORE), 0)
        if is_drawn:
            score = score + _noise(tl.sum(tl.where(is_token, words, tl.zeros_like(words)), 0))
        last = tl.max(tl.where(best_scores == worst, best_ids, -1), 0)
        replaced = tl.where((score > worst) | ((score == worst) & (token < last)), last, -1)
        is_replaced = (best_scores == worst) & (best_ids == replaced)
        best_scores = tl.where(is_replaced, score, best_scores)
        best_ids = tl.where(is_replaced, token, best_ids)
        bounds = tl.where(is_token, NO_SCORE, bounds)
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
    left = tl.load(chunk_scores + index * num_entries + place, mask=place < num_entries, other=NO_SCORE)
    tokens = tl.load(chunk_ids + index * num_entries + place, mask=place < num_entries, other=_NO_ID)
    for rank in range(num_wanted):
        score = tl.max(left, 0)
        token = tl.min(tl.where(left == score, tokens, _NO_ID), 0)
        token = tl.where(score > NO_SCORE, token, 0)
        tl.store(ids + index * num_wanted + rank, token.to(tl.int64))
        tl.store(scores + index * num_wanted + rank, score)
        left = tl.where(tokens == token, NO_SCORE, left)
