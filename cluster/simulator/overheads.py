"""What programs take beside the steps that are configured.

Found by `python -m bench.simulate --parts overheads` on two cores of a Sapphire Rapids Xeon, with all programs on that
machine and 8 to 16 sequences: what hundreds of sequences take is extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overheads:
    """Of a worker, between two steps; seconds."""

    step: float = 0.0
    sequence: float = 0.0  # of each in the step

    def seconds(self, num_sequences: int) -> float:
        return self.step + self.sequence * num_sequences


NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Programs:
    """Of all, in seconds."""

    hand_over: float = 0.00055  # of a message between target and draft worker, in one direction
    router: float = 0.003  # of a request, until its target has it
    answer: float = 0.001  # of what was committed, until the client has it
    target: Overheads = Overheads(0.00026, 0.000011)
    draft: Overheads = Overheads(0.00008, 0.000017)


PROGRAMS = Programs()
NOTHING = Programs(0.0, 0.0, 0.0, NO_OVERHEADS, NO_OVERHEADS)
