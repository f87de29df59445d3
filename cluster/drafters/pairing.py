"""Checks that a draft can propose the target's tokens, and maps its vocabulary to the target's."""

from __future__ import annotations

import json
import logging
from typing import Any

from cluster.config import Config
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder, resolve_tokenizer_folder
from cluster.tokenization import Tokenizer
from cluster.vocabulary_map import VocabularyMap

logger = logging.getLogger(__name__)


def draft_vocabulary(config: Config) -> VocabularyMap | None:
    """Returns the map from the tokens of `config.target.model` to those of `config.draft.model`.

    Returns None if nothing is mapped: the drafter has no tokenizer of its own, the target's tokenizer cannot be read on
    this machine, or `acceptance: rejection` has a pair with equal tokenizers. Raises ConfigurationError if the draft
    has none of the target's tokens. Raises it, too, if tokenizers differ with `acceptance: rejection`, token
    IDs differ for a draft in vLLM, or embeddings differ in size for a pair in one vLLM process.
    """
    if not config.draft_has_tokenizer:
        return None
    draft_folder = resolve_model_folder(config.draft_model)
    target, draft = _target_tokenizer(config), Tokenizer(draft_folder)
    if target is None:
        return None
    if config.speculation.acceptance == "rejection":
        if target.fingerprint() == draft.fingerprint():
            return None
        raise ConfigurationError(
            f"speculation.acceptance rejection runs a copy of the draft in the target, so {config.draft_model!r} needs "
            f"the tokenizer of {config.target.model!r}: choose such a draft, or set speculation.acceptance coupled"
        )
    num_rows = 1 + draft.token_ids[-1] if config.drafts_in_vllm else ModelConfig.from_folder(draft_folder).vocab_size
    vocabulary = VocabularyMap(target, draft, num_rows)
    if not vocabulary.num_common:
        raise ConfigurationError(config.tokenizer_mismatch(vocabulary.num_target_tokens))
    if vocabulary.is_foreign:
        logger.warning(
            "the tokenizer of %r has %d of the %d tokens of %r: fewer drafts are accepted than with equal tokenizers",
            config.draft_model,
            vocabulary.num_common,
            vocabulary.num_target_tokens,
            config.target.model,
        )
    if config.drafts_in_vllm and not vocabulary.keeps_ids:
        raise ConfigurationError(
            f"vLLM can draft with {config.draft_model!r} only if it has all tokens of {config.target.model!r} at the "
            f"same IDs, but it has {vocabulary.num_same} of {vocabulary.num_target_tokens}: use draft.drafter model in "
            "a draft worker (draft.placement pool)"
        )
    if config.drafts_in_process and config.target.engine == "vllm":
        _check_sizes(config)
    return vocabulary


def _check_sizes(config: Config) -> None:
    """Raises ConfigurationError if the embeddings of target and draft differ in size, even in rows without tokens."""
    of_target, of_draft = _num_rows(config.target.model), _num_rows(config.draft_model)
    if of_target is not None and of_draft is not None and of_target != of_draft:
        raise ConfigurationError(
            f"vLLM can draft with {config.draft_model!r} in the process of {config.target.model!r} only if both "
            f"embeddings have the same number of rows, but they have {of_draft} and {of_target}: use draft.placement "
            "pool"
        )


def _num_rows(model: str) -> int | None:
    """Returns the number of rows of the embedding; None if config.json has no `vocab_size`."""
    values: dict[str, Any] = json.loads((resolve_model_folder(model) / "config.json").read_text(encoding="utf-8"))
    number: int | None = values.get("text_config", values).get("vocab_size")
    return number


def _target_tokenizer(config: Config) -> Tokenizer | None:
    """Returns the target's tokenizer; None if it cannot be read on this machine."""
    try:
        return Tokenizer(resolve_tokenizer_folder(config.target.model))
    except ConfigurationError as error:
        logger.warning("%s: only targets with the tokenizer of %r will use this draft", error, config.draft_model)
        return None


def spoken_fingerprint(config: Config, vocabulary: VocabularyMap | None) -> str:
    """Returns the fingerprint of the tokenizer whose IDs a draft worker with `vocabulary` reads and proposes."""
    if vocabulary is not None:
        return vocabulary.fingerprint
    return Tokenizer(resolve_model_folder(config.draft_model)).fingerprint()
