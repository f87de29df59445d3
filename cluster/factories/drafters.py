"""Creates and identifies drafters by their names in the configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from cluster.config import Config
from cluster.config.workers import READ_STATES, DraftConfig, DrafterName
from cluster.drafters.base import Drafter
from cluster.drafters.model import ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.parallel import ParallelDrafter
from cluster.drafters.read_tokens import NUM_SINKS
from cluster.drafters.simulated import SimulatedDrafter
from cluster.drafters.translating import TranslatingDrafter
from cluster.engine.eagle import load_eagle_head, read_eagle_config
from cluster.engine.fingerprint import architecture_fingerprint, weights_fingerprint
from cluster.engine.heads import DecoderHead
from cluster.engine.limits import StepLimits
from cluster.engine.loader import LoadedModel, Progress
from cluster.engine.medusa import MedusaHeads, load_medusa_heads, read_medusa_names
from cluster.engine.model_config import ModelConfig
from cluster.engine.mtp import load_mtp_head, read_mtp_config
from cluster.engine.runner import ModelRunner, kv_cache_budget, load_weights, quantization_of
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.vllm.compatibility import DRAFTER, check
from cluster.vllm.engine_args import set_environment
from cluster.vocabulary_map import VocabularyMap


def draft_fingerprint(config: Config) -> str:
    """Returns the hexadecimal SHA-256 of the model and settings that proposals depend on. Raises ConfigurationError.

    Coordinators learn the acceptance of each fingerprint separately. Proposals also depend on the processor, which is
    not included.
    """
    draft = config.draft
    settings = draft.model_dump(mode="json", include={"drafter", "dtype", "quantization", "context_tokens"})
    if draft.drafter == "simulated":
        settings |= config.simulation.model_dump(mode="json", include={"acceptance", "acceptance_schedule"})
    elif draft.drafter != "ngram":
        folder = resolve_model_folder(config.draft_model)
        settings |= {"weights": weights_fingerprint(folder), "architecture": architecture_fingerprint(folder)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def make_drafter(config: Config, progress: Progress | None = None, vocabulary: VocabularyMap | None = None) -> Drafter:
    """Returns the drafter that `config` names, with its model loaded. Raises ConfigurationError.

    `vocabulary`: the result of `draft_vocabulary`; None: the draft uses the target's token IDs.
    """
    return _DRAFTERS[config.draft.drafter](config, progress, vocabulary)


def load_draft_model(
    config: Config, progress: Progress | None = None, vocabulary: VocabularyMap | None = None
) -> ModelRunner:
    """Returns a runner with the draft model and an empty cache. Raises ConfigurationError.

    The drafter must be one for which `is_model` returns True.
    """
    loaded = load_draft_weights(config, progress, vocabulary=vocabulary)
    return ModelRunner.with_cache(loaded, config.draft, kv_cache_budget(config.draft, loaded))


def is_model(drafter: DrafterName) -> bool:
    """Returns True if `drafter` runs a model on the PyTorch engine."""
    return _DRAFTERS[drafter] is _model_drafter


def load_draft_weights(
    config: Config,
    progress: Progress | None = None,
    target: LoadedModel | None = None,
    vocabulary: VocabularyMap | None = None,
) -> LoadedModel:
    """Returns the draft model. May share tensors with `target`, a model in the same process.

    Raises ConfigurationError. The drafter must be one for which `is_model` returns True.
    """
    if config.draft_has_tokenizer:
        return _load(config.draft, progress, vocabulary=None if _translates(config, vocabulary) else vocabulary)
    return _self_int4(config, progress, target)


def _translates(config: Config, vocabulary: VocabularyMap | None) -> bool:
    """Returns True if the drafter reads the text in the tokens of its own tokenizer."""
    return config.draft.drafter == "model" and vocabulary is not None and vocabulary.is_foreign


def _self_int4(config: Config, progress: Progress | None, target: LoadedModel | None) -> LoadedModel:
    """Returns the target's model with 4-bit projections; embedding, last norm and head stay as they are."""
    draft = config.draft.model_copy(update={"model": config.draft_model, "quantization": "int4"})
    if target is None:
        return _load(draft, progress)
    _check_shared(config, target)
    if config.target.quantization == "int4" and config.target.quantization_group_size == draft.quantization_group_size:
        return target
    weights = target.weights
    like_target = {"device": weights.device.type, "dtype": str(weights.dtype).removeprefix("torch.")}
    draft = draft.model_copy(update=like_target)
    return load_weights(draft, progress=progress, ends=weights)


def _check_shared(config: Config, target: LoadedModel) -> None:
    """Raises ConfigurationError if `draft.device` or `draft.dtype` prevents sharing the target's tensors."""
    draft, weights = config.draft, target.weights
    for name, own, shared in (
        ("device", draft.device, weights.device.type),
        ("dtype", draft.dtype, str(weights.dtype).removeprefix("torch.")),
    ):
        if own not in ("auto", shared):
            or_apart = "" if draft.reads_states else ", or draft.placement pool"
            raise ConfigurationError(
                f"draft.{name} {own}: in the target's process the drafter {draft.drafter} has the target's tensors, "
                f"which are {shared}: set draft.{name} auto{or_apart}"
            )


def check_heads(config: Config) -> None:
    """Raises ConfigurationError if the heads that `config` names are missing or unsupported. Reads no weights.

    The drafter must be one that reads the target's states.
    """
    folder = resolve_model_folder(config.target.model)
    target = ModelConfig.from_folder(folder)
    if config.draft.drafter == "eagle":
        read_eagle_config(resolve_model_folder(config.draft.model), target)
    elif config.draft.drafter == "medusa":
        read_medusa_names(resolve_model_folder(config.draft.model))
    else:
        read_mtp_config(folder, target)


