"""What a request asks of the sampler. Imports no torch: the router builds these too."""

from __future__ import annotations

from dataclasses import dataclass

# Below this temperature the noise could not change a choice, and the division would overflow.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the distribution of a sequence is shaped before a token is chosen.

    The order is vLLM's: logit bias, repetition penalty, frequency and presence penalties, temperature, min-p,
    top-k, top-p. A temperature of 0, or as good as 0, is greedy: no noise, and the filters cannot change the choice.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token ID, added to its logit)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def has_filter(self) -> bool:
        """Whether any of min-p, top-k and top-p is on."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
