"""Access of drafters to the hidden states of a target in the same process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.drafters.base import DraftSequence
from cluster.engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class ComputedSequence:
    """Blocks with the target's states of a sequence's first `num_tokens` tokens."""

    block_table: Sequence[int]
    num_tokens: int


@dataclass(slots=True)
class TargetStates:
    """The hidden states of a target in the same process. Valid only between its steps."""

    runner: ModelRunner
    find: Callable[[], Mapping[int, ComputedSequence]] = dict  # the running sequences by their numbers on the link

    def of(self, sequences: Sequence[DraftSequence]) -> dict[DraftSequence, ComputedSequence]:
        """Returns the sequences with at least two committed tokens, and with states for all except the last one.

        Marks the other sequences as exhausted, with `lacks_states`.
        """
        found, known = {}, self.find()
        for sequence in sequences:
            computed = known.get(sequence.wire_id)
            if computed is not None and computed.num_tokens >= sequence.num_committed - 1 > 0:
                found[sequence] = computed
            else:
                sequence.is_exhausted = sequence.lacks_states = True
        return found
