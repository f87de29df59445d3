"""A drafter without a model, for load, fault and planning runs; its acceptance is configured."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.simulation import SimulationConfig
from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafters.read_tokens import NUM_SINKS, ContextTokens
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.simulated_engines.acceptance import AcceptanceSchedule
from cluster.simulated_engines.steps import REAL_TIME, StepCurve, Timekeeper
from cluster.simulated_engines.tokens import token_at, uniform_at

_GAPS = [float(rank) for rank in range(64)]  # gaps of siblings, most likely first
# Probability that a next best draft is right if all better ones are wrong. With a distilled pair, the target's choice
# was among the best 1, 2 and 4 drafts with probability 0.772, 0.898 and 0.962. This gives 0.55 for the second draft,
# and 0.39 for the third and fourth.
_NEXT_BEST = 0.5


class SimulatedDrafter(Drafter):
    """Proposes the simulated target's choice, or with a configured probability another token.

    The noise key and the position decide whether a draft is right, so runs are reproducible. If the acceptance is not a
    single number, the place in the proposal or the time matter too. The duration of a step depends on its rows, those
    of the extended nodes and of prompt chunks, and on the tokens that its sequences have read. The drafter has room for
    `max_num_seqs` sequences.
    """

    dtype = "simulated"
    num_blocks = num_used_blocks = block_size = 0  # there is no KV cache

    def __init__(
        self,
        simulation: SimulationConfig,
        vocab_size: int,
        limits: StepLimits,
        time: Timekeeper = REAL_TIME,
        context_tokens: ContextTokens = None,
    ) -> None:
        """`context_tokens`: as of a `ModelDrafter`."""
        self.is_one_pass = simulation.is_one_pass
        self.vocab_size = vocab_size
        self.max_model_len = limits.max_model_len
        self.acceptance = AcceptanceSchedule(simulation, time.now)
        self.batch = 0  # sequences in the last step
        self._time = time
        self._curve = StepCurve(simulation.draft_step_ms)
        self._context_seconds, self._row_context_seconds = (ms / 1e6 for ms in simulation.draft_context_ms)
        self._limits = limits
        self.context_tokens = context_tokens
        self._pace = PromptPace(limits.max_prefill_seconds, limits.max_num_batched_tokens)
        self._uncomputed: dict[DraftSequence, int] = {}  # uncomputed prompt tokens of each sequence

    def admit(self, sequence: DraftSequence) -> bool:
        number = sequence.num_committed
        numbers_read = [number if n is None else min(number, NUM_SINKS + n) for n in self.contexts(sequence)]
        fitting = [number for number in numbers_read if number < self.max_model_len]
        if len(self._uncomputed) >= self._limits.max_num_seqs or not fitting:
            return False
        self.acceptance.start()
        self._read(sequence, fitting[0])
        return True

    def _read(self, sequence: DraftSequence, num_tokens: int) -> None:
        sequence.num_skipped = sequence.num_committed - num_tokens
        self._uncomputed[sequence] = num_tokens

    def prompt_seconds(self, num_tokens: int) -> float:
        return self._pace.seconds([PromptPart(num_tokens, 0)])

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        started_at = self._time.now()
        self.batch = len(sequences)
        budget = self._limits.max_num_batched_tokens
        prompts = [sequence for sequence in sequences if self._uncomputed[sequence]]
        left = [PromptPart(self._uncomputed[s], s.num_committed - s.num_skipped - self._uncomputed[s]) for s in prompts]
        num_rows, context_seconds, for_others = 0, 0.0, budget - min(sum(part.num_tokens for part in left), budget // 2)
        for sequence in sequences:
            if not self._uncomputed[sequence] and num_rows < for_others:
                rows = self._extend(sequence, for_others - num_rows)
                context_seconds += self._seconds_of_context(sequence.num_committed - sequence.num_skipped, rows)
                num_rows += rows
        shares = self._pace.share(left, budget - num_rows, self._pace.budget(is_alone=False))
        for sequence, num_tokens, part in zip(prompts, shares, left, strict=True):
            context_seconds += self._seconds_of_context(part.num_before + num_tokens / 2, num_tokens)
            self._uncomputed[sequence] -= num_tokens
            if not self._uncomputed[sequence]:
                num_tokens = max(num_tokens, self._extend(sequence, num_tokens))
            num_rows += num_tokens
        self._time.sleep_until(started_at + self._curve.at(num_rows) + context_seconds)
        chunks = [PromptPart(tokens, part.num_before) for tokens, part in zip(shares, left, strict=True) if tokens]
        self._pace.observe(num_rows, chunks, self._time.now() - started_at)
        self.num_step_rows = num_rows
        return []

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        if self.context_tokens is not None and sequence.room(self.max_model_len) <= 0:
            sequence.drop_drafts()
            self._read(sequence, NUM_SINKS + self.num_last_again(sequence))

    def release(self, sequence: DraftSequence) -> None:
        del self._uncomputed[sequence]

    def _seconds_of_context(self, num_tokens: float, num_rows: int) -> float:
        """Returns the seconds that `num_rows` rows of a sequence add, with `num_tokens` tokens before each of them."""
        return num_tokens * max(self._context_seconds, num_rows * self._row_context_seconds) if num_rows else 0.0

    def _extend(self, sequence: DraftSequence, budget: int) -> int:
        """Extends `sequence`. Returns the number of rows that this takes, at most `budget`."""
        nodes = (sequence.to_extend or [sequence.tip])[: max(1, budget)]
        num_node_rows = sum([self.num_rows(sequence, node) for node in nodes])
        for node in nodes:
            places = [sequence.depth(node)]  # positions in the proposal
            if self.is_one_pass:
                places = list(range(sequence.num_drafts_after(node, self.max_model_len)))
            for place in places:
                choices = self._choices(sequence, sequence.depth(node), place, sequence.width)
                sequence.extend(node, choices, _GAPS[: len(choices)])
                node = sequence.children(node)[0]
        return min(num_node_rows, budget)

    def _choices(self, sequence: DraftSequence, depth: int, place: int, width: int) -> list[int]:
        """Returns the `width` drafts after a path of `depth` drafts. `place`: place in the proposal, from 0."""
        key, position = sequence.noise_key, sequence.num_committed + depth
        token, acceptance = token_at(key, position, self.vocab_size), self.acceptance.at(place)
        for rank in range(width):
            if uniform_at(key, position, rank) < (min(acceptance, _NEXT_BEST) if rank else acceptance):
                return [(token + other - rank) % self.vocab_size for other in range(width)]
        return [(token + 1 + rank) % self.vocab_size for rank in range(width)]
