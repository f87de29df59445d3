"""Constraints of requests inside vLLM: they are sent in `extra_args` and applied at sampling.

vLLM's own constraints (grammars, allowed tokens, bad words, least lengths) stay off. Its log-probabilities would cover
only the tokens that a grammar allows, and it refuses some of the constraints together with speculation.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cluster.constraints import UNCONSTRAINED, Constraints
from cluster.engine.constraint import TokenConstraint
from cluster.grammars.matching import read_compiled
from cluster.grammars.vocabulary import Vocabulary
from cluster.vllm.coupling import extra_args_of, fields_of

EXTRA_ARGS_KEY = "outrider_constraints"
_VOCABULARY_SECONDS = 10.0  # maximum wait for the vocabulary, which takes some 100 ms to read


def to_extra_args(constraints: Constraints, end_token_ids: Collection[int], grammar: str | None) -> dict[str, Any]:
    """Returns the `extra_args` of a request.

    `grammar`: the grammar of `constraints`, compiled and serialized. `end_token_ids`: tokens that end the sequence.
    """
    if constraints == UNCONSTRAINED:
        return {}
    return {EXTRA_ARGS_KEY: fields_of(constraints) | {"end_token_ids": sorted(end_token_ids), "grammar": grammar}}


def is_constrained(sampling_params: Any) -> bool:
    """Returns True if a vLLM request with `sampling_params` has constraints."""
    return EXTRA_ARGS_KEY in extra_args_of(sampling_params)


class RequestConstraints:
    """Constraints of the requests in one process."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._is_known = threading.Event()
        self._constraints: dict[str, TokenConstraint] = {}

    def know_vocabulary(self, written: str) -> None:
        """Sets the vocabulary. Must be called for the first request with a grammar. Thread-safe."""
        self._vocabulary = Vocabulary.read(written)
        self._is_known.set()

    def of(self, request_id: str, sampling_params: Any, generated: Sequence[int]) -> TokenConstraint | None:
        """Returns the constraint of a request after the tokens `generated`; None if the request has no constraint."""
        asked = extra_args_of(sampling_params).get(EXTRA_ARGS_KEY)
        if asked is None:
            return None
        constraint = self._constraints.get(request_id)
        if constraint is None:
            constraint = self._constraints[request_id] = self._new(asked)
        for token in generated[constraint.num_generated :]:
            constraint.commit(token)
        return constraint

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Forgets all requests except `request_ids`, because the others have ended."""
        self._constraints = {key: kept for key, kept in self._constraints.items() if key in request_ids}

    def _new(self, asked: Mapping[str, Any]) -> TokenConstraint:
        constraints = Constraints(
            allowed_token_ids=tuple(asked["allowed_token_ids"]),
            bad_words=tuple(tuple(word) for word in asked["bad_words"]),
            min_tokens=asked["min_tokens"],
        )
        matcher = None
        if asked["grammar"] is not None:
            self._is_known.wait(_VOCABULARY_SECONDS)
            assert self._vocabulary is not None, "a grammar came without the vocabulary"
            matcher = read_compiled(asked["grammar"], self._vocabulary).new_matcher()
        return TokenConstraint(constraints, matcher, self._vocab_size, asked["end_token_ids"])
