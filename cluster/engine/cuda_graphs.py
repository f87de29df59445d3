"""Steps of a few shapes, recorded once and replayed: a step of a small batch is otherwise spent launching kernels.

A step is padded to the next shape of a ladder (rows, segments, context) and copied into that shape's tensors. Rows that
pad it write to the spare block, which no sequence has; their logits are not read. The first replay of every shape is
compared with the same step computed directly: a graph that does not agree is not used, and an error is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch

logger = logging.getLogger(__name__)

_MAX_ROWS = 512  # larger steps are bound by arithmetic, not by launches
_MAX_DIFFERENCE = 0.05  # of logits, relative to the largest: other kernels for padded shapes round otherwise


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a recorded step has room for."""

    num_rows: int
    num_logit_rows: int
    num_segments: int
    max_rows: int  # of one segment
    num_table_blocks: int  # of one segment's context

    @classmethod
    def of(cls, batch: Batch) -> StepShape:
        """The smallest shape of the ladder that holds `batch`."""
        return cls(
            num_rows=_rung(len(batch.token_ids)),
            num_logit_rows=_rung(len(batch.logit_rows)),
            num_segments=_rung(len(batch.context_lens)),
            max_rows=_rung(batch.max_rows),
            num_table_blocks=_rung(batch.block_tables.shape[1]),
        )

    def pad(self, batch: Batch, spare_block: int, block_size: int) -> Batch:
        """`batch` in this shape. Chains only."""
        assert batch.paths is None
        more_rows = self.num_rows - len(batch.token_ids)
        more_segments = self.num_segments - len(batch.context_lens)
        more_blocks = self.num_table_blocks - batch.block_tables.shape[1]
        return Batch(
            token_ids=F.pad(batch.token_ids, (0, more_rows)),
            positions=F.pad(batch.positions, (0, more_rows)),
            slots=F.pad(batch.slots, (0, more_rows), value=spare_block * block_size),
            logit_rows=F.pad(batch.logit_rows, (0, self.num_logit_rows - len(batch.logit_rows))),
            # Segments that are not there have no rows: they begin where the last one ends.
            row_starts=torch.cat([batch.row_starts, batch.row_starts[-1:].expand(more_segments)]),
            context_lens=F.pad(batch.context_lens, (0, more_segments)),
            prefix_lens=F.pad(batch.prefix_lens, (0, more_segments)),
            block_tables=F.pad(batch.block_tables, (0, more_blocks, 0, more_segments), value=spare_block),
            paths=None,
            max_rows=batch.max_rows,
        )


def _rung(number: int) -> int:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, ...: from 8 on at most a third is padding."""
    rung = 1
    while rung < number:
        if rung >= 8 and rung * 3 // 2 >= number:
            return rung * 3 // 2
        rung *= 2
    return rung


@dataclass(slots=True)
class _Recorded:
    inputs: Batch
    logits: torch.Tensor
    graph: torch.cuda.CUDAGraph


class GraphRunner:
    """Replays `compute(batch, shape)` for the shapes it has seen; records one the first time."""

    def __init__(self, compute: Callable[[Batch, StepShape], torch.Tensor], spare_block: int, block_size: int) -> None:
        self._compute = compute
        self._spare_block = spare_block
        self._block_size = block_size
        self._recorded: dict[StepShape, _Recorded | None] = {}  # None: not used
        self._pool: Any = None  # of memory, shared by all graphs

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits of the step [num_logit_rows, vocab_size]; None when it must be computed directly."""
        if batch.paths is not None or len(batch.token_ids) > _MAX_ROWS:
            return None
        shape = StepShape.of(batch)
        padded = shape.pad(batch, self._spare_block, self._block_size)
        if shape not in self._recorded:
            self._recorded[shape] = self._record(padded, shape)
        recorded = self._recorded[shape]
        if recorded is None:
            return None
        for field in fields(Batch):
            value = getattr(padded, field.name)
            if isinstance(value, torch.Tensor):
                getattr(recorded.inputs, field.name).copy_(value)
        recorded.graph.replay()
        return recorded.logits[: len(batch.logit_rows)]

    def _record(self, padded: Batch, shape: StepShape) -> _Recorded | None:
        expected = self._compute(padded, shape)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up in the first calls, which cannot be recorded
            for _ in range(2):
                self._compute(padded, shape)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._compute(padded, shape)
        self._pool = graph.pool()
        graph.replay()
        difference = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not difference <= _MAX_DIFFERENCE:
            logger.error("the CUDA graph of %s differs by %g from what it recorded; not used", shape, difference)
            return None
        return _Recorded(padded, logits, graph)
