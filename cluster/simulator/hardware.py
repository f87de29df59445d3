"""Steps and memory of models on GPUs, by the planner's formulae, for a cluster in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import Config
from cluster.config.simulation import SimulationConfig
from cluster.engine.host_memory import host_cache_bytes
from cluster.engine.memory_plan import Budget, Memory, PlannedModel, Tenant
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.planning.hardware import GpuGroup
from cluster.planning.kernel_tables import step_predictor
from cluster.planning.kernels import Segments
from cluster.planning.steps import context_ms

_ROWS = (1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class OnGpus:
    """A model and its GPUs."""

    model: PlannedModel
    gpus: GpuGroup


def steps_of(config: Config, target: OnGpus | None, draft: OnGpus | None, mean_context: float) -> Config:
    """Returns `config` with step times of models on GPUs; None keeps a model's times.

    The target's step time is a curve over rows without cached tokens, plus a time for each sequence to read
    `mean_context` cached tokens once. The draft's step time is a curve over sequences without cached tokens, plus
    the time of the tokens that each has read.
    """
    changed: dict[str, object] = {}
    if target is not None:
        steps = step_predictor(target.model, target.gpus)
        changed["target_step_ms"] = [(n, 1e3 * steps.seconds((Segments(n, 1, 0),))) for n in _ROWS]
        num_seqs = config.target.max_num_seqs
        cached, empty = (steps.seconds((Segments(num_seqs, 1, tokens),)) for tokens in (mean_context, 0))
        changed["target_sequence_ms"] = 1e3 * (cached - empty) / num_seqs
    if draft is not None:
        model = draft.model.with_wide_head() if config.drafts_on_host_cpu else draft.model
        steps = step_predictor(model, draft.gpus)
        changed["draft_step_ms"] = [(n, 1e3 * steps.seconds((Segments(n, 1, 0),))) for n in _ROWS]
        changed["draft_context_ms"] = context_ms(steps, config.draft.max_num_seqs)
    simulation = SimulationConfig.model_validate(config.simulation.model_dump() | changed)
    return config.model_copy(update={"simulation": simulation})


def num_kv_blocks(config: Config, target: OnGpus | None, kv_tokens: int | None) -> int:
    """Returns the number of KV blocks of a target. Raises ConfigurationError if there is no room for a block.

    The blocks hold `kv_tokens` tokens. If `kv_tokens` is None, they fill the memory of the GPUs of `target` that the
    weights leave free. If `target` is None too, they fill the KV cache of a target on a CPU.
    """
    size = config.target.block_size
    if kv_tokens is not None:
        number = kv_tokens // size
    elif target is not None:
        memory = Memory(target.gpus.memory_gb, config.target.memory_utilization, size)
        budget = Budget((Tenant("target", target.model, 0),), memory)
        number = int(budget.kv_cache_bytes / (size * target.model.kv_bytes_per_token))
    else:
        model = PlannedModel.parse(f"{config.target.model}:bf16")
        folder, token_bytes = resolve_model_folder(config.target.model), model.kv_bytes_per_token
        longest = ModelConfig.from_folder(folder).resolve_max_model_len(config.target.max_model_len)
        number = (config.target.kv_cache_bytes or host_cache_bytes(config.target, longest, token_bytes)) // (
            size * token_bytes
        )
    if number < 1:
        raise ConfigurationError("the target has no room for a KV block: its weights fill its memory")
    return number


def dollars_per_hour(config: Config, of_target: float | None, of_draft: float | None) -> float | None:
    """Returns the price of the whole cluster; None if unknown. Drafts on the targets' host CPUs are free."""
    num_drafts = 0
    if config.has_draft_workers and not config.drafts_on_host_cpu:
        num_drafts = config.draft.replicas * (config.target.replicas if config.has_sidecars else 1)
    if of_target is None or (num_drafts and of_draft is None):
        return None
    return config.target.replicas * of_target + num_drafts * (of_draft or 0.0)
