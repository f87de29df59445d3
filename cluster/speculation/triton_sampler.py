"""Packs the rows of a step for the kernels of `triton_sampling.py` and `triton_cut.py`, and runs the kernels.

Copies once to the device, and nothing back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from cluster.speculation.device_copy import Words, copy_to
from cluster.speculation.device_noise import signed_word
from cluster.speculation.filters import NO_TOP_P
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import SampleRequest, counts_before
from cluster.speculation.token_counts import TokenCounts
from cluster.speculation.triton_cut import NUM_PASSES, RECORD_WORDS, STEP, best_kernel, narrow_kernel, ties_kernel
from cluster.speculation.triton_sampling import (
    BIAS_STEP,
    CHUNK,
    COLUMNS,
    OPTIONS,
    bias_kernel,
    draw_kernel,
    merge_kernel,
    shape_kernel,
)

_WARM_UP_SIZE, _WARM_UP_WIDTHS = 64, (1, 2, 4, 8)
POSITION, LOGIT_ROW, HAS_FILTER = map(COLUMNS.index, ("position", "logit_row", "has_filter"))
_LEAST_ENTRIES = 512  # minimum entries of a row's chunks: usual vocabularies and widths share one compiled kernel
_LEAST_CHUNKS = 128  # minimum of `max_chunks`: vocabularies of up to 524,288 tokens share one compiled kernel

_COLUMN = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True)
class RowTable:
    """Sampling parameters of every row of logits, on the kernels' device."""

    rows: torch.Tensor  # int64 [num_rows, len(COLUMNS)]
    appendix: torch.Tensor  # int64: biased tokens and their biases, uncounted tokens
    shaped_rows: torch.Tensor  # int64: rows whose logits a bias, a penalty or a mask changes
    masks: torch.Tensor  # int32 [num_masks, mask_words]; one word if there are no masks
    max_biases: int  # maximum number of biases of a row
    has_filter: bool  # a row has min-p, top-k or top-p
    has_top_k: bool
    has_top_p: bool
    counts: tuple[TokenCounts, ...]  # kept alive, because `rows` contains their addresses


def table_of(requests: Sequence[SampleRequest], vocab_size: int, device: torch.device) -> RowTable:
    """Returns a table with the rows of `requests`, in the order of `requests`."""
    num_rows = sum(request.num_rows for request in requests)
    rows = np.zeros((num_rows, len(COLUMNS)), dtype=np.int64)
    appendix: list[Words] = []
    appendix_len = 0
    shaped_rows: list[int] = []
    counted: list[TokenCounts] = []
    masks = [request.allowed for request in requests if request.allowed is not None]
    num_masked = start = max_biases = 0

    def append(words: Words) -> int:
        nonlocal appendix_len
        appendix.append(words)
        appendix_len += len(words)
        return appendix_len - len(words)

    for request in requests:
        params, end = request.params, start + request.num_rows
        own, place = rows[start:end], np.arange(request.num_rows)
        own[:] = row_of(params, request.noise_key)
        own[:, POSITION] = request.first_position + place
        own[:, LOGIT_ROW] = start + place
        if request.allowed is not None:
            own[:, _COLUMN["mask_row"]] = num_masked + place
            num_masked += request.num_rows
        if params.logit_bias:
            own[:, _COLUMN["bias_start"]] = append(_biases(params.logit_bias))
            max_biases = max(max_biases, len(params.logit_bias))
        if params.has_penalty:
            counts, tail, num_added = counts_before(request, vocab_size, device)
            counted.append(counts)
            own[:, _COLUMN["in_prompt"]] = counts.in_prompt.data_ptr()
            own[:, _COLUMN["generated"]] = counts.generated.data_ptr()
            tail_start = append(np.array(tail, dtype=np.int64))
            own[:, _COLUMN["tail_start"]] = tail_start
            own[:, _COLUMN["tail_end"]] = tail_start + num_added + place
        if request.allowed is not None or params.logit_bias or params.has_penalty:
            own[:, _COLUMN["source"]] = len(shaped_rows) + place
            shaped_rows.extend(range(start, end))
        start = end

    filters = [request.params for request in requests if request.params.has_filter]
    mask_words = max(masks[0].shape[1], 1) if masks else 1
    num_masks = max(num_masked, 1)
    mask_bits = np.zeros(num_masks * mask_words + num_masks * mask_words % 2, dtype=np.int32)  # whole int64
    if masks:
        torch.cat(masks, out=torch.from_numpy(mask_bits)[: num_masks * mask_words].view(num_masks, mask_words))
    on_device = copy_to(
        device,
        [
            rows,
            shaped_rows,
            mask_bits.view(np.int64),
            np.concatenate(appendix) if appendix else [],
        ],
    )
    return RowTable(
        rows=on_device[0],
        shaped_rows=on_device[1],
        masks=on_device[2].view(torch.int32)[: num_masks * mask_words].view(num_masks, mask_words),
        appendix=on_device[3],
        max_biases=max_biases,
        has_filter=bool(filters),
        has_top_k=any(params.top_k > 0 for params in filters),
        has_top_p=any(params.top_p < 1.0 for params in filters),
        counts=tuple(counted),
    )


