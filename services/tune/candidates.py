"""Settings that `outrider tune` tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.config import Config
from cluster.diagnosis.findings import Finding

_CACHE_FACTORS = (2, 4)
_MIN_LAYERS = 2  # minimum number of layers that layer-skip keeps

Settings = tuple[str, ...]  # SECTION.KEY=VALUE
SearchLayers = Callable[[Config], Sequence[int]]
"Finds the layers that layer-skip should keep."


@dataclass(frozen=True, slots=True)
class SettingsCandidate:
    """Settings that may make a cluster faster, and the reason."""

    settings: Settings
    why: str

    @property
    def name(self) -> str:
        return ", ".join(self.settings)


def candidates(
    config: Config, findings: Sequence[Finding], search_layers: SearchLayers, drafts: Iterable[Settings] = ()
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
        for settings in _REMEDIES.get(finding.name, _none)(config, search_layers):
            if settings not in seen:
                seen.add(settings)
                yield SettingsCandidate(settings, finding.name)


_Remedy = Callable[[Config, SearchLayers], Iterator[Settings]]


def _none(config: Config, search_layers: SearchLayers) -> Iterator[Settings]:
    return iter(())


def _threads(config: Config, search_layers: SearchLayers) -> Iterator[Settings]:
    for pool, worker in (("target", config.target), ("draft", config.draft)):
        if worker.threads is not None:
            yield (f"{pool}.threads=null",)


def _cache_of(pool: str) -> _Remedy:
    def remedy(config: Config, search_layers: SearchLayers) -> Iterator[Settings]:
        worker = config.target if pool == "target" else config.draft
        if worker.kv_cache_bytes is not None:
            for factor in _CACHE_FACTORS:
                yield (f"{pool}.kv_cache_bytes={factor * worker.kv_cache_bytes}",)
        elif worker.memory_utilization < 0.95:
            yield (f"{pool}.memory_utilization=0.95",)

    return remedy


def _another_draft(config: Config, search_layers: SearchLayers) -> Iterator[Settings]:
    """Returns the settings of another draft that needs no training."""
    drafter = config.draft.drafter
    if drafter != "ngram":
        yield ("draft.drafter=ngram",)
    if config.target.engine != "torch":
        return
    if drafter != "self-int4":
        yield ("draft.drafter=self-int4",)
    layers = search_layers(config)
    if len(layers) >= _MIN_LAYERS:
        kept = f"draft.layers=[{','.join(map(str, layers))}]"
        yield "draft.drafter=layer-skip", kept, "draft.quantization=null"  # an earlier trial may have set it


def _cheaper_draft(config: Config, search_layers: SearchLayers) -> Iterator[Settings]:
    if config.draft.drafter in ("model", "eagle", "mtp") and config.draft.quantization is None:
        yield ("draft.quantization=int8",)
        yield ("draft.quantization=int4",)
    yield from _nearer_draft(config, search_layers)
    yield from _another_draft(config, search_layers)


def _nearer_draft(config: Config, search_layers: SearchLayers) -> Iterator[Settings]:
    placement, drafter = config.draft.placement, config.draft.drafter
    is_torch = config.target.engine == "torch" and drafter in ("model", "self-int4", "layer-skip", "ngram")
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