def load_heads(config: Config, target: LoadedModel) -> DecoderHead | MedusaHeads:
    """Returns the heads that `config` names, which share tensors with `target`. Raises ConfigurationError.

    The drafter must be one that reads the target's states.
    """
    draft = config.draft
    _check_shared(config, target)
    quantization = quantization_of(draft)
    if draft.drafter == "mtp":
        return load_mtp_head(resolve_model_folder(config.target.model), target, quantization)
    load = load_medusa_heads if draft.drafter == "medusa" else load_eagle_head
    return load(resolve_model_folder(draft.model), target, quantization)


def model_drafter(config: Config, runner: ModelRunner, vocabulary: VocabularyMap | None = None) -> Drafter:
    """Returns the drafter with the model and cache of `runner`, which was loaded with `vocabulary`."""
    max_model_len = runner.model.config.resolve_max_model_len(config.draft.max_model_len)
    limits, context_tokens = StepLimits.of(config.draft, max_model_len), config.context_tokens
    if isinstance(context_tokens, int) and NUM_SINKS + context_tokens >= max_model_len:
        raise ConfigurationError(
            f"draft.context_tokens {context_tokens}: with the first {NUM_SINKS} tokens of a prompt they fill the "
            f"draft's context of {max_model_len} tokens: set at most {max_model_len - NUM_SINKS - 1}, or auto"
        )
    if config.draft.drafter == "parallel":
        mask_token_id = runner.model.config.mask_token_id
        if mask_token_id is None:
            raise ConfigurationError(
                f"draft.drafter parallel: the config.json of {config.draft.model!r} has no pard_token, so the model "
                "was not trained to draft several tokens at once: set draft.drafter model, or make one with `outrider "
                "distill --drafter parallel`"
            )
        num_inputs = runner.model.config.vocab_size if vocabulary is None else vocabulary.num_inputs
        if not 0 <= mask_token_id < num_inputs:
            raise ConfigurationError(
                f"the config.json of {config.draft.model!r} has a pard_token that is not in its vocabulary of "
                f"{num_inputs} tokens: correct it"
            )
        return ParallelDrafter(runner, limits, mask_token_id, vocabulary, context_tokens=context_tokens)
    if vocabulary is not None and _translates(config, vocabulary):
        return TranslatingDrafter(runner, limits, vocabulary, context_tokens=context_tokens)
    if runner.model.device.type != "cuda" or not runner.model.records_steps:
        return ModelDrafter(runner, limits, vocabulary=vocabulary, context_tokens=context_tokens)
    from cluster.drafters.burst import Burst  # PyTorch's builds for CPUs come without Triton

    burst = Burst.of(runner, limits, vocabulary)
    return ModelDrafter(runner, limits, burst, vocabulary, context_tokens=context_tokens)


def _model_drafter(config: Config, progress: Progress | None, vocabulary: VocabularyMap | None) -> Drafter:
    return model_drafter(config, load_draft_model(config, progress, vocabulary), vocabulary)


def _ngram(config: Config, progress: Progress | None, vocabulary: VocabularyMap | None) -> Drafter:
    draft = config.draft
    model = ModelConfig.from_folder(resolve_model_folder(config.draft_model))
    max_model_len = model.resolve_max_model_len(draft.max_model_len)
    return NgramDrafter(model.vocab_size, StepLimits.of(draft, max_model_len))


def _vllm(config: Config, progress: Progress | None, vocabulary: VocabularyMap | None) -> Drafter:
    set_environment(config.draft)  # vLLM reads some of it when it is imported
    check(DRAFTER, allow_untested=config.draft.allow_untested_vllm)
    from cluster.vllm.drafter import VllmDrafter  # only this drafter needs vLLM

    return VllmDrafter(config.draft, vocabulary)


def _in_target(config: Config, progress: Progress | None, vocabulary: VocabularyMap | None) -> Drafter:
    raise ConfigurationError(f"draft.drafter {config.draft.drafter} drafts inside the target: it has no draft workers")


def _simulated(config: Config, progress: Progress | None, vocabulary: VocabularyMap | None) -> Drafter:
    draft, model = config.draft, ModelConfig.from_folder(resolve_model_folder(config.draft_model))
    max_model_len = draft.max_model_len or config.target.max_model_len or model.max_position_embeddings
    vocab_size = config.simulation.vocab_size or model.vocab_size
    limits = StepLimits.of(draft, max_model_len)
    return SimulatedDrafter(config.simulation, vocab_size, limits, context_tokens=config.context_tokens)


_DRAFTERS: dict[DrafterName, Callable[[Config, Progress | None, VocabularyMap | None], Drafter]] = {
    "model": _model_drafter,
    "parallel": _model_drafter,
    "self-int4": _model_drafter,
    "ngram": _ngram,
    "vllm": _vllm,
    **dict.fromkeys((*READ_STATES, "engine"), _in_target),
    "simulated": _simulated,
}


def _load(draft: DraftConfig, progress: Progress | None, vocabulary: VocabularyMap | None = None) -> LoadedModel:
    return load_weights(
        draft,
        progress=progress,
        rows=None if vocabulary is None else vocabulary.rows,
        num_outputs=None if vocabulary is None else vocabulary.num_ids,
    )
