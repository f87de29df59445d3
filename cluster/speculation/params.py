"""Sampling parameters of a request. Does not import torch, because the wire codec builds them without it."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LOGIT_BIAS = 1024  # entries of a request: each takes time in every step of the sequence

# At a lower temperature the noise could not change a choice, and the division would overflow.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that shape a sequence's distribution before a token is chosen.

    The order is vLLM's: logit bias, repetition penalty, frequency and presence penalties, temperature, min-p,
    top-k, top-p. A temperature below 1e-5 is greedy: there is no noise, and the filters cannot change the choice.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token ID, added to its logit)

    # Computed once, as every step reads them.
    is_greedy: bool = field(init=False, repr=False, compare=False)
    has_filter: bool = field(init=False, repr=False, compare=False)  # whether min-p, top-k or top-p is on
    has_penalty: bool = field(init=False, repr=False, compare=False)
    is_shaped: bool = field(init=False, repr=False, compare=False)  # whether anything but the temperature is on

    def __post_init__(self) -> None:
        is_greedy = self.temperature < _GREEDY_BELOW
        has_filter = not is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        penalties = (self.presence_penalty, self.frequency_penalty)
        has_penalty = self.repetition_penalty != 1.0 or any(penalty != 0.0 for penalty in penalties)
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "has_filter", has_filter)
        object.__setattr__(self, "has_penalty", has_penalty)
        object.__setattr__(self, "is_shaped", bool(self.logit_bias) or has_penalty or has_filter)

    def check(self) -> None:
        """Raises ValueError if a parameter is out of the API's bounds.

        Beyond these bounds the scores leave the range of float32, which would affect the arithmetic of a whole step.
        """
        ranges = {
            "temperature": 0.0 <= self.temperature <= 2.0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty": 0.01 <= self.repetition_penalty <= 100.0,
            "presence_penalty": abs(self.presence_penalty) <= 2.0,
            "frequency_penalty": abs(self.frequency_penalty) <= 2.0,
            "logit_bias": len(self.logit_bias) <= MAX_LOGIT_BIAS and all(abs(b) <= 100.0 for _, b in self.logit_bias),
        }
        for name, is_sound in ranges.items():
            if not is_sound:
                raise ValueError(f"{name} is out of its range: {str(getattr(self, name))[:80]}")
