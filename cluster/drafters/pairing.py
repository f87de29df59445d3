"""Checks that a draft can propose the target's tokens, and maps its vocabulary to the target's."""

from __future__ import annotations

import logging

from cluster.config import Config
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder, resolve_tokenizer_folder
from cluster.tokenization import Tokenizer
from cluster.vocabulary_map import VocabularyMap

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.5  # of the target's tokens that the draft must have


def draft_vocabulary(config: Config) -> VocabularyMap | None:
    """Returns the map from the tokens of `config.target.model` to those of `config.draft.model`.

    Returns None if the drafter has no tokenizer of its own, or if the target's cannot be read on this machine, so that
    the draft's must be equal. Raises ConfigurationError if the draft has less than half of the target's tokens, or if
    the drafter needs all of them and lacks some.
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
    if vocabulary.num_common < _LEAST_SHARE * vocabulary.num_target_tokens:
        raise ConfigurationError(config.tokenizer_mismatch(vocabulary.num_common, vocabulary.num_target_tokens))
    if config.drafts_in_vllm and not vocabulary.keeps_ids:
        raise ConfigurationError(
            f"vLLM can draft with {config.draft_model!r} only if it has all tokens of {config.target.model!r} at the "
            f"same IDs, but it has {vocabulary.num_same} of {vocabulary.num_target_tokens}: use draft.drafter model in "
            "a draft worker (draft.placement pool)"
        )
    return vocabulary


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