def empty_table(num_rows: int, device: torch.device) -> RowTable:
    """Returns a table of greedy rows. The caller may overwrite them with rows of requests without penalties."""
    rows = np.tile(_columns_of(SamplingParams(temperature=0.0)), (num_rows, 1))
    rows[:, LOGIT_ROW] = np.arange(num_rows)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    no_masks = torch.zeros(1, 1, dtype=torch.int32, device=device)
    on_device = torch.from_numpy(rows).to(device)
    return RowTable(
        on_device, nothing, nothing, no_masks, 0, has_filter=True, has_top_k=True, has_top_p=True, counts=()
    )


def row_of(params: SamplingParams, noise_key: NoiseKey) -> Words:
    """Returns the columns that all rows of a request share; the columns of biases, penalties and masks stay empty."""
    row = _columns_of(params).copy()
    row[_COLUMN["key_low"]], row[_COLUMN["key_high"]] = signed_word(noise_key.low), signed_word(noise_key.high)
    return row


def best_tokens(
    logits: torch.Tensor, requests: Sequence[SampleRequest], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implements `Sampler.best_tokens` for logits on a GPU."""
    return draw(logits, table_of(requests, logits.shape[-1], logits.device), width)


def warm_up(device: torch.device) -> None:
    """Compiles the kernels, so that timed steps do not include the compilation."""
    shaped = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, repetition_penalty=1.1, logit_bias=((1, 1.0),))
    logits = torch.zeros(1, _WARM_UP_SIZE, device=device)
    for width in _WARM_UP_WIDTHS:
        best_tokens(logits, [SampleRequest(shaped, NoiseKey(0, 0), [0], 1)], width)


def draw(logits: torch.Tensor, table: RowTable, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `width` best tokens of every row of `table`: int64 IDs and float32 scores, [num_rows, width] each.

    `logits` [num_rows, vocab_size], any float dtype, rows contiguous. Reads nothing back from the device.
    """
    vocab_size, device = logits.shape[-1], logits.device
    num_rows, num_shaped, stride = len(table.rows), len(table.shaped_rows), logits.stride(0)
    assert len(logits) >= num_rows, "rows and requests disagree"
    shaped = torch.empty(max(1, num_shaped), vocab_size if num_shaped else 1, device=device)
    inputs = (shaped, logits, table.rows)
    if num_shaped:
        further = (table.shaped_rows, table.masks, table.appendix, stride, vocab_size, table.masks.shape[1])
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        shape_kernel[(num_shaped, num_chunks)](*inputs, *further, chunk=CHUNK, **OPTIONS)
        if table.max_biases:
            num_steps = triton.cdiv(table.max_biases, BIAS_STEP)
            bias_kernel[(num_shaped, num_steps)](*inputs, *further, step=BIAS_STEP, **OPTIONS)
    cuts = _cut(logits, table, shaped)
    return _draw(logits, table, cuts, shaped, width)


def _cut(logits: torch.Tensor, table: RowTable, shaped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's cut, and the number of each chunk's tokens at the cut, as `ties_kernel` writes them.

    The number of launches depends on which filters the table has, not on the logits. Every call allocates and zeroes
    the sums, so a recorded graph has its own.
    """
    num_rows, vocab_size, device = len(table.rows), logits.shape[-1], logits.device
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    num_cuts = num_rows if table.has_filter else 1
    cuts = torch.empty(num_cuts, 3, dtype=torch.int32, device=device)
    chunk_equals = torch.empty(num_cuts, num_chunks, dtype=torch.int32, device=device)
    if table.has_filter:
        grid = (num_rows, num_chunks)
        records = torch.zeros(num_rows, RECORD_WORDS, dtype=torch.int64, device=device)
        inputs = (records, shaped, logits, table.rows, logits.stride(0), vocab_size)
        best_kernel[grid](*inputs, chunk=CHUNK, **OPTIONS)
        for by_weight, is_on in ((False, table.has_top_k), (True, table.has_top_p)):
            for level in range(NUM_PASSES if is_on else 0):
                narrow_kernel[grid](*inputs, level, by_weight=by_weight, chunk=CHUNK, step=STEP, **OPTIONS)
        ties_kernel[grid](cuts, chunk_equals, *inputs, num_chunks, chunk=CHUNK, **OPTIONS)
    return cuts, chunk_equals


def _draw(
    logits: torch.Tensor, table: RowTable, cuts: tuple[torch.Tensor, torch.Tensor], shaped: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size, num_rows, device = logits.shape[-1], len(table.rows), logits.device
    num_chunks, padded_width = triton.cdiv(vocab_size, CHUNK), triton.next_power_of_2(width)
    shape = (num_rows, num_chunks, padded_width)
    chunk_scores = torch.empty(shape, device=device)
    chunk_ids = torch.empty(shape, dtype=torch.int32, device=device)
    draw_kernel[(num_rows, num_chunks)](
        *(chunk_scores, chunk_ids, *cuts, shaped, logits, table.rows, logits.stride(0), vocab_size, num_chunks),
        chunk=CHUNK,
        width=padded_width,
        max_chunks=max(_LEAST_CHUNKS, triton.next_power_of_2(num_chunks)),
        **OPTIONS,
    )
    ids = torch.empty(num_rows, width, dtype=torch.int64, device=device)
    scores = torch.empty(num_rows, width, device=device)
    num_entries = num_chunks * padded_width
    merge_kernel[(num_rows,)](
        *(ids, scores, chunk_scores, chunk_ids, num_entries, width),
        entries=max(_LEAST_ENTRIES, triton.next_power_of_2(num_entries)),
        **OPTIONS,
    )
    return ids, scores


@functools.lru_cache(maxsize=1024)  # parameters of running sequences
def _columns_of(params: SamplingParams) -> Words:
    """Returns the columns that are the same for all rows of a request with `params`."""
    row = np.zeros(len(COLUMNS), dtype=np.int64)
    row[[_COLUMN["source"], _COLUMN["mask_row"]]] = -1
    numbers = {
        "temperature": 0.0 if params.is_greedy else params.temperature,
        "min_p": params.min_p,
        "top_p": params.top_p if params.top_p < 1.0 else NO_TOP_P,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
    }
    for name, number in numbers.items():
        row[_COLUMN[name]] = _bits(number)
    row[_COLUMN["top_k"]] = params.top_k
    row[_COLUMN["num_biases"]] = len(params.logit_bias)
    row[_COLUMN["has_filter"]] = params.has_filter
    return row


@functools.lru_cache(maxsize=1024)
def _biases(logit_bias: tuple[tuple[int, float], ...]) -> Words:
    """Returns the tokens, then the bits of their biases."""
    token_ids, biases = zip(*logit_bias, strict=True)
    return np.array([*token_ids, *map(_bits, biases)], dtype=np.int64)


def _bits(number: float) -> int:
    """Returns the bits of the float32 nearest to `number`."""
    return int(np.float32(number).view(np.int32))
