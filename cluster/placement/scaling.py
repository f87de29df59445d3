"""Decides the numbers of targets and draft workers. No I/O; callers pass the time.

The number of targets depends on their load: their used capacity, and the tokens that wait for them. One target is added
while over a hundredth of the recent requests with limits are late, because limits are promised at p99. The use at which
that happened is not reached again by removing targets.

The number of draft workers depends on their gain. Every target reports the gain of drafts, as its controller measures
it, with 1, 2, 4, ... sequences per draft worker (`DraftDemand`). The gain includes slow, late and refused proposals,
and loads at which no draft pays. With D workers for S sequences the targets yield

    sum over targets of goodput(S / D)

in units of one target's yield without drafts. A worker costs `draft_gain` in these units, and D maximises the
difference. A pool that no target profits from shrinks to its minimum, which may be 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.config import Config
from cluster.placement.registry import Announcement, Load

ScaledPool = Literal["target", "draft"]

_MUCH_KV = 0.5  # above this KV use, the memory of a draft worker's sequences determines the room that it has
_TARGET_USE = 0.8  # wanted use of targets: share of KV blocks or of `target.max_num_seqs`, whichever is higher
_QUEUED_TOKENS = 4096  # waiting tokens at which a target is added
_LATE_SHARE = 0.01  # share of recent requests with limits: if more are late, a target is added
_LATE_SECONDS = 60.0  # window of recent requests; answers that began before a change of the targets have mostly ended
_LEAST_LATE = 3  # late requests in the window: fewer are mostly chance
_MEMORY_SECONDS = 3600.0  # for which the use at which requests were late limits the removal of targets
_SLACK = 0.9  # targets are removed only if the use of the others stays below this share of `_TARGET_USE`


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int
    most: int | None

    def limit(self, number: int) -> int:
        number = max(number, self.least)
        return number if self.most is None else min(number, self.most)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about one pool. `inputs`: the numbers that it is based on, by name."""

    pool: ScaledPool
    current: int  # workers that exist or were requested
    wanted: int  # number that the current measurements ask for
    settled: int  # number that was wanted for the whole delay; otherwise `current`
    inputs: dict[str, float]
    reason: str


