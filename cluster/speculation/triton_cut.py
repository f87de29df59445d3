"""Finds the cut of each row's filters on a GPU, with kernels that search all chunks of a row in parallel.

    best     finds the best score
    narrow   sums the tokens in each of 16 parts of an interval of orders: one pass of a search
    ties     writes the cut, and counts each chunk's tokens at the cut if only some of them stay

The order of a score is an integer that compares like the score (`order_of`). Top-k and top-p each search for the
highest order such that the tokens with this order or a higher one reach a limit: `top_k` tokens, or a share `top_p` of
the weights that min-p and top-k left. A pass divides an interval of orders into 16 parts. The next pass continues in
one of the parts, which it finds from the sums. Eight passes cover 32 bits.

A pass takes about 50 instructions per token for score and weight, and 4 per token and part. So 3 or 4 bits a pass take
the fewest instructions, and 4 bits need fewer passes. Chunks add integers to the row's sums, so the order of the
additions does not matter. The number of launches does not depend on the scores, and no program waits for another, so
recorded graphs may contain the kernels. Programs of rows without the filter return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cluster.speculation.triton_sampling import (
    ALL_EQUAL,
    HAS_FILTER,
    NO_SCORE,
    TOP_K,
    TOP_P,
    WIDTH,
    least_weight,
    number,
    order_of,
    score_of,
    scores_of,
    weights_of,
)

STEP = 512  # tokens that a program sums at once: with more, the sums of 16 parts do not fit into registers
NUM_PASSES = 8  # passes of a search: 32 bits of an order, 4 bits a pass
_LAST = tl.constexpr(NUM_PASSES - 1)
_BITS = tl.constexpr(4)
_PARTS = tl.constexpr(16)

# A row has these int64 words, all zero before the first pass: a record of each pass that counts tokens, a record of
# each pass that sums weights, and the best order. A record has 256 bytes, a multiple of a memory transaction.
_RECORD = tl.constexpr(32)
_SEARCH = tl.constexpr(NUM_PASSES * 32)
RECORD_WORDS = (2 * NUM_PASSES + 1) * 32
_ROW = tl.constexpr(RECORD_WORDS)
# Words of a record. Word i of the first 16 is the sum of the tokens in part i of the interval or in a higher part.
_START = tl.constexpr(16)  # first order of the interval
_ABOVE = tl.constexpr(17)  # sum of the tokens above the interval
_REMOVED = tl.constexpr(18)  # weight that the first pass includes in word 0 although top-k removes it


@triton.jit
def _has_top_k(row, vocab_size):  # type: ignore[no-untyped-def]
    top_k = tl.load(row + TOP_K)
    return (tl.load(row + HAS_FILTER) != 0) & (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _has_top_p(row):  # type: ignore[no-untyped-def]
    return (tl.load(row + HAS_FILTER) != 0) & (number(row, TOP_P) < 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _limit(row, search, by_weight: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sum that a search must reach. For top-p, requires the sums of the first pass by weight."""
    if by_weight:
        total = tl.load(search) - tl.load(search + _REMOVED)
        limit = tl.maximum(number(row, TOP_P).to(tl.float64) * total.to(tl.float64), 1.0)  # the best token always stays
    else:
        limit = tl.load(row + TOP_K).to(tl.float64)
    return limit


