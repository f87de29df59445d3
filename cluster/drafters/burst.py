"""Runs several draft steps without the host: each step draws its tokens on the device, as input of the next step.

A step of each size, including sampling, is recorded once as a graph, and replayed for every further token. The values
that change from step to step (tokens, positions, slots and the noise's counter) are on the device and are updated
there. The host waits once, at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from cluster.drafters.proposable import Proposable
from cluster.engine.batch import Batch
from cluster.engine.graph_memory import graph_sizes
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.engine.step_graphs import Recorder, first_rows
from cluster.engine.triton_model import TritonModel
from cluster.speculation.device_copy import copy_to
from cluster.speculation.sampling import SampleRequest
from cluster.speculation.triton_sampler import HAS_FILTER, POSITION, RowTable, draw, empty_table, table_of
from cluster.vocabulary_map import VocabularyMap

MAX_STEPS = 65  # tokens that a burst returns: speculation.max_speculative_tokens is at most 64


class Burst:
    """Recorded steps of one model, with a row for each sequence. Supports only chains without penalties."""

    def __init__(
        self, model: TritonModel, limits: StepLimits, record: Recorder, vocabulary: VocabularyMap | None = None
    ) -> None:
        self._sizes = graph_sizes(limits.max_num_seqs)
        self._proposable = Proposable(vocabulary, model.device)
        self._vocab_size, self._device = model.config.vocab_size, model.device
        self._block_size, self._spare_slot = model.block_size, model.spare_slot
        largest = self._sizes[-1]

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._device)

        each = torch.arange(largest + 1, device=self._device)
        self._inputs = Batch(
            token_ids=numbers(largest),
            positions=numbers(largest),
            slots=torch.full_like(each[:-1], self._spare_slot),
            logit_rows=each[:-1],
            row_starts=each,
            context_lens=numbers(largest) + 1,
            prefix_lens=numbers(largest),
            block_tables=numbers(largest, -(-limits.max_model_len // self._block_size)),
            paths=None,
            max_rows=1,
        )
        self._ends = numbers(largest)  # per row: the first position whose keys and values are not kept
        self._table = empty_table(largest, self._device)
        self._tokens = numbers(largest, MAX_STEPS)
        self._place = numbers(1)  # position of the next tokens in `_tokens`
        # Keyed by size and by whether any row has filters. Filters add 18 kernel launches to a step, used or not.
        self._steps = {
            (size, has_filter): record(self._step(model, size, has_filter=has_filter))
            for size in reversed(self._sizes)
            for has_filter in (False, True)
        }

    @classmethod
    def of(cls, runner: ModelRunner, limits: StepLimits, vocabulary: VocabularyMap | None = None) -> Burst | None:
        """Returns a burst if the model of `runner` records its steps; otherwise None."""
        model = runner.model
        if not isinstance(model, TritonModel) or model.recorder is None:
            return None
        return cls(model, limits, model.recorder, vocabulary)

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    @torch.inference_mode()
    def run(
        self,
        logits: torch.Tensor,
        requests: Sequence[SampleRequest],
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        num_skipped: Sequence[int],
    ) -> list[list[int]]:
        """Returns `num_tokens[i]` new tokens for `requests[i]`. Each request has one row of `logits`.

        The first token is drawn from `logits`, and the others from steps over `block_tables`. The block tables need
        room for the input of each step: `num_tokens[i] - 1` tokens. Every number of tokens must be at least 1.
        `num_skipped`: number of tokens of each request that have no place in its block table.
        """
        table = table_of(requests, self._vocab_size, self._device)
        firsts = [request.first_index - skipped for request, skipped in zip(requests, num_skipped, strict=True)]
        drawn: list[list[int]] = self.draw_on_device(logits, table, firsts, block_tables, num_tokens).tolist()
        return [row[:count] for row, count in zip(drawn, num_tokens, strict=True)]

    @torch.inference_mode()
    def draw_on_device(
        self,
        logits: torch.Tensor,
        table: RowTable,
        firsts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        shifts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns new tokens on the device, int64 [num_rows, max(num_tokens)], valid until the next call.

        `table` has a row for each row of `logits`, without penalties and biases. `firsts`: place in its block
        table of each row's first token. `shifts`, int64 [num_rows]: amounts to subtract from `firsts`; the table's
        positions are already reduced. Other arguments as in `run`. Tokens after `num_tokens[i]` are undefined. Does not
        wait for the device.
        """
        num_rows = len(firsts)
        ids, _ = draw(logits, table, 1)
        self._tokens[:num_rows, :1].copy_(ids)
        num_steps = max(num_tokens) - 1
        if num_steps:
            size = self._sizes[bisect_left(self._sizes, num_rows)]
            self._begin(ids[:, 0], table, firsts, block_tables, num_tokens, shifts)
            for numbers in (self._inputs.positions, self._ends):  # clear the rows that pad the step to its size
                numbers[num_rows:size].fill_(0)
            self._table.rows[num_rows:size, HAS_FILTER].fill_(0)  # a step without filters has no cuts for them
            self._inputs.slots[:size].copy_(self._slots(size))
            step = self._steps[size, table.has_filter]
            for _ in range(num_steps):
                step()
        return self._tokens[:num_rows, : num_steps + 1]

    def _begin(
        self,
        ids: torch.Tensor,
        table: RowTable,
        firsts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        shifts: torch.Tensor | None,
    ) -> None:
        """Sets the inputs of the first step: each token of `ids` at the position for which it was drawn."""
        inputs, num_rows = self._inputs, len(firsts)
        width = max(map(len, block_tables))
        state = np.zeros((num_rows, 2 + width), dtype=np.int64)
        for row, first, blocks, count in zip(state, firsts, block_tables, num_tokens, strict=True):
            row[0] = first
            row[1] = first + count - 1
            row[2 : 2 + len(blocks)] = blocks
        (on_device,) = copy_to(self._device, [state])
        if shifts is not None:
            on_device[:, :2] -= shifts[:, None]
        inputs.token_ids[:num_rows].copy_(ids)
        inputs.positions[:num_rows].copy_(on_device[:, 0])
        self._ends[:num_rows].copy_(on_device[:, 1])
        inputs.block_tables[:num_rows, :width].copy_(on_device[:, 2:])
        inputs.prefix_lens[:num_rows].copy_(on_device[:, 0])
        inputs.context_lens[:num_rows].copy_(on_device[:, 0] + 1)
        self._table.rows[:num_rows].copy_(table.rows)
        self._table.rows[:num_rows, POSITION].add_(1)
        self._place.fill_(1)

    def _step(self, model: TritonModel, size: int, *, has_filter: bool) -> Callable[[], None]:
        view = first_rows(self._inputs, size)
        table = replace(self._table, rows=self._table.rows[:size], has_filter=has_filter)
        moved_on = (view.positions, view.context_lens, view.prefix_lens, table.rows[:, POSITION], self._place)
        last_position = model.config.max_position_embeddings - 1

        @torch.inference_mode()
        def step() -> None:
            ids, _ = draw(self._proposable(model.compute(view)), table, 1)
            view.token_ids.copy_(ids[:, 0])
            self._tokens[:size].index_copy_(1, self._place % MAX_STEPS, ids)
            for numbers in moved_on:
                numbers.add_(1)
            view.positions.clamp_(max=last_position)  # rows that have all their tokens keep running with the others
            view.slots.copy_(self._slots(size))

        return step

    def _slots(self, num_rows: int) -> torch.Tensor:
        """Returns the slots of the inputs' keys and values.

        Rows that have all their tokens, and rows that pad a step, get the spare slot.
        """
        inputs, size = self._inputs, self._block_size
        positions, tables = inputs.positions[:num_rows], inputs.block_tables[:num_rows]
        places = (positions // size).clamp(max=tables.shape[1] - 1)
        slots = tables.gather(1, places[:, None])[:, 0] * size + positions % size
        return torch.where(positions < self._ends[:num_rows], slots, self._spare_slot)
