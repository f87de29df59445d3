"""Findings about the programs of a cluster that do not depend on their load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cluster.diagnosis.findings import Finding
from services.running_cluster.workers import ClusterFacts, WorkerFacts

_CLOCK_SECONDS = 1.0  # clock difference above which traces and certificates suffer


def with_programs(costly: Sequence[Finding], facts: ClusterFacts) -> list[Finding]:
    """Adds findings from the programs' descriptions to `costly`. Their cost is unknown, so they come last."""
    findings = [
        *_links(facts),
        *_fingerprints(facts),
        *_versions(facts),
        *_clocks(facts.workers),
        *_isas(facts.workers),
    ]
    return [*costly, *(Finding(name, what, remedy, None) for name, what, remedy in findings)]


Found = Iterator[tuple[str, str, str]]


def _links(facts: ClusterFacts) -> Found:
    for unreachable in facts.unreachable:
        yield "worker unreachable", unreachable, "check that it runs, and that its address can be reached from here"
    for target in facts.targets:
        if target.num_links < target.num_links_configured:
            yield (
                "links down",
                f"{target.name} has {target.num_links} of {target.num_links_configured} links to draft workers",
                "its log has the reason for each: another tokenizer, TLS, or no answer",
            )


def _fingerprints(facts: ClusterFacts) -> Found:
    tokenizers = {worker.model.tokenizer_fingerprint for worker in facts.workers}
    if len(tokenizers) > 1:
        who = "; ".join(f"{worker.name}: {worker.model.tokenizer_fingerprint[:12]}" for worker in facts.workers)
        yield (
            "tokenizers differ",
            who,
            "set target.model in the draft worker's configuration, or choose a draft with most of the target's tokens",
        )


def _versions(facts: ClusterFacts) -> Found:
    versions = {"router": facts.version} | {worker.name: worker.machine.version for worker in facts.workers}
    if len(set(versions.values())) > 1:
        who = ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
        yield "versions differ", who, "they work together; finish the rollout"


def _clocks(workers: Iterable[WorkerFacts]) -> Found:
    for worker in workers:
        if abs(worker.clock_ahead_seconds) > _CLOCK_SECONDS:
            yield (
                "clocks differ",
                f"that of {worker.name} is {worker.clock_ahead_seconds:+.1f} s from this one's",
                "synchronize it by NTP: traces and certificates depend on it, tokens do not",
            )


def _isas(workers: Iterable[WorkerFacts]) -> Found:
    for worker in workers:
        machine = worker.machine
        if machine.best_instruction_set != machine.instruction_set:
            yield (
                "lower instruction set",
                f"{worker.name} has {machine.instruction_set}, its processor {machine.best_instruction_set}",
                "unset OUTRIDER_CPU_ISA there, unless the pool mixes processors",
            )