@triton.jit  # type: ignore[untyped-decorator]
def _narrowed(row, search, level, by_weight: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the part in which the search continues after pass `level`.

    It is given by its first order, the sum of the tokens above it, and the sum of the tokens in it. If all tokens
    together do not reach the limit, it is the lowest part, and after the last pass it has no tokens.
    """
    record = search + level * _RECORD
    parts = tl.arange(0, _PARTS)
    sums = tl.load(record + parts)
    above = tl.load(record + _ABOVE)
    is_reached = (above + sums).to(tl.float64) >= _limit(row, search, by_weight)
    part = tl.maximum(tl.sum(is_reached.to(tl.int64), 0) - 1, 0)
    in_part_or_higher = tl.sum(tl.where(parts == part, sums, 0), 0)
    higher = tl.sum(tl.where(parts == part + 1, sums, 0), 0)
    start = tl.load(record + _START) + (part << (32 - (level + 1) * _BITS))
    return start, above + higher, in_part_or_higher - higher


@triton.jit
def _best(records):  # type: ignore[no-untyped-def]
    return score_of(tl.load(records + 2 * _SEARCH).to(tl.uint32))


@triton.jit
def _weight_of(order, best):  # type: ignore[no-untyped-def]
    scores = score_of(order.to(tl.uint32)) + tl.zeros([1], tl.float32)
    return tl.sum(weights_of(scores, best), 0)


@triton.jit(do_not_specialize=["logit_stride", "vocab_size"])  # type: ignore[untyped-decorator]
def best_kernel(  # type: ignore[no-untyped-def]
    records, shaped, logits, table, logit_stride, vocab_size, chunk: tl.constexpr
):
    """Program (row, chunk): updates the row's best order with that of the chunk."""
    row = table + tl.program_id(0) * WIDTH
    if tl.load(row + HAS_FILTER) == 0:
        return
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    scores = scores_of(row, shaped, logits, logit_stride, vocab_size, tokens)
    best = order_of(tl.max(scores, 0)).to(tl.int64)
    tl.atomic_max(records + tl.program_id(0) * _ROW + 2 * _SEARCH, best, sem="relaxed")


@triton.jit(do_not_specialize=["logit_stride", "vocab_size", "level"])  # type: ignore[untyped-decorator]
def narrow_kernel(  # type: ignore[no-untyped-def]
    records, shaped, logits, table, logit_stride, vocab_size, level,
    by_weight: tl.constexpr, chunk: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): adds the chunk's tokens to the sums of pass `level` of a search.

    Sums weights if `by_weight` (top-p), otherwise counts tokens (top-k).
    """
    row = table + tl.program_id(0) * WIDTH
    is_on = _has_top_p(row) if by_weight else _has_top_k(row, vocab_size)
    if is_on == 0:
        return
    records += tl.program_id(0) * _ROW
    search = records + by_weight * _SEARCH
    best = _best(records)
    start, above, removed = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    lowest = tl.zeros([], tl.int64)  # lowest order that counts
    if level > 0:
        start, above, _ = _narrowed(row, search, level - 1, by_weight)
    elif by_weight:  # noqa: SIM102  (Triton evaluates `by_weight` when it compiles)
        if _has_top_k(row, vocab_size):
            lowest, num_above, num_equal = _narrowed(row, records, _LAST, False)
            num_removed = num_above + num_equal - tl.load(row + TOP_K)
            if num_removed > 0:
                removed = num_removed * _weight_of(lowest, best)
    if tl.program_id(1) == 0:
        tl.store(search + level * _RECORD + _START, start)
        tl.store(search + level * _RECORD + _ABOVE, above)
        tl.store(search + level * _RECORD + _REMOVED, removed)

    parts = tl.arange(0, _PARTS)
    least = least_weight(row)
    shift = (32 - (level + 1) * _BITS).to(tl.uint32)
    sums = tl.zeros([_PARTS, step], tl.int64 if by_weight else tl.int32)
    first_token = tl.program_id(1) * chunk
    for first in range(first_token, tl.minimum(first_token + chunk, vocab_size), step):
        scores = scores_of(row, shaped, logits, logit_stride, vocab_size, first + tl.arange(0, step))
        order = order_of(scores)
        part = (order - start.to(tl.uint32)) >> shift  # at least 16 outside the interval, because the difference wraps
        counts = (scores > NO_SCORE) & (part < _PARTS) & (order >= lowest.to(tl.uint32))
        if by_weight:
            weights = weights_of(scores, best)
            counts = counts & (weights >= least)
            part = tl.where(counts, part.to(tl.int32), -1)
            sums += tl.where(part[None, :] >= parts[:, None], weights[None, :], 0)
        else:
            if least > 0:
                counts = counts & (weights_of(scores, best) >= least)
            part = tl.where(counts, part.to(tl.int32), -1)
            sums += (part[None, :] >= parts[:, None]).to(tl.int32)
    tl.atomic_add(search + level * _RECORD + parts, tl.sum(sums, 1).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["logit_stride", "vocab_size", "num_chunks"])  # type: ignore[untyped-decorator]
def ties_kernel(  # type: ignore[no-untyped-def]
    cuts, chunk_equals, records, shaped, logits, table, logit_stride, vocab_size, num_chunks, chunk: tl.constexpr
):
    """Program (row, chunk): counts the chunk's tokens at the cut; the first chunk writes the cut, int32 [num_rows, 3].

    A cut has the bits of the best score, an order, and the number of tokens with this order that stay. Tokens with a
    lower order are removed. If all tokens with this order stay, that number is `ALL_EQUAL` and they are not counted.
    """
    index = tl.program_id(0)
    row = table + index * WIDTH
    if tl.load(row + HAS_FILTER) == 0:
        return
    records += index * _ROW
    best = _best(records)
    cut_order, num_equal = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + ALL_EQUAL
    if _has_top_k(row, vocab_size):
        cut_order, above, equal = _narrowed(row, records, _LAST, False)
        num_left = tl.load(row + TOP_K) - above
        num_equal = tl.where(equal > num_left, num_left, num_equal)
    if _has_top_p(row):
        search = records + _SEARCH
        order, above, equal = _narrowed(row, search, _LAST, True)
        num_equal = tl.where(order > cut_order, tl.zeros([], tl.int64) + ALL_EQUAL, num_equal)
        cut_order = order
        if equal > 0:
            weight = _weight_of(order, best)
            limit = _limit(row, search, True)
            # Count the tokens of that order whose preceding sum is below the limit. The first one always stays.
            first_out, last_out = tl.zeros([], tl.int64) + 1, tl.zeros([], tl.int64) + vocab_size
            if equal == weight:
                last_out = first_out
            while first_out < last_out:
                middle = first_out + ((last_out - first_out) >> 1)
                is_less = (above + middle * weight).to(tl.float64) < limit
                first_out = tl.where(is_less, middle + 1, first_out)
                last_out = tl.where(is_less, last_out, middle)
            num_equal = tl.where(first_out * weight < equal, tl.minimum(num_equal, first_out), num_equal)
    if tl.program_id(1) == 0:
        tl.store(cuts + index * 3, best.to(tl.int32, bitcast=True))
        tl.store(cuts + index * 3 + 1, cut_order.to(tl.uint32).to(tl.int32, bitcast=True))
        tl.store(cuts + index * 3 + 2, num_equal.to(tl.int32))
    if num_equal < ALL_EQUAL:
        tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
        scores = scores_of(row, shaped, logits, logit_stride, vocab_size, tokens)
        is_equal = order_of(scores) == cut_order.to(tl.uint32)
        tl.store(chunk_equals + index * num_chunks + tl.program_id(1), tl.sum(is_equal.to(tl.int32), 0))
