"""Coupling: the parameters of Outrider's sampling for a request inside vLLM, sent in the request's `extra_args`.

vLLM's own parameters stay neutral (greedy, no filters), so that vLLM neither refuses a parameter because of speculation
nor rounds it. Noise key and position determine the noise, so these fields are sufficient to move or repeat a request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cluster.constraints import Constraints
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
    output_limit: float | None = None  # limit of mean seconds per output token after the first; None: the target's

    def to_extra_args(self) -> dict[str, Any]:
        return {
            EXTRA_ARGS_KEY: {
                "params": fields_of(self.params),
                "noise_key": (self.noise_key.low, self.noise_key.high),
                "num_prompt_tokens": self.num_prompt_tokens,
                "num_speculative_tokens": self.num_speculative_tokens,
                "conversation": self.conversation,
                "output_limit": self.output_limit,
            }
        }

    @classmethod
    def of(cls, sampling_params: Any) -> Coupling | None:
        """Returns the coupling in vLLM's `sampling_params` of a request; None if there is none."""
        found = extra_args_of(sampling_params).get(EXTRA_ARGS_KEY)
        if found is None:
            return None
        bias = tuple((token, added) for token, added in found["params"]["logit_bias"])
        params = SamplingParams(**{**found["params"], "logit_bias": bias})
        return cls(**{**found, "params": params, "noise_key": NoiseKey(*found["noise_key"])})


def fields_of(instance: SamplingParams | Constraints) -> dict[str, Any]:
    """Returns the fields of `instance` by name, without computed ones. Copies no value."""
    return {field.name: getattr(instance, field.name) for field in fields(instance) if field.init}


def extra_args_of(sampling_params: Any) -> dict[str, Any]:
    """Returns the `extra_args` of vLLM's `sampling_params` of a request; empty if there are none."""
    return (sampling_params.extra_args or {}) if sampling_params is not None else {}
