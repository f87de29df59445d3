"""Sends a cluster requests of a known kind for some seconds, and reads its counters."""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.diagnosis.measurements import Counts, Measured, StepTotals, Workload
from cluster.errors import ConfigurationError
from services.http_call import call
from services.running_cluster.access import Access
from services.running_cluster.pages import MetricsPage, total
from services.running_cluster.workers import ClusterFacts, check_unchanged

_ANSWER_SECONDS = 300.0
_RAMP_SECONDS = 120.0
_POLL_SECONDS = 0.2  # interval between checks for errors, which send no request
_WAITING_SECONDS = 1.0  # interval between checks of the number of waiting sequences
_LIMITS = ("first_token_ms", "output_token_ms")
_KINDS = ("verify", "decode", "prefill")
_COUNTED = {
    "wait": "outrider_proposal_wait_seconds_total",
    "busy": "outrider_engine_busy_seconds_total",
    "preemptions": "vllm:num_preemptions_total",
}
_POSITION = "position "

Numbers = defaultdict[str, float]


@dataclass(frozen=True, slots=True)
class _Look:
    """The numbers of all pages at one time."""

    counters: Numbers
    num_waiting: float


@dataclass(slots=True)
class LoadMaker:
    """Puts one cluster under loads, one after the other.

    `max_tokens`: of an answer. `check`: raises ConfigurationError when the workers are no longer those of `facts`.
    """

    facts: ClusterFacts
    prompts: Sequence[str]
    max_tokens: int
    access: Access = field(default_factory=Access)
    check: Callable[[ClusterFacts, Access], None] = check_unchanged

    def run(self, workload: Workload, seconds: float, *, part: int = 0, num_parts: int = 1) -> Numbers:
        """Returns the growth of the counters in `seconds` in which all streams were busy.

        It begins with the first prompt of `part` of `num_parts`. Repeats with parts of their own ask more of the
        prompts; loads of one part ask the same ones, as some are easier to draft. Metrics pages are read before and
        after. The number of waiting sequences is not a counter, so under the controller's own k it is also read once a
        second. Raises ConfigurationError, also if a worker was restarted meanwhile, and its counters with it.
        """
        with self._streams(workload, part * len(self.prompts) // num_parts) as failed:
            before, started_at = self._look(), time.perf_counter()
            waiting, next_look = [before.num_waiting], _WAITING_SECONDS
            while (passed := time.perf_counter() - started_at) < seconds:
                if failed:
                    raise failed[0]
                if passed >= next_look and workload.num_speculative_tokens is None:
                    waiting.append(_num_waiting(self.facts.target_pages(self.access)))
                    next_look += _WAITING_SECONDS
                time.sleep(min(_POLL_SECONDS, seconds - passed))
            self.check(self.facts, self.access)
            after, elapsed = self._look(), time.perf_counter() - started_at
        waiting.append(after.num_waiting)
        grown: Numbers = defaultdict(float, {"seconds": elapsed, "waiting": statistics.mean(waiting) * elapsed})
        for name, value in after.counters.items():
            if value < before.counters[name]:  # counters of the router, which has no epoch
                raise ConfigurationError(f"a program of {self.facts.url} restarted under the load: run this again")
            grown[name] += value - before.counters[name]
        return grown

    @contextmanager
    def _streams(self, workload: Workload, first_prompt: int) -> Iterator[list[ConfigurationError]]:
        """Yields while streams run, each with one request after the other; errors are added to the yielded list."""
        num_streams = workload.num_streams * len(self.facts.targets)
        is_over, has_answered = threading.Event(), threading.Semaphore(0)
        failed: list[ConfigurationError] = []

        def stream(first: int) -> None:
            number = first_prompt + first
            # The first answers are short and differ in length: streams that begin together would end together.
            max_tokens = max(8, self.max_tokens * (first + 1) // (2 * num_streams))
            while not is_over.is_set():
                try:
                    self._generate(number, workload, max_tokens)
                except ConfigurationError as error:
                    failed.append(error)
                    is_over.set()
                has_answered.release()
                number, max_tokens = number + num_streams, self.max_tokens

        with ThreadPoolExecutor(num_streams) as threads:
            for first in range(num_streams):
                threads.submit(stream, first)
            try:
                deadline = time.monotonic() + _RAMP_SECONDS
                for _ in range(num_streams):
                    if not has_answered.acquire(timeout=max(0.0, deadline - time.monotonic())):
                        raise ConfigurationError(
                            f"{self.facts.url} has not answered all of {num_streams} streams in {_RAMP_SECONDS:g} s: "
                            "ask for fewer"
                        )
                if failed:
                    raise failed[0]
                yield failed
            finally:
                is_over.set()

    def _generate(self, number: int, workload: Workload, max_tokens: int) -> None:
        depth = workload.num_speculative_tokens
        # Each prompt is computed: prompts left in the prefix cache would make the next load look fast.
        body = {
            "cache_salt": secrets.token_hex(8),
            "model": self.facts.model,
            "prompt": self.prompts[number % len(self.prompts)],
            "seed": number,
            "temperature": workload.temperature,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "num_speculative_tokens": "auto" if depth is None else depth,
        }
        call(
            self.facts.url, "POST", "/v1/completions", body, seconds=_ANSWER_SECONDS, context=self.access.router.context
        )

    def _look(self) -> _Look:
        """Reads each page once."""
        router = self.access.router.read_page(self.facts.url)
        targets, drafts = self.facts.target_pages(self.access), self.facts.draft_pages(self.access)
        return _Look(_counters(router, targets, drafts), _num_waiting(targets))

    def measured(self, workload: Workload, grown: Numbers) -> Measured:
        """Returns the counters per target. `grown`: their increase in one run, or the sum over several."""
        share = 1.0 / len(self.facts.targets)

        def steps(kind: str) -> StepTotals:
            return StepTotals(share * grown[kind], share * grown[f"{kind} seconds"])

        positions = sorted(int(name.removeprefix(_POSITION)) for name in grown if name.startswith(_POSITION))
        counts = Counts(
            seconds=grown["seconds"],
            num_tokens=share * grown["tokens"],
            num_rounds=share * grown["rounds"],
            num_draft_tokens=share * grown["drafted"],
            num_accepted_tokens=share * grown["accepted"],
            accepted_by_position=tuple(share * grown[f"{_POSITION}{position}"] for position in positions),
            verify=steps("verify"),
            decode=steps("decode"),
            prefill=steps("prefill"),
            draft=steps("draft"),
            wait_seconds=share * grown["wait"],
            busy_seconds=share * grown["busy"],
            num_preemptions=share * grown["preemptions"],
            num_refusals=share * grown["refusals"],
            waiting_seconds=share * grown["waiting"],
            within_limits={limit: (grown[f"{limit} kept"], grown[limit]) for limit in _LIMITS if grown[limit]},
        )
        return Measured(workload, counts)


def _counters(router: MetricsPage, targets: Sequence[MetricsPage], drafts: Sequence[MetricsPage]) -> Numbers:
    found: Numbers = defaultdict(float, {name: total(targets, metric) for name, metric in _COUNTED.items()})
    for kind in _KINDS:
        found[kind] = total(targets, "outrider_steps_total", kind=kind)
        found[f"{kind} seconds"] = total(targets, "outrider_step_seconds_total", kind=kind)
    for limit in _LIMITS:
        found[limit] = total(targets, "outrider_limit_ratio_count", limit=limit)
        found[f"{limit} kept"] = total(targets, "outrider_limit_ratio_bucket", limit=limit, le="1.0")
    for reason in ("full", "no_credit"):
        found["refusals"] += total(targets, "outrider_sequences_refused_total", reason=reason)
    drafting = [*targets, *drafts]
    found["draft"] = total(drafting, "outrider_draft_steps_total")
    found["draft seconds"] = total(drafting, "outrider_draft_step_seconds_total")
    found["tokens"] = router.sum("vllm:generation_tokens_total")  # summed over all engines
    found["rounds"] = router.sum("vllm:spec_decode_num_drafts_total")
    found["drafted"] = router.sum("vllm:spec_decode_num_draft_tokens_total")
    found["accepted"] = router.sum("vllm:spec_decode_num_accepted_tokens_total")
    accepted = router.by_label("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    found.update({f"{_POSITION}{position}": value for position, value in accepted.items()})
    return found


def _num_waiting(targets: Sequence[MetricsPage]) -> float:
    return total(targets, "vllm:num_requests_waiting")
