"""Steps of a few sizes, recorded as CUDA graphs before the first request, so that no timed step records one.

All sizes share one output and the inputs of the largest size. A step runs in the graph of the next larger size: its
tensors are copied into the first rows of the inputs, which have room for one segment per row. The remaining rows are
padding: they write to the spare block, which no sequence uses, and belong to no segment. Their logits are not read.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from cluster.engine.batch import Batch

logger = logging.getLogger(__name__)

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"Turns a call into one that repeats it on the same memory."


class StepGraphs:
    """Recorded steps of one model. Supports only chains."""

    def __init__(
        self,
        compute: Callable[[Batch], torch.Tensor],
        sizes: Sequence[int],
        num_table_blocks: int,
        spare_slot: int,
        vocab_size: int,
        device: torch.device,
        record: Recorder,
    ) -> None:
        """`compute`: returns the logits of a batch whose tensors keep their addresses.

        `num_table_blocks`: blocks of the longest context.
        """
        self.sizes = sorted(sizes)
        self._spare_slot = spare_slot
        largest = self.sizes[-1]

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._inputs = Batch(
            token_ids=numbers(largest),
            positions=numbers(largest),
            slots=numbers(largest),
            logit_rows=numbers(largest),
            row_starts=numbers(largest + 1),
            context_lens=numbers(largest),
            prefix_lens=numbers(largest),
            block_tables=numbers(largest, num_table_blocks),
            paths=None,
            max_rows=1,
        )
        self._inputs.slots.fill_(spare_slot)
        self._logits = torch.empty(largest, vocab_size, device=device)
        # The largest size is recorded first, so that the others reuse its memory.
        self._steps = {size: record(self._step(compute, size)) for size in reversed(self.sizes)}

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Returns the step's logits [num_logit_rows, vocab_size], which are valid until the next step runs.

        Returns None without running the step if it is too large, has a tree, or has too long a context.
        """
        num_rows = len(batch.token_ids)
        index = bisect_left(self.sizes, num_rows)
        too_long = batch.block_tables.shape[1] > self._inputs.block_tables.shape[1]
        if index == len(self.sizes) or batch.paths is not None or too_long:
            return None
        size = self.sizes[index]
        self._take(batch, size)
        self._steps[size]()
        return self._logits[: len(batch.logit_rows)]

    def _step(self, compute: Callable[[Batch], torch.Tensor], size: int) -> Callable[[], None]:
        view = first_rows(self._inputs, size)

        def step() -> None:
            self._logits[:size].copy_(compute(view))

        return step

    def _take(self, batch: Batch, size: int) -> None:
        """Copies `batch` into the inputs, and makes the remaining rows padding."""
        inputs, num_rows, num_segments = self._inputs, len(batch.token_ids), len(batch.context_lens)
        inputs.token_ids[:num_rows].copy_(batch.token_ids)
        inputs.positions[:num_rows].copy_(batch.positions)
        inputs.slots[:num_rows].copy_(batch.slots)
        inputs.slots[num_rows:size].fill_(self._spare_slot)
        inputs.logit_rows[: len(batch.logit_rows)].copy_(batch.logit_rows)
        inputs.logit_rows[len(batch.logit_rows) : size].fill_(0)
        # Unused segments have no rows: they begin at the end of the last segment.
        inputs.row_starts[: num_segments + 1].copy_(batch.row_starts)
        inputs.row_starts[num_segments + 1 : size + 1].fill_(num_rows)
        inputs.context_lens[:num_segments].copy_(batch.context_lens)
        inputs.prefix_lens[:num_segments].copy_(batch.prefix_lens)
        inputs.block_tables[:num_segments, : batch.block_tables.shape[1]].copy_(batch.block_tables)


def first_rows(inputs: Batch, size: int) -> Batch:
    """Returns a batch of views of `inputs`, with `size` rows and `size` segments."""
    return Batch(
        token_ids=inputs.token_ids[:size],
        positions=inputs.positions[:size],
        slots=inputs.slots[:size],
        logit_rows=inputs.logit_rows[:size],
        row_starts=inputs.row_starts[: size + 1],
        context_lens=inputs.context_lens[:size],
        prefix_lens=inputs.prefix_lens[:size],
        block_tables=inputs.block_tables[:size],
        paths=None,
        max_rows=1,
    )


class CudaRecorder:
    """Records calls as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # first calls compile kernels and initialize libraries, which cannot be recorded
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            call()
        replay: Callable[[], None] = graph.replay
        return replay
