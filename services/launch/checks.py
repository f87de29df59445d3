"""Checks of the models that need no running program."""

from __future__ import annotations

from cluster.config import Config
from cluster.drafters.pairing import draft_vocabulary
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer


def check_models(config: Config) -> None:
    """Raises ConfigurationError if a model is missing or unsupported, or the pair cannot work."""
    _check_model(config.target.model, is_ours=config.target.engine != "vllm")
    if config.draft.replicas == 0 and not config.drafts_in_process:
        return
    if (config.target.engine == "simulated") != (config.draft.drafter == "simulated"):
        raise ConfigurationError(
            f"draft.drafter {config.draft.drafter!r} cannot draft for target.engine {config.target.engine!r}: "
            "either both are simulated or neither is"
        )
    _check_model(config.draft_model, is_ours=config.draft.drafter != "vllm")
    draft_vocabulary(config)
    if config.draft.reads_states and config.has_drafter:
        # Imported here: reading the names in a checkpoint needs PyTorch, which takes a second to import.
        from cluster.factories.drafters import check_heads

        check_heads(config)


def _check_model(model: str, *, is_ours: bool) -> None:
    """`is_ours`: the model runs on the PyTorch engine, which supports some architectures only."""
    folder = resolve_model_folder(model)
    if is_ours:
        ModelConfig.from_folder(folder)
    Tokenizer(folder)
