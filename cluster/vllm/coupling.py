"""Coupling: the parameters of Outrider's sampling for a request inside vLLM, sent in the request's `extra_args`.

vLLM's own parameters stay neutral (greedy, no filters), so that vLLM neither refuses a parameter because of speculation
nor rounds it. Noise key and position determine the noise, so these fields are sufficient to move or repeat a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

EXTRA_ARGS_KEY = "outrider"


@dataclass(frozen=True, slots=True)
class Coupling:
    """Coupling of one sequence."""

    params: SamplingParams
    noise_key: NoiseKey
    num_prompt_tokens: int  # tokens of vLLM's prompt that no other target generated
    num_speculative_tokens: int | None = None  # None: the controller decides
    conversation: bytes = b""  # the same for all turns of a conversation; b"": unknown

    def to_extra_args(self) -> dict[str, Any]:
        params = self.params
        return {
            EXTRA_ARGS_KEY: {
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "repetition_penalty": params.repetition_penalty,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                "logit_bias": params.logit_bias,
                "noise_key": (self.noise_key.low, self.noise_key.high),
                "num_prompt_tokens": self.num_prompt_tokens,
                "num_speculative_tokens": self.num_speculative_tokens,
                "conversation": self.conversation,
            }
        }

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> Coupling | None:
        """Returns the coupling that `to_extra_args` wrote; None if `extra_args` has none."""
        found = (extra_args or {}).get(EXTRA_ARGS_KEY)
        if found is None:
            return None
        fields = dict(found)
        noise_key = NoiseKey(*fields.pop("noise_key"))
        num_prompt_tokens = fields.pop("num_prompt_tokens")
        num_speculative_tokens = fields.pop("num_speculative_tokens")
        conversation = fields.pop("conversation")
        logit_bias = tuple((token, bias) for token, bias in fields.pop("logit_bias"))
        params = SamplingParams(**fields, logit_bias=logit_bias)
        return cls(params, noise_key, num_prompt_tokens, num_speculative_tokens, conversation)
