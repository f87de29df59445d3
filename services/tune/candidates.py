"""Settings that `outrider tune` tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.config import Config
from cluster.diagnosis.findings import Finding

_CACHE_FACTORS = (2, 4)

Settings = tuple[str, ...]  # SECTION.KEY=VALUE


@dataclass(frozen=True, slots=True)
class SettingsCandidate:
    """Settings that may make a cluster faster, and the reason."""

    settings: Settings
    why: str

    @property
    def name(self) -> str:
        return ", ".join(self.settings)


def candidates(
    config: Config, findings: Sequence[Finding], drafts: Iterable[Settings] = ()
) -> Iterator[SettingsCandidate]:
    """Yields the settings of `drafts`, then those that may solve each of `findings`, in their order.

    Yields each candidate once.
    """
    seen: set[Settings] = set()
    for settings in drafts:
        if settings not in seen:
            seen.add(settings)
            yield SettingsCandidate(settings, "draft to compare")
    for finding in findings:
        for settings in _REMEDIES.get(finding.name, _none)(config):
            if settings not in seen:
                seen.add(settings)
                yield SettingsCandidate(settings, finding.name)


_Remedy = Callable[[Config], Iterator[Settings]]


def _none(config: Config) -> Iterator[Settings]:
    return iter(())


def _threads(config: Config) -> Iterator[Settings]:
    for pool, worker in (("target", config.target), ("draft", config.draft)):
        if worker.threads is not None:
            yield (f"{pool}.threads=null",)


def _cache_of(pool: str) -> _Remedy:
    def remedy(config: Config) -> Iterator[Settings]:
        worker = config.target if pool == "target" else config.draft
        if worker.kv_cache_bytes is not None:
            for factor in _CACHE_FACTORS:
                yield (f"{pool}.kv_cache_bytes={factor * worker.kv_cache_bytes}",)
        elif worker.memory_utilization < 0.95:
            yield (f"{pool}.memory_utilization=0.95",)

    return remedy


def _another_draft(config: Config) -> Iterator[Settings]:
    """Returns the settings of another draft that needs no training."""
    drafter = config.draft.drafter
    if drafter != "ngram":
        yield ("draft.drafter=ngram",)
    if config.target.engine == "torch" and drafter != "self-int4":
        yield ("draft.drafter=self-int4",)


def _cheaper_draft(config: Config) -> Iterator[Settings]:
    if config.draft.drafter in ("model", "eagle", "mtp") and config.draft.quantization is None:
        yield ("draft.quantization=int8",)
        yield ("draft.quantization=int4",)
    yield from _nearer_draft(config)
    yield from _another_draft(config)


def _nearer_draft(config: Config) -> Iterator[Settings]:
    placement, drafter = config.draft.placement, config.draft.drafter
    is_torch = config.target.engine == "torch" and drafter in ("model", "self-int4", "ngram")
    if is_torch and placement != "in-process" and config.draft.replicas == config.target.replicas:
        yield ("draft.placement=in-process",)
    if placement == "pool" and config.draft.replicas % config.target.replicas == 0:
        yield ("draft.placement=sidecar",)


_REMEDIES: Mapping[str, _Remedy] = {
    "threads oversubscribed": _threads,
    "KV cache exhausted": _cache_of("target"),
    "KV cache of the draft exhausted": _cache_of("draft"),
    "low acceptance": _another_draft,
    "draft the bottleneck": _cheaper_draft,
    "network dominates": _nearer_draft,
}
