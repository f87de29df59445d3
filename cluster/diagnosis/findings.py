"""Findings: problems of a cluster's speculation, their cost, and their remedies.

Each rule is one of the published failure modes. The speed of the repaired cluster is predicted by correcting one
number:
- the acceptance or the step time of the draft, to those of the best draft of the same publication;
- the round trip, to that within one host;
- the size of the cache, so that it holds all sequences.

The cost of oversubscribed threads is not predicted, because no measurement shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.diagnosis.measurements import Examination, WorkerThreads
from cluster.diagnosis.speed import SpeedModel
from cluster.planning.options import LOCAL_ROUND_TRIP_SECONDS

# A draft fits if its step takes less than this share of a target step, and if a round with five drafts commits at least
# this number of tokens. Its acceptance must be above the limit below which the published controller reduces k by two.
MAX_COST_RATIO = 0.15
MIN_TOKENS_PER_ROUND = 2.0
MIN_ACCEPTANCE = 0.6
_RULE_DEPTH = 5
# Predictions assume the replacement by a distilled 1B draft of a 70B target: steps of 0.8 ms, and 15 ms of the target.
GOOD_ACCEPTANCE = 0.82
GOOD_COST_RATIO = 0.8 / 15
_LEAST_LOSS = 0.05  # minimum loss to report: smaller losses are within the noise of two measurements
_SHARE_OF_A_STEP = 0.05  # share of a target step that a round trip may take without a finding
_FULL_SHARE = 0.9  # steps are full with this share of the streams; the others begin, end or wait for admission
_REFUSED_SHARE = 0.05  # share of the steps with a refused sequence that makes a finding
_KEPT_SHARE = 0.99  # of the requests with a limit; limits are meant at p99

Rate = Callable[[SpeedModel], float]
"Tokens per second of a cluster without the problem."


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of the cluster."""

    name: str
    what: str  # what was observed
    remedy: str
    tokens_per_second: float | None  # predicted for the repaired cluster; None: cannot be predicted
    loss: float | None = None  # 1 - rate now / rate mended


def findings(found: Examination, earlier_survival: Sequence[float] = ()) -> list[Finding]:
    """Returns the problems that cost at least 5 % of the predicted rate, ordered by falling loss.

    Problems without a prediction come first. `earlier_survival`: survival of the draft's tokens when it was new, if
    known; a repaired draft is assumed to be at least as good.
    """
    threads = [*_threads(found.threads), *_limits(found)]
    if not found.has_drafts:
        return [
            *threads,
            Finding(
                "no drafts",
                "requests that asked for draft tokens were decoded plainly",
                "check that draft workers run and are linked, and that speculation is on (`outrider speculation`)",
                None,
            ),
        ]
    now = found.auto.counts.tokens_per_second
    costly = [
        replace(finding, loss=None if rate is None else max(0.0, 1.0 - now / rate))
        for finding in _suspected(found, tuple(earlier_survival))
        if (rate := finding.tokens_per_second) is None or now < (1.0 - _LEAST_LOSS) * rate
    ]
    return [*threads, *sorted(costly, key=lambda finding: -1.0 if finding.loss is None else -finding.loss)]


def _suspected(found: Examination, earlier_survival: tuple[float, ...]) -> Iterator[Finding]:
    now = SpeedModel.of(found)
    # The formula omits the same terms in both predictions, so predictions are scaled by a measured ratio. The ratio
    # covers all reached depths, because the repaired cluster may have another best depth. It does not use the run with
    # the controller: with late drafts, the formula omits more terms there.
    predicted = sum(one.counts.seconds * now.rate(one.workload.num_speculative_tokens or 0) for one in found.reached)
    scale = sum(one.counts.num_tokens for one in found.reached) / max(predicted, 1e-9)

    def rate(mended: SpeedModel) -> float:
        return scale * mended.best_rate()

    yield from _cache(found, now, rate)
    yield from _acceptance(now, rate, earlier_survival)
    # Threads that wait for a core lengthen draft steps and replies, and would be mistaken for a slow draft or network.
    if not any(threads.are_oversubscribed for threads in found.threads):
        yield from _draft_time(now, rate)
        yield from _network(now, rate)


def _threads(workers: Sequence[WorkerThreads]) -> Iterator[Finding]:
    """Yields one finding for all workers that compute with more threads than cores."""
    oversubscribed = [worker for worker in workers if worker.are_oversubscribed]
    if oversubscribed:
        seen = (f"{one.worker}: {one.num_threads} threads compute on {one.num_cores} cores" for one in oversubscribed)
        settings = dict.fromkeys(f"{one.pool}.threads" for one in oversubscribed)
        yield Finding(
            "threads oversubscribed",
            "; ".join(seen),
            f"set {' and '.join(settings)} to null (one thread per core), then run the doctor again: until then the "
            "times of drafts and network are unreliable",
            None,
        )


