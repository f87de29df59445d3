"""Chooses among ways to draft: the most requests per dollar within limits.

The rival of every draft is to spend its dollars on more targets. Requests per dollar do not change with the number of
targets, so that rival is the option without speculation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.planning.latency import LatencyLimits
from cluster.planning.prediction import WORSE_DEPTHS, ExpectedLoad, Option, Plan, most_sequences, plan
from cluster.speculation.speed import scaled

MAX_SEQS = 256  # sequences of a target; as many as vLLM runs by default (`max_num_seqs`)
_HALVINGS = 5  # the factor of an acceptance is found to 3 %


@dataclass(frozen=True, slots=True)
class Capacity:
    """An option with as many sequences as its limits and its memory allow."""

    option: Option
    plan: Plan | None  # None: one sequence is too many
    answer_tokens: int

    @property
    def requests_per_second(self) -> float:
        """Requests per second of one target."""
        return 0.0 if self.plan is None else self.plan.tokens_per_second / self.answer_tokens

    @property
    def requests_per_dollar(self) -> float:
        if self.plan is None or not self.plan.dollars_per_hour:
            return 0.0
        return 3600 * self.requests_per_second / self.plan.dollars_per_hour


def capacity(option: Option, load: ExpectedLoad, limits: LatencyLimits) -> Capacity:
    """Returns the capacity at the depth that serves the most requests per dollar.

    Fewer sequences with more drafts each may serve more requests than the most sequences within the limits.
    """
    most = min([MAX_SEQS, *(budget.largest_batch(load.longest) for budget in option.budgets)])
    each: list[Capacity] = []
    for depth in option.depths:
        own = replace(option, num_speculative_tokens=depth)
        num_seqs = most_sequences(own, load, limits, most)
        found = plan(own, replace(load, num_seqs=num_seqs)) if num_seqs else None
        each.append(Capacity(option, found, load.answer_tokens))
        if len(each) - each.index(best(each)) > WORSE_DEPTHS:
            break
    return best(each)


def best(capacities: Sequence[Capacity]) -> Capacity:
    """Returns the one with the most requests per dollar, of equals the first."""
    return max(capacities, key=lambda one: one.requests_per_dollar)


def reversals(capacities: Sequence[Capacity], load: ExpectedLoad, limits: LatencyLimits) -> Iterator[str]:
    """Yields what would change the choice: another acceptance, and another price of draft GPUs."""
    chosen = best(capacities)
    others = [one for one in capacities if one is not chosen and one.plan is not None]
    if chosen.plan is None or not others:
        return
    second = best(others)
    if chosen.option.drafting is not None:
        factor = _turning_factor(chosen, second.requests_per_dollar, load, limits, 0.0)
        yield f"{second.option.name} if {chosen.option.name} has less than {factor:.2f} of its acceptance"
    drafted = [one for one in others if one.option.drafting is not None]
    if drafted:
        rival = best(drafted)
        factor = _turning_factor(rival, chosen.requests_per_dollar, load, limits, 2.0)
        if factor < 2.0:
            yield f"{rival.option.name} if it has {factor:.2f} times its acceptance"
    pools = [one for one in others if one.plan and one.plan.draft_devices_per_target]
    if pools:
        pool = best(pools)
        price = _turning_price(pool, chosen.requests_per_dollar)
        yield f"{pool.option.name} if " + (
            f"its GPU costs less than {price:.2f} dollars per hour"
            if price > 0
            else "targets cost less: no price of its GPU is enough"
        )


def _turning_factor(
    one: Capacity, requests_per_dollar: float, load: ExpectedLoad, limits: LatencyLimits, end: float
) -> float:
    """Returns the factor of the acceptance, between 1 and `end`, at which `one` has `requests_per_dollar`."""
    assert one.option.drafting is not None
    near, far = 1.0, end
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        drafting = replace(one.option.drafting, acceptance=scaled(one.option.drafting.acceptance, middle))
        found = capacity(replace(one.option, drafting=drafting), load, limits)
        if (found.requests_per_dollar < requests_per_dollar) == (end > 1.0):
            near = middle
        else:
            far = middle
    return far


def _turning_price(pool: Capacity, requests_per_dollar: float) -> float:
    """Returns the dollars per hour of a draft GPU at which `pool` has `requests_per_dollar`."""
    assert pool.plan is not None
    assert pool.option.target_dollars_per_hour is not None
    dollars = 3600 * pool.requests_per_second / requests_per_dollar
    return (dollars - pool.option.target_dollars_per_hour) / pool.plan.draft_devices_per_target
