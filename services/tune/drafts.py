"""Finds the drafter for a model or a head from its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.config.workers import DrafterName
from cluster.engine.eagle import read_eagle_config
from cluster.engine.medusa import read_medusa_names
from cluster.engine.model_config import ModelConfig
from cluster.engine.mtp import read_mtp_config
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder


def draft_settings(target: str, drafts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the settings for each of `drafts`, and for the MTP module of `target` if it has one.

    Models are folders or names. Raises ConfigurationError if the target or a draft is not a model.
    """
    folder = resolve_model_folder(target)
    config = ModelConfig.from_folder(folder)
    for draft in drafts:
        yield f"draft.model={draft}", f"draft.drafter={_drafter_for(resolve_model_folder(draft), config)}"
    if _is_readable(lambda: read_mtp_config(folder, config)):
        yield ("draft.drafter=mtp",)


def _drafter_for(folder: Path, target: ModelConfig) -> DrafterName:
    if _is_readable(lambda: read_medusa_names(folder)):
        return "medusa"
    if _is_readable(lambda: read_eagle_config(folder, target)):
        return "eagle"
    return "model" if ModelConfig.from_folder(folder).mask_token_id is None else "parallel"


def _is_readable(read: Callable[[], object]) -> bool:
    try:
        read()
    except ConfigurationError:
        return False
    return True
