"""Now and then a step is of the kind that is not the rule."""

from __future__ import annotations

from cluster.coordination.sequence import SpeculativeSequence

from .planning import Engine, verified
from .scripted import new_sequence


class TestWhileThereAreDrafts:
    def test_a_step_in_128_is_plain(self) -> None:
        engine = Engine()
        engine.rows_cost(0.0001)
        engine.accepts(4)
        engine.steps()
        plain = 0
        for _ in range(1280):
            engine.step()
            plain += engine.planner.verified_depth(engine.sequences[0]) == 0
        assert plain == 10

    def test_fixed_depths_have_no_plain_steps(self) -> None:
        engine = Engine(controller="fixed")
        for _ in range(1000):
            engine.step()
            assert engine.planner.verified_depth(engine.sequences[0]) == 4


class TestWhileThereAreNone:
    def probe(self, off: Engine) -> SpeculativeSequence:
        """The sequence of a probe that has begun."""
        for _ in range(10_000):
            if off.planner.probe is not None:
                return off.planner.probe
            off.steps(1)
        raise AssertionError("no probe in 10,000 steps")

    def run(self, off: Engine, num_accepted: int) -> None:
        """One probe, whose draft is accepted if `num_accepted` is 1."""
        probe = self.probe(off)
        assert off.wanted(probe) == 1
        off.observe([verified(probe, 1, num_accepted)])
        off.planner.probed(has_drafts=True)

    def test_one_sequence_gets_one_short_round(self, off: Engine) -> None:
        self.probe(off)
        assert [off.wanted(sequence) for sequence in off.sequences].count(1) == 1
        off.planner.probed(has_drafts=True)
        assert off.planner.probe is None
        assert off.depths == [0] * 4

    def test_a_probe_goes_on_until_its_drafts_have_come(self, off: Engine) -> None:
        probe = self.probe(off)
        off.wanted(probe)  # opens it
        off.planner.probed(has_drafts=False)
        off.steps(40)
        assert off.planner.probe is probe
        assert probe.depth == 1

    def test_a_probe_ends_when_its_drafter_is_late(self, off: Engine) -> None:
        probe = self.probe(off)
        off.wanted(probe)
        probe.gave_up()
        probe.has_answered = True
        off.planner.probed(has_drafts=False)
        assert off.planner.probe is None

    def test_probes_cost_at_most_half_a_percent(self, off: Engine) -> None:
        plain, num_probes, num_steps = off.planner.steps.curve.seconds(4), 0, 20_000
        self.run(off, 0)
        for _ in range(num_steps):
            off.step()
            if off.planner.probe is not None:
                self.run(off, 0)
                num_probes += 1
        cost = off.planner.steps.curve.seconds(5) - plain + off.costs.proposal_seconds(1, 1)
        assert 0.003 < num_probes * cost / (num_steps * plain) <= 0.005

    def test_every_sequence_has_its_turn(self, off: Engine) -> None:
        for sequence in off.sequences:
            off.wanted(sequence)  # opens it
        tried = set()
        for _ in range(4):
            tried.add(self.probe(off))
            self.run(off, 0)
        assert tried == set(off.sequences)

    def test_drafts_that_became_good_switch_it_on_again(self, off: Engine) -> None:
        off.rows_cost(0.0001, repeats=200)  # other sequences have gone
        for _ in range(40):
            if max(off.depths) > 0 and off.planner.probe is None:
                break
            self.run(off, 1)
            off.steps()
        assert min(off.depths) > 0

    def test_one_that_finds_no_draft_worker_is_followed_by_another(self, off: Engine) -> None:
        probe = self.probe(off)
        off.steps(17)
        assert off.planner.probe not in (None, probe)

    def test_a_probe_that_ended_has_a_successor(self, off: Engine) -> None:
        probe = self.probe(off)
        off.planner.leave(probe)
        off.sequences.remove(probe)
        assert self.probe(off) is not probe

    def test_others_have_what_they_asked_for(self, off: Engine) -> None:
        asked = new_sequence(3)
        off.planner.join(asked)
        self.probe(off)
        assert off.planner.verified_depth(asked) == 3
