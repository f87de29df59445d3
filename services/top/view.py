"""Shows the changes of a cluster between two looks at its metrics pages, as lines of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.running_cluster.pages import MetricsPage
from services.running_cluster.workers import ClusterFacts, WorkerFacts

_BAR_WIDTH = 20
_KINDS = ("prefill", "verify", "decode")


@dataclass(frozen=True, slots=True)
class Look:
    """Metrics pages at one time; `at` in seconds."""

    at: float
    router: MetricsPage
    targets: Sequence[MetricsPage]
    drafts: Sequence[MetricsPage]


@dataclass(frozen=True, slots=True)
class Change:
    """Change between two looks."""

    facts: ClusterFacts
    before: Look
    after: Look

    def lines(self) -> list[str]:
        lines = [f"{self.facts.model} at {self.facts.url}", "", *self._router(), ""]
        for worker, before, after in zip(self.facts.targets, self.before.targets, self.after.targets, strict=True):
            lines += self._target(worker, before, after)
        for worker, before, after in zip(self.facts.drafts, self.before.drafts, self.after.drafts, strict=True):
            lines.append(self._draft(worker, before, after))
        return lines

    @property
    def _seconds(self) -> float:
        return max(self.after.at - self.before.at, 1e-9)

    def _router(self) -> list[str]:
        def grown(name: str, **labels: str) -> float:
            return _grown(self.before.router, self.after.router, name, **labels)

        running = self.after.router.sum("vllm:num_requests_running")
        tokens, requests = grown("vllm:generation_tokens_total"), grown("outrider_requests_total")
        first = _mean(grown, "vllm:time_to_first_token_seconds")
        between = _mean(grown, "vllm:request_time_per_output_token_seconds")
        rounds = grown("vllm:spec_decode_num_drafts_total")
        drafted = grown("vllm:spec_decode_num_draft_tokens_total")
        accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
        lines = [
            f"requests   {running:.0f} running, {requests / self._seconds:.1f}/s ended",
            f"tokens     {tokens / self._seconds:.0f}/s; first after {_ms(first)}, then one in {_ms(between)}",
        ]
        if not rounds or not drafted:
            return [*lines, f"drafts     none verified{self._why_plain()}"]
        lines.append(
            f"drafts     k {drafted / rounds:.1f}, {100 * accepted / drafted:.0f} % accepted, "
            f"{1 + accepted / rounds:.2f} tokens a round"
        )
        positions = _by_label(self.before.router, self.after.router, "position")
        for position in sorted(positions, key=int)[:8]:
            share = positions[position] / rounds
            lines.append(f"  place {int(position) + 1:2}  {_bar(share)} {share:.2f}")
        return lines

    def _why_plain(self) -> str:
        """Returns the most frequent reason of decodes without drafts, and its share of them; "" if there are none."""
        counts: defaultdict[str, float] = defaultdict(float)
        for before, after in zip(self.before.targets, self.after.targets, strict=True):
            for reason in after.by_label("outrider_plain_decodes_total", "reason"):
                counts[reason] += _grown(before, after, "outrider_plain_decodes_total", reason=reason)
        if not any(counts.values()):
            return ""
        reason = max(counts, key=counts.__getitem__)
        return f": {reason} ({100 * counts[reason] / sum(counts.values()):.0f} % of plain decodes)"

    def _target(self, worker: WorkerFacts, before: MetricsPage, after: MetricsPage) -> list[str]:
        def grown(name: str, **labels: str) -> float:
            return _grown(before, after, name, **labels)

        steps = grown("outrider_steps_total")
        kinds = []
        for kind in _KINDS:
            count = grown("outrider_steps_total", kind=kind)
            if count:
                seconds = grown("outrider_step_seconds_total", kind=kind)
                kinds.append(f"{kind} {count / self._seconds:.0f}/s of {1e3 * seconds / count:.1f} ms")
        wait = 1e3 * grown("outrider_proposal_wait_seconds_total") / steps if steps else 0.0
        gain = max(after.by_label("outrider_speculation_gain_ratio", "draft").values(), default=None)
        up, listed = after.sum("outrider_draft_links_up"), after.sum("outrider_draft_links_configured")
        running, waiting = after.sum("vllm:num_requests_running"), after.sum("vllm:num_requests_waiting")
        used = 100 * after.sum("vllm:kv_cache_usage_perc")
        return [
            f"{worker.name}: {running:.0f} running, {waiting:.0f} waiting, KV {used:.0f} %, "
            f"{up:.0f} of {listed:.0f} links" + ("" if gain is None else f", gain {gain:.2f}"),
            f"  {', '.join(kinds) or 'no steps'}; {wait:.1f} ms a step waited for proposals",
        ]

    def _draft(self, worker: WorkerFacts, before: MetricsPage, after: MetricsPage) -> str:
        steps = _grown(before, after, "outrider_draft_steps_total")
        seconds = _grown(before, after, "outrider_draft_step_seconds_total")
        step = f"{1e3 * seconds / steps:.2f} ms a step" if steps else "no steps"
        return (
            f"{worker.name}: {after.sum('outrider_draft_sequences'):.0f} sequences, {step}, computes "
            f"{100 * seconds / self._seconds:.0f} % of the time"
        )


def _grown(before: MetricsPage, after: MetricsPage, name: str, **labels: str) -> float:
    """Returns the growth of a counter, also of restarted programs, which count from zero again."""
    return max(0.0, after.sum(name, **labels) - before.sum(name, **labels))


def _by_label(before: MetricsPage, after: MetricsPage, label: str) -> dict[str, float]:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    old = before.by_label(name, label)
    return {key: max(0.0, value - old.get(key, 0.0)) for key, value in after.by_label(name, label).items()}


def _mean(grown: Callable[[str], float], histogram: str) -> float | None:
    count = grown(f"{histogram}_count")
    return grown(f"{histogram}_sum") / count if count else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _bar(share: float) -> str:
    full = round(_BAR_WIDTH * min(share, 1.0))
    return "█" * full + "·" * (_BAR_WIDTH - full)