class Scaler:
    """Decides the numbers of workers. Not thread-safe. All times are seconds of the same clock."""

    def __init__(self, config: Config) -> None:
        self._config = config
        targets, drafts, further = config.ray.target, config.ray.draft, config.num_further_drafts
        self._targets = Bounds(targets.min_replicas, targets.max_replicas)
        most = None if drafts.max_replicas is None else drafts.max_replicas + further
        self._drafts = Bounds(drafts.min_replicas + further, most)  # bounds of all draft workers
        self._delays = {"target": self._new_delay(), "draft": self._new_delay()}
        self._lateness = _Lateness()
        self._late_use, self._late_at = math.inf, -math.inf  # use of the targets when requests were late, and when
        # Requested workers count before they are up. Otherwise the decisions until then would be based on too few.
        is_obeyed = config.ray.scaling.mode == "act"
        self._asked = {"target": config.target.replicas, "draft": config.draft.replicas + further} if is_obeyed else {}

    def asked(self, pool: ScaledPool, number: int) -> None:
        """Records that the pool is going to have `number` workers."""
        self._asked[pool] = number

    def decide(self, targets: Sequence[Announcement], drafts: Sequence[Announcement], now: float) -> Sequence[Decision]:
        """Returns the decisions for the workers' loads; none without a target."""
        loads = [member.load for member in targets if member.load is not None]
        if not loads:
            return ()
        current = max(len(targets), self._asked.get("target", 0))
        decisions = [self._settle("target", current, *self._wanted_targets(targets, current, now), now)]
        if self._config.has_draft_workers and not self._config.has_sidecars and self._config.draft.replicas > 0:
            draft_loads = [member.load for member in drafts if member.load is not None]
            current = max(len(drafts), self._asked.get("draft", 0))
            decisions.append(self._settle("draft", current, *self._wanted_drafts(loads, draft_loads, current), now))
        return decisions

    def _settle(
        self, pool: ScaledPool, current: int, wanted: int, inputs: dict[str, float], reason: str, now: float
    ) -> Decision:
        return Decision(pool, current, wanted, self._delays[pool].settle(current, wanted, now), inputs, reason)

    def _wanted_targets(
        self, targets: Sequence[Announcement], current: int, now: float
    ) -> tuple[int, dict[str, float], str]:
        most = self._config.target.max_num_seqs
        loads = [member.load for member in targets if member.load is not None]
        full = sum(max(load.kv_use, load.num_running / most) for load in loads)
        queued = sum(load.num_waiting_tokens for load in loads)
        num_limited, num_late = self._lateness.recent(targets, now)
        needed = full / _TARGET_USE + queued / _QUEUED_TOKENS
        more, fewer = math.ceil(needed), math.ceil(needed / _SLACK)
        if num_late >= _LEAST_LATE and num_late > _LATE_SHARE * num_limited:
            more = max(more, len(targets) + 1)  # a requested target that is not up yet counts as the additional one
            self._late_use, self._late_at = full / len(loads), now
        if now - self._late_at < _MEMORY_SECONDS and self._late_use > 0.0:
            fewer = max(fewer, math.ceil(full / (_SLACK * self._late_use)))
        wanted = self._targets.limit(more if more > current else min(fewer, current))
        inputs = {"use": full / len(loads), "queued_tokens": float(queued), "late": float(num_late)}
        reason = f"{inputs['use']:.0%} full, {queued} tokens waiting"
        return wanted, inputs, f"{reason}, {num_late} of {num_limited} requests late" if num_late else reason

    def _wanted_drafts(
        self, loads: Sequence[Load], draft_loads: Sequence[Load], current: int
    ) -> tuple[int, dict[str, float], str]:
        demands = [load.demand for load in loads if load.demand is not None]
        num_sequences = sum(demand.num_sequences for demand in demands)
        inputs = {"sequences": float(num_sequences)}
        if not demands:
            has_work = any(load.num_running for load in loads)  # one worker at least, to measure the gain
            return self._drafts.limit(max(current, int(has_work))), inputs, "nothing has been measured yet"
        if not num_sequences:
            return self._drafts.least, inputs, "no sequences to draft for"
        room = self._room(draft_loads)

        def rate(num_workers: int) -> float:
            """Returns the total rate of the busy targets; a target without drafts counts 1."""
            if not num_workers:
                return float(sum(demand.num_sequences > 0 for demand in demands))
            batch = num_sequences / num_workers
            served = min(1.0, room / batch)
            return sum(
                1.0 + served * (demand.goodput(min(batch, room)) - 1.0) for demand in demands if demand.num_sequences
            )

        def best(cost: float) -> int:
            numbers = range(self._drafts.least, self._most_drafts(current, num_sequences) + 1)
            return max(numbers, key=lambda number: rate(number) - number * cost)

        gain = self._config.ray.scaling.draft_gain
        more, fewer = best(gain), best(gain / 2)  # two limits, so that small changes of the gain change nothing
        # Remove at most half: no worker was measured at several times its present load.
        wanted = self._drafts.limit(more if more > current else max(min(fewer, current), current // 2))
        inputs |= {"rate": rate(current), "wanted_rate": rate(wanted), "room": float(room)}
        reason = (
            f"{num_sequences} sequences of {len(demands)} targets, which yield {rate(wanted):.2f} times one without "
            f"drafts with {wanted} draft workers, {rate(current):.2f} with {current}"
        )
        return wanted, inputs, reason

    def _most_drafts(self, current: int, num_sequences: int) -> int:
        """Returns the maximum useful number of draft workers: more than one per sequence gain nothing."""
        most = max(num_sequences, current, self._drafts.least)
        return most if self._drafts.most is None else min(most, self._drafts.most)

    def _room(self, loads: Sequence[Load]) -> float:
        """Returns the number of sequences that a draft worker has room for."""
        room = float(self._config.draft.max_num_seqs)
        by_kv = [load.num_running / load.kv_use for load in loads if load.kv_use > _MUCH_KV and load.num_running]
        return max(1.0, min([room, *by_kv]))

    def _new_delay(self) -> _Delay:
        scaling = self._config.ray.scaling
        return _Delay(scaling.upscale_delay_seconds, scaling.downscale_delay_seconds)


class _Lateness:
    """Counts the requests of the last `_LATE_SECONDS` that were compared with a limit, and the late ones."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}  # last counts of each target, by address and epoch
        self._totals = deque([(-math.inf, 0, 0)])  # time, and counts since the targets changed

    def recent(self, targets: Sequence[Announcement], now: float) -> tuple[int, int]:
        """Returns the counts of all targets; 0 until `_LATE_SECONDS` after a target came or went."""
        before, self._seen = self._seen, {}
        _, num_limited, num_late = self._totals[-1]
        for member in targets:
            key = member.address, member.epoch
            first = before.get(key)
            last = first if member.load is None else (member.load.num_limited, member.load.num_late)
            if last is not None:
                self._seen[key] = last
                if first is not None:
                    num_limited += last[0] - first[0]
                    num_late += last[1] - first[1]
        if self._seen.keys() != before.keys():
            self._totals.clear()
        self._totals.append((now, num_limited, num_late))
        while len(self._totals) > 1 and self._totals[1][0] <= now - _LATE_SECONDS:
            self._totals.popleft()
        since, first_limited, first_late = self._totals[0]
        if now - since < _LATE_SECONDS:
            return 0, 0
        return num_limited - first_limited, num_late - first_late


class _Delay:
    """Delays changes of a number: `settle` returns the smallest change that was wanted during the whole delay."""

    def __init__(self, up_seconds: float, down_seconds: float) -> None:
        self._up_seconds = up_seconds
        self._down_seconds = down_seconds
        self._wanted: deque[tuple[float, int]] = deque()  # start of each wanted number

    def settle(self, current: int, wanted: int, now: float) -> int:
        self._wanted.append((now, wanted))
        least = self._extreme(min, now - self._up_seconds)
        most = self._extreme(max, now - self._down_seconds)
        while len(self._wanted) > 1 and self._wanted[1][0] <= now - max(self._up_seconds, self._down_seconds):
            self._wanted.popleft()
        if least is not None and least > current:
            return least
        return most if most is not None and most < current else current

    def _extreme(self, choose: Callable[[Iterable[int]], int], since: float) -> int | None:
        """Returns the extreme of the numbers wanted since `since`; None if the first decision came later."""
        if self._wanted[0][0] > since:
            return None
        ends = [*[at for at, _ in self._wanted][1:], math.inf]
        return choose(wanted for (_, wanted), end in zip(self._wanted, ends, strict=True) if end > since)
