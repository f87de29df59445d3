"""`numerics: invariant`: a row's logits have the same bits in any batch and with any chunking.

So decode steps, verify steps, prefill in any chunks and recomputation give the same logits. The output depends only on
prompt, parameters and seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.engine.arithmetic import is_portable
from cluster.engine.batch import Segment
from cluster.engine.cpu_model import CpuModel
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError

_NUM_TOKENS = 45
# Lengths of chunks: one by one as in decoding, then as chunks and verify segments that use different kernels.
_CUTS = ([1] * _NUM_TOKENS, [16, 8, 9, 2, 7, 3], [40, 5])


def check_invariance(runner: ModelRunner) -> None:
    """Runs the model in several batches and compares the logits.

    Raises ConfigurationError if the form of the model is not invariant, or if the logits differ.
    """
    if not runner.model.is_invariant:
        raise ConfigurationError(
            "numerics 'invariant' needs the CPU kernels (built at installation) or, on a GPU, Triton; here "
            "PyTorch's operators would run, which choose a kernel by the number of rows: use numerics 'fast'"
        )
    if isinstance(runner.model, CpuModel) and not is_portable():
        raise ConfigurationError(
            "the CPU kernels compute other bits than on other machines, so numerics 'invariant' does not hold: build "
            "them without CFLAGS such as -ffast-math, or with another compiler"
        )
    token_ids = [1 + i * 7919 % (runner.model.config.vocab_size - 1) for i in range(_NUM_TOKENS)]
    num_blocks = runner.blocks.num_blocks_for(_NUM_TOKENS)
    table, other_table = runner.blocks.allocate(num_blocks), runner.blocks.allocate(num_blocks)
    if table is None or other_table is None:
        raise ConfigurationError(f"kv_cache_bytes is too small to try numerics 'invariant': {2 * num_blocks} blocks")
    try:
        whole = _logits(runner, [Segment(token_ids, 0, table, _NUM_TOKENS)])
        # With the additional rows of `company`, the step uses the kernel for the largest steps.
        company = Segment(token_ids, 0, other_table, num_logits=1)
        found = [_logits(runner, [company, Segment(token_ids, 0, table, _NUM_TOKENS)])[1:]]
        found += (_in_pieces(runner, token_ids, cut, table, other_table) for cut in _CUTS)
        if not all(torch.equal(logits, whole) for logits in found):
            raise ConfigurationError("numerics 'invariant' does not hold on this machine: use numerics 'fast'")
    finally:
        runner.blocks.free(table)
        runner.blocks.free(other_table)


def _in_pieces(
    runner: ModelRunner, token_ids: Sequence[int], cut: Sequence[int], table: Sequence[int], other_table: Sequence[int]
) -> torch.Tensor:
    """Returns the logits of `token_ids`, computed in chunks of the lengths `cut`.

    Most chunks are batched with another sequence.
    """
    logits, start = [], 0
    for length in cut:
        own = Segment(token_ids[start : start + length], start, table, length)
        if company := token_ids[: start % 5]:
            logits.append(_logits(runner, [Segment(company, 0, other_table, num_logits=1), own])[1:])
        else:
            logits.append(_logits(runner, [own]))
        start += length
    return torch.cat(logits)


def _logits(runner: ModelRunner, segments: Sequence[Segment]) -> torch.Tensor:
    """Returns a copy of the step's logits, because recorded steps overwrite theirs."""
    return runner.run(segments).clone()
