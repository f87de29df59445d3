"""Time that programs need in addition to the configured steps.

Measured by `python -m bench.simulate --parts overheads` on two cores of a Sapphire Rapids Xeon, with all programs on
that machine and 8 to 16 sequences. Times for hundreds of sequences are extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overheads:
    """Overheads of a worker between two steps, in seconds."""

    step: float = 0.0
    sequence: float = 0.0  # per sequence of the step

    def seconds(self, num_sequences: float) -> float:
        return self.step + self.sequence * num_sequences


NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Programs:
    """Overheads of all programs, in seconds."""

    hand_over: float = 0.00055  # one message between target and draft worker
    router: float = 0.003  # time from a request's arrival at the router to its arrival at the target
    answer: float = 0.001  # time from a commit until the client has the tokens
    target: Overheads = Overheads(0.00026, 0.000011)
    draft: Overheads = Overheads(0.00008, 0.000017)


PROGRAMS = Programs()
NOTHING = Programs(0.0, 0.0, 0.0, NO_OVERHEADS, NO_OVERHEADS)
