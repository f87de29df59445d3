"""Formats log-probabilities for clients: OpenAI's two forms, and vLLM's for prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cluster.logprobs import TokenLogprobs
from cluster.tokenization import Tokenizer

_LEAST = -9999.0  # JSON's value for the logarithm of zero, as in vLLM


@dataclass(frozen=True)
class LogprobsFormat:
    """Formats log-probabilities; names tokens by their text or by their ID."""

    tokenizer: Tokenizer
    as_token_ids: bool = False  # "token_id:17" in place of the text

    def completion(
        self, token_ids: Sequence[int], scores: TokenLogprobs, *, has_first: bool, text_offset: int
    ) -> tuple[dict[str, Any], int]:
        """Returns the log-probabilities of a completion's choice, and its number of characters so far.

        `text_offset`: number of characters of earlier tokens. `has_first`: whether the first of `token_ids` has a
        score; the first token of a prompt has none, and `scores` begin after it.
        """
        texts = [self._text(token) for token in token_ids]
        tokens = [self._name(token) for token in token_ids] if self.as_token_ids else texts
        *offsets, end = accumulate(map(len, texts), initial=text_offset)
        missing = 0 if has_first else 1
        own = [None] * missing + [_finite(value) for value in scores.logprobs]
        top: list[dict[str, float] | None] = [None] * missing
        for index in range(len(scores)):
            # The token itself is included, as in OpenAI's API, likely or not.
            named = {self._name(token): _finite(value) for token, value in scores.top(index)}
            named.setdefault(tokens[index + missing], _finite(scores.logprobs[index]))
            top.append(named)
        return {"text_offset": offsets, "token_logprobs": own, "tokens": tokens, "top_logprobs": top}, end

    def chat(self, token_ids: Sequence[int], scores: TokenLogprobs) -> dict[str, Any]:
        """Returns the log-probabilities of a chat's choice."""
        content = [
            self._entry(token, scores.logprobs[index])
            | {"top_logprobs": [self._entry(*likely) for likely in scores.top(index)]}
            for index, token in enumerate(token_ids)
        ]
        return {"content": content, "refusal": None}

    def prompt(self, token_ids: Sequence[int], scores: TokenLogprobs) -> list[dict[str, Any] | None]:
        """Returns the log-probabilities of a prompt as vLLM writes them: null for its first token."""
        entries: list[dict[str, Any] | None] = [None]
        for index, token in enumerate(token_ids[1:]):
            likely = dict(scores.top(index))
            ranks = {other: rank for rank, other in enumerate(likely, start=1)} | {token: scores.ranks[index]}
            likely[token] = scores.logprobs[index]
            entries.append(
                {
                    str(other): {
                        "logprob": _finite(value),
                        "rank": ranks[other],
                        "decoded_token": self._text(other),
                    }
                    for other, value in likely.items()
                }
            )
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return logprob if _LEAST < logprob < math.inf else _LEAST  # replaces NaN too, which JSON does not have
