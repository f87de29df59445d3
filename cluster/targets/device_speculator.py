"""Rounds on the device: every step verifies drafts and makes the next ones.

A step is launched without waiting for the device: the target's forward pass, its choices, their comparison with the
drafts, and the draft model's steps. The next step can be launched before the host knows what was accepted. Its input is
on the device. The host gives it the highest possible places, and the device subtracts the number of rejected drafts
(`Unread`).

The draft has its own KV cache, with the target's block tables. After a step without drafts a sequence's KV there is
incomplete, so the sequence gets no more drafts. A hit in the prefix cache may bring incomplete KV of such a sequence:
then its drafts are poor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.drafters.burst import Burst
from cluster.engine.batch import Segment, Unread
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.acceptance_model import SequenceAcceptance
from cluster.speculation.device_copy import HostCopy, Words, copy_to
from cluster.speculation.device_depths import DeviceDepths
from cluster.speculation.drafts import NO_DRAFTS, Drafts
from cluster.speculation.sampling import SampleRequest
from cluster.speculation.triton_sampler import POSITION, draw, table_of
from cluster.speculation.tuning import TRIAL_DEPTHS
from cluster.targets.step_loop import ReadChoices
from cluster.targets.step_sampling import logits_of_choices, sample_requests
from cluster.targets.token_generator import Generation, Scheduled


@dataclass(slots=True)
class _DraftState:
    acceptance: SequenceAcceptance
    has_full_kv: bool = True  # whether every step of the sequence drafted


@dataclass(frozen=True, slots=True)
class _Input:
    """Index tensors of a step, int64 on the device; n sequences yield choices."""

    # Index of each part's sequence in the last round if its input is unread, else `len(last.index)`: no shift.
    previous: torch.Tensor  # [num_parts]
    previous_of_choosing: torch.Tensor  # [n]
    sequence_of_row: torch.Tensor  # [num_choices]: index of each choice's sequence
    inputs: torch.Tensor  # [n, 1 + most drafts]: last token and drafts, or stand-ins, padded with vocab_size
    rows: torch.Tensor  # [n, 1 + most drafts]: index of the choice after each of `inputs`
    num_drafts: torch.Tensor  # [n]


@dataclass(slots=True)
class _LaunchedRound:
    """Results of the last launched step, by the index of a sequence among those that chose a token."""

    index: dict[Generation, int]
    tokens: torch.Tensor  # int64 [n + n * num_drafts]: the last token of each sequence, then the drafts after it
    rejected: torch.Tensor  # int64 [n]: number of rejected drafts
    num_drafts: int = 0  # drafts made for each sequence
    has_drafts: Sequence[bool] = ()
    drafts: list[list[int]] = field(default_factory=list)  # the drafts; empty until they are read
    next_stand_ins: list[tuple[Drafts, int]] = field(default_factory=list)  # those of the next step, to be filled in


class DeviceSpeculator:
    """Launches the steps of a target and its draft, which share a GPU. Supports chains with coupled acceptance."""

    def __init__(
        self, target: ModelRunner, draft: ModelRunner, burst: Burst, limits: StepLimits, config: SpeculationConfig
    ) -> None:
        """`limits`: of the draft. Its cache must have the target's block size and at least as many blocks."""
        assert draft.blocks.num_blocks >= target.blocks.num_blocks
        assert draft.blocks.block_size == target.blocks.block_size
        self._target, self._draft, self._burst, self._limits = target, draft, burst, limits
        self._device = target.model.device
        self._max_depth = config.max_speculative_tokens
        self._chosen_depth = config.num_speculative_tokens
        self._is_fixed = config.controller == "fixed"
        self._depths = DeviceDepths(self._max_depth, self._chosen_depth)
        self._sequences: dict[SpeculativeSequence, _DraftState] = {}
        self._is_trying = False
        self._ended_depth = 0  # drafts that the last ended step made for each sequence
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._last = _LaunchedRound({}, nothing, nothing[:0])

    def trial_depths(self) -> Iterator[int]:
        """Yields depths to time before the first request; none with a fixed controller.

        The caller runs steps at each depth before it takes the next one.
        """
        if self._is_fixed:
            return
        self._is_trying = True
        yield from (depth for depth in TRIAL_DEPTHS if depth <= self._max_depth)
        self._depths.tried()
        self._is_trying = False

    def drafts_of(self, generation: Generation) -> Drafts:
        """Returns the drafts for the next step, or stand-ins for them until they are read."""
        last = self._last
        index = last.index.get(generation)
        if index is None or not last.has_drafts[index]:
            return NO_DRAFTS
        number = min(self._wanted(generation), last.num_drafts)
        if last.drafts:
            return Drafts(last.drafts[index][:number])
        first = len(last.index) + index * last.num_drafts
        return Drafts([-1 - (first + place) for place in range(number)])

    @torch.inference_mode()
    def launch(self, step: Sequence[Scheduled]) -> tuple[torch.Tensor, ReadChoices]:
        """Launches `step` and the drafts after it. Returns the step's logits, and the function that reads its choices.

        That function also fills in the stand-ins that the next step uses for its drafts.
        """
        last, choosing = self._last, [part for part in step if part.yields_choices]
        nothing_rejected = last.rejected.new_zeros(1)
        rejected = torch.cat([last.rejected, nothing_rejected])
        on_device = self._copy_input(step, choosing)
        known = Unread(last.tokens, rejected[on_device.previous])
        segments = [part.segment(self._stand_in(part)) for part in step]
        logits = self._target.run(segments, known)
        shifts = rejected[on_device.previous_of_choosing]  # of each sequence that chooses
        choices = logits.new_empty(0, dtype=torch.int64)
        if choosing:
            choices = self._choose(logits_of_choices(logits, step), step, shifts[on_device.sequence_of_row])
        inputs = known.tokens(on_device.inputs)  # [n, 1 + most drafts]
        chosen = choices[on_device.rows]
        num_accepted = (chosen[:, :-1] == inputs[:, 1:]).long().cumprod(1).sum(1)
        bonus = chosen.gather(1, num_accepted[:, None])[:, 0]
        before = inputs.gather(1, num_accepted[:, None])[:, 0]
        new_rejected = on_device.num_drafts - num_accepted
        last.next_stand_ins = [
            (part.drafts, last.index[part.sequence]) for part in choosing if part.has_unread_input and part.drafts
        ]
        depth = self._next_depth(step)
        made = _LaunchedRound(
            {part.sequence: index for index, part in enumerate(choosing)},
            bonus,
            new_rejected,
            0,
            [False] * len(choosing),
        )
        if depth:
            self._make_drafts(made, step, choosing, before, shifts + new_rejected, depth)
        self._last = made
        copy = HostCopy(torch.cat([choices, made.tokens[len(choosing) :]]))

        def read() -> list[int]:
            numbers = copy.read()
            num_choices = len(numbers) - len(choosing) * made.num_drafts
            found, self._ended_depth = numbers[num_choices:], made.num_drafts
            made.drafts = [
                found[first : first + made.num_drafts] for first in range(0, len(found), made.num_drafts or 1)
            ]
            for drafts, index in made.next_stand_ins:
                drafts.fill_in(made.drafts[index])
            return numbers[:num_choices]

        return logits, read

    def observe_rounds(self, rounds: Sequence[Round]) -> None:
        """Learns acceptance from the rounds of a step."""
        for sequence, drafts, chosen in rounds:
            if drafts and sequence in self._sequences and not self._is_trying:
                self._sequences[sequence].acceptance.observe(len(drafts), len(chosen) - 1)

    def observe_step(self, num_rows: int, seconds: float, *, is_pure: bool) -> None:
        """Learns the time of the step that was read last. `is_pure`: it computed no prompts."""
        if is_pure:
            self._depths.observe(num_rows, self._ended_depth, seconds)

    def forget(self, generation: Generation) -> None:
        self._sequences.pop(generation.speculative, None)

    def _stand_in(self, part: Scheduled) -> int | None:
        """Returns what stands for the input of `part` before it is read."""
        return -1 - self._last.index[part.sequence] if part.has_unread_input else None

    def _copy_input(self, step: Sequence[Scheduled], choosing: Sequence[Scheduled]) -> _Input:
        last = self._last

        def previous(parts: Sequence[Scheduled]) -> list[int]:
            return [last.index[part.sequence] if part.has_unread_input else len(last.index) for part in parts]

        width = 1 + max((len(part.drafts) for part in choosing), default=0)
        inputs = np.full((len(choosing), width), self._target.model.config.vocab_size, dtype=np.int64)
        rows = np.zeros((len(choosing), width), dtype=np.int64)
        sequence_of_row: list[int] = []
        for index, part in enumerate(choosing):
            stand_in = self._stand_in(part)
            inputs[index, 0] = part.sequence.token_ids[-1] if stand_in is None else stand_in
            inputs[index, 1 : part.num_choices] = part.drafts.token_ids
            rows[index] = len(sequence_of_row) + np.minimum(np.arange(width), len(part.drafts))
            sequence_of_row += [index] * part.num_choices
        num_drafts = [len(part.drafts) for part in choosing]
        numbers: list[Sequence[int] | Words] = [previous(step), previous(choosing), sequence_of_row]
        return _Input(*copy_to(self._device, [*numbers, inputs, rows, num_drafts]))

    def _choose(self, logits: torch.Tensor, step: Sequence[Scheduled], shifts: torch.Tensor) -> torch.Tensor:
        """Returns the target's choices, [num_rows]. `shifts`: amounts to subtract from the rows' positions."""
        table = table_of(sample_requests(step, logits.shape[1], self._device), logits.shape[1], self._device)
        table.rows[:, POSITION] -= shifts
        return draw(logits, table, 1)[0].flatten()

    def _next_depth(self, step: Sequence[Scheduled]) -> int:
        """Returns the number of drafts to make after `step`."""
        generations = [part.sequence for part in step]
        free = [self._state_of(g).acceptance for g in generations if g.request.num_speculative_tokens is None]
        if free and not self._is_fixed:
            self._chosen_depth = self._depths.next_depth(free)
        depth = max((self._wanted(g) for g in generations if self._state_of(g).has_full_kv), default=0)
        if not depth:
            for generation in generations:
                self._state_of(generation).has_full_kv = False
        return depth

    def _make_drafts(
        self,
        made: _LaunchedRound,
        step: Sequence[Scheduled],
        choosing: Sequence[Scheduled],
        before: torch.Tensor,
        shifts: torch.Tensor,
        depth: int,
    ) -> None:
        """Runs the draft over the new tokens of `step`, and adds at most `depth` drafts for each sequence to `made`.

        `before`, int64 [n]: the token before the last one of each sequence. `shifts`, int64 [n]: amounts to subtract
        from the planned positions.
        """
        num_choosing = len(choosing)
        segments: list[Segment] = []
        shift_of: list[int] = []  # for each segment, an index in `shifts`, or one after its end: no shift
        drafted: list[int] = []
        for part in step:
            state, index = self._state_of(part.sequence), made.index.get(part.sequence)
            state.has_full_kv &= self._reserve_blocks(part, depth) and len(drafted) < self._burst.max_rows
            if not state.has_full_kv:
                continue
            table = part.sequence.block_table
            tokens = part.sequence.token_ids[part.start : part.end]
            if index is None:
                segments.append(Segment(tokens, part.start, table, num_logits=0))
                shift_of.append(num_choosing)
                continue
            last = -1 - (num_choosing + index)
            if part.num_new_tokens > 1:
                segments.append(Segment([*tokens, last], part.start, table, num_logits=1))
                shift_of.append(num_choosing)
            else:  # the draft's cache may lack the last accepted draft, so it is computed again
                segments.append(Segment([-1 - index, last], part.end + len(part.drafts) - 1, table, num_logits=1))
                shift_of.append(index)
            drafted.append(index)
        if not segments:
            return
        shifts_of_segments, indices = copy_to(self._device, [shift_of, drafted])
        shifts_of_segments = torch.cat([shifts, shifts.new_zeros(1)])[shifts_of_segments]
        logits = self._draft.run(segments, Unread(torch.cat([before, made.tokens]), shifts_of_segments))
        if drafted:
            drawn = self._draw_drafts(logits, [choosing[index] for index in drafted], shifts[indices], depth)
            made.num_drafts = drawn.shape[1]
            drafts = drawn.new_zeros(num_choosing, made.num_drafts).index_copy_(0, indices, drawn)
            made.tokens = torch.cat([made.tokens, drafts.flatten()])
            made.has_drafts = [index in set(drafted) for index in range(num_choosing)]

    def _draw_drafts(
        self, logits: torch.Tensor, parts: Sequence[Scheduled], shifts: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Returns at most `depth` drafts for each of `parts`. `logits` has a row for the last token of each."""
        firsts = [part.end + len(part.drafts) + 1 for part in parts]  # index of the first draft
        generations = [part.sequence for part in parts]
        requests = [
            SampleRequest(
                generation.request.params,
                generation.request.noise_key,
                generation.token_ids,
                generation.num_prompt_tokens,
                position_shift=first - len(generation.token_ids),
            )
            for generation, first in zip(generations, firsts, strict=True)
        ]
        table = table_of(requests, logits.shape[1], self._device)
        table.rows[:, POSITION] -= shifts
        numbers = [max(1, min(depth, self._wanted(generation))) for generation in generations]
        tables = [generation.block_table for generation in generations]
        return self._burst.draw_on_device(logits, table, firsts, tables, numbers, shifts)

    def _reserve_blocks(self, part: Scheduled, depth: int) -> bool:
        """Allocates blocks for `depth` drafts. Returns False if `part` gets none (penalties, `logit_bias`, no room)."""
        params = part.sequence.request.params
        if params.has_penalty or params.logit_bias or not self._wanted(part.sequence):
            return False
        if not part.yields_choices:
            return True
        num_tokens = part.end + len(part.drafts) + depth
        return num_tokens <= self._limits.max_model_len and self._target.blocks.grow(
            part.sequence.block_table, num_tokens
        )

    def _wanted(self, generation: Generation) -> int:
        """Returns the number of drafts that `generation` should get."""
        asked = generation.request.num_speculative_tokens
        return min(self._chosen_depth if asked is None else asked, self._max_depth)

    def _state_of(self, generation: Generation) -> _DraftState:
        sequence = self._sequences.get(generation.speculative)
        if sequence is None:
            acceptance = self._depths.acceptance(generation.request.params.temperature)
            sequence = self._sequences[generation.speculative] = _DraftState(acceptance)
        return sequence
