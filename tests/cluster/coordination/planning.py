"""A planner of depths whose measurements, sequences and clock are the test's."""

from __future__ import annotations

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import ActiveLink, Round, SpeculativeSequence
from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.speculation.drafts import Drafts
from cluster.speculation.tree import Shape

from .scripted import new_sequence

NUM_STEPS_TO_A_PLAN = 16  # at most, for a few sequences
ROWS = (1, 2, 4, 8, 16, 32)


class Engine:
    """A planner, the sequences it plans for, and how long their steps take."""

    def __init__(self, num_sequences: int = 2, **config: object) -> None:
        self.planner = DepthPlanner(SpeculationConfig.model_validate(config), 256)
        self.costs = LinkCosts(64)
        self.costs.observe_reply(0.0005, DraftStep(0.0003, 1, 1))
        self.sequences = [new_sequence(None) for _ in range(num_sequences)]
        for sequence in self.sequences:
            self.planner.join(sequence)

    def rows_cost(self, seconds_a_row: float, repeats: int = 60) -> None:
        for _ in range(repeats):
            for rows in ROWS:
                self.planner.steps.curve.observe(rows, 0.020 + seconds_a_row * rows)

    def accepts(self, num_accepted: int, rounds: int = 60) -> None:
        """Observes `rounds` rounds in which `num_accepted` of four drafts are accepted."""
        for _ in range(rounds):
            self.observe([verified(sequence, 4, num_accepted) for sequence in self.sequences])

    def observe(self, rounds: list[Round]) -> None:
        self.planner.observe(rounds)

    def wanted(self, sequence: SpeculativeSequence, *, has_proposed: bool = True) -> int:
        """Returns how many draft tokens are requested after `sequence` has committed."""
        if sequence.link is None:
            link = DraftLink("a", "fingerprint", lambda _: None)
            sequence.opened(ActiveLink(link, self.costs, has_proposed=has_proposed), 1)
        return self.planner.wanted(sequence)[0]

    def shape(self, sequence: SpeculativeSequence) -> Shape | None:
        """Returns the shape of the tree that is requested."""
        self.wanted(sequence)
        return self.planner.wanted(sequence)[1]

    def step(self) -> None:
        if self.planner.begin_step(len(self.sequences)):
            self.planner.plan(self.sequences, None, len(self.sequences))

    def steps(self, number: int = NUM_STEPS_TO_A_PLAN) -> None:
        for _ in range(number):
            self.step()

    @property
    def depths(self) -> list[int]:
        return [sequence.depth for sequence in self.sequences]


def verified(sequence: SpeculativeSequence, num_drafts: int, num_accepted: int) -> Round:
    return Round(sequence, Drafts([7] * num_drafts), [7] * num_accepted + [8])