def _limits(found: Examination) -> Iterator[Finding]:
    """Yields a finding for each limit of time that requests miss, with the part that takes most of the time."""
    counts = found.auto.counts
    prompts = (counts.prefill.seconds, "steps with prompts")
    answers = ((counts.verify + counts.decode).seconds, "steps without prompts")
    waits = (counts.wait_seconds, "waits for drafts")
    for limit, (num_kept, num_requests) in counts.within_limits.items():
        if num_kept >= _KEPT_SHARE * num_requests:
            continue
        seconds, part = max(prompts, answers, waits)
        what = f"{100 * seconds / max(counts.busy_seconds, 1e-9):.0f} % of the targets' time are {part}"
        if limit == "first_token_ms" and found.is_cache_full:
            what, remedy = f"{counts.mean_waiting:.1f} requests wait for blocks", "raise target.kv_cache_bytes"
        elif limit == "first_token_ms":
            remedy = "raise target.max_prefill_ms"
        elif part == prompts[1]:
            remedy = "lower target.max_prefill_ms"
        elif part == answers[1]:
            remedy = "lower target.max_num_seqs"
        else:
            remedy = "raise draft.replicas"
        yield Finding(
            f"{limit} missed",
            f"{num_kept:.0f} of {num_requests:.0f} requests were within the limit; {what}",
            f"{remedy} or target.replicas, or set target.refuse_late",
            None,
        )


def _cache(found: Examination, now: SpeedModel, rate: Rate) -> Iterator[Finding]:
    """Yields findings of exhausted KV caches.

    The target's cache is exhausted if sequences wait or are preempted; that of a draft worker if it refuses sequences.
    """
    num_streams = found.auto.workload.num_streams
    auto = found.auto.counts
    if auto.mean_batch < _FULL_SHARE * num_streams and found.is_cache_full:
        alone = found.alone.counts  # with one stream no prompt is recomputed
        undisturbed = min(now.prompt_seconds, alone.prompt_seconds(alone.verify.mean_seconds))
        yield Finding(
            "KV cache exhausted",
            f"of {num_streams} streams {auto.mean_batch:.1f} were in a step, the others waited for blocks; "
            f"{auto.num_preemptions:.0f} preemptions",
            "raise target.kv_cache_bytes (or target.memory_utilization), or lower target.max_num_seqs, or k",
            rate(replace(now, num_streams=num_streams, prompt_seconds=undisturbed)),
        )
    if auto.num_refusals > _REFUSED_SHARE * auto.num_steps:
        drafted = auto.num_rounds / max(auto.mean_batch * auto.num_steps, 1.0)
        yield Finding(
            "KV cache of the draft exhausted",
            f"draft workers had no room {auto.num_refusals:.0f} times; {100 * drafted:.0f} % of the rounds had drafts",
            "raise draft.kv_cache_bytes or draft.max_num_seqs, or draft.replicas",
            rate(now),
        )


def _acceptance(now: SpeedModel, rate: Rate, earlier_survival: tuple[float, ...]) -> Iterator[Finding]:
    tokens = now.tokens_per_round(_RULE_DEPTH)
    acceptance = now.acceptance(_RULE_DEPTH)
    if tokens < MIN_TOKENS_PER_ROUND or acceptance <= MIN_ACCEPTANCE:
        yield Finding(
            "low acceptance",
            f"{tokens:.2f} tokens a round of {_RULE_DEPTH}, {100 * acceptance:.0f} % accepted of the draft tokens that "
            f"are looked at; a draft that suits has {MIN_TOKENS_PER_ROUND:g} and over {100 * MIN_ACCEPTANCE:.0f} %",
            "another draft (`outrider distill` trains one on your prompts), or ngram or self-int4 for draft.drafter; "
            "until then a smaller k",
            max(rate(now.accepting(GOOD_ACCEPTANCE)), rate(replace(now, survival=earlier_survival))),
        )


def _draft_time(now: SpeedModel, rate: Rate) -> Iterator[Finding]:
    step = now.step_seconds(0)
    ratio = now.draft_seconds / step
    if ratio > MAX_COST_RATIO:
        yield Finding(
            "draft the bottleneck",
            f"a draft step takes {1e3 * now.draft_seconds:.1f} ms, {100 * ratio:.0f} % of the target's "
            f"{1e3 * step:.1f}; what fits takes less than {100 * MAX_COST_RATIO:.0f} %",
            "a smaller draft, draft.quantization int8 or int4, a faster device or more devices, or ngram for "
            "draft.drafter",
            rate(now.with_draft(GOOD_COST_RATIO * step)),
        )


def _network(now: SpeedModel, rate: Rate) -> Iterator[Finding]:
    drafting = _RULE_DEPTH * now.draft_seconds
    is_felt = now.round_trip_seconds > _SHARE_OF_A_STEP * now.step_seconds(0)
    if is_felt and now.round_trip_seconds > max(drafting, 2 * LOCAL_ROUND_TRIP_SECONDS):
        yield Finding(
            "network dominates",
            f"a round trip to the draft takes {1e3 * now.round_trip_seconds:.1f} ms, {_RULE_DEPTH} draft tokens "
            f"{1e3 * drafting:.1f}",
            "draft.placement sidecar or in-process, pairs within one host or zone, or a drafter on the target",
            rate(replace(now, round_trip_seconds=LOCAL_ROUND_TRIP_SECONDS)),
        )
