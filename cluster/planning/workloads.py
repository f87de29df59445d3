"""Five kinds of traffic, with acceptance by place from published measurements.

Lengths and limits are examples. Acceptance depends on the texts, the models and the temperature: an operator's own
measurements (`outrider doctor`) replace these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cluster.planning.latency import LatencyLimits
from cluster.planning.prediction import ExpectedLoad
from cluster.speculation.speed import Acceptance


@dataclass(frozen=True, slots=True)
class Published:
    """Acceptance as a source reports it."""

    acceptance: Acceptance
    source: str


@dataclass(frozen=True, slots=True)
class TypicalWorkload:
    name: str
    load: ExpectedLoad
    limits: LatencyLimits
    head: Published  # a head on the target's hidden states
    draft: Published  # a model
    one_pass: Published  # all drafts in one step
    ngram: Published

    @property
    def sources(self) -> dict[str, str]:
        """The source of each way to draft."""
        return {name: getattr(self, name).source for name in ("head", "draft", "one_pass", "ngram")}


# SpecDecode-Bench/simulator (arXiv 2601.11580; no licence is given) has, for every token of Llama-3.1-8B's answers, how
# many drafts would have been accepted from there. From these we computed rounds of 8 drafts. A round without a match
# counts as drafts that are refused, so an n-gram costs less than planned.
def _bench(data: str, *rates: float) -> Published:
    return Published(rates, f"SpecDecode-Bench, {data}, Llama-3.1-8B")


# tomasruizt/vllm-scripts, full-bench-data.parquet (no licence is given): acceptance lengths with 3 to 8 drafts at
# temperature 0. The first three places are assumed to be equal.
_CODE_DRAFT = Published(
    (0.887, 0.887, 0.887, 0.86, 0.917, 0.836, 0.87, 0.90),
    "T. Ruiz, vLLM, InstructCoder, Llama-3.2-1B for Llama-3.3-70B, T = 0",
)
# The figure of the same author's post: acceptance lengths 1.78, 2.35, 2.79, 3.13, 3.40 and 3.58 with 1 to 6 drafts.
_CHAT_DRAFT = Published(
    (0.78, 0.73, 0.77, 0.77, 0.79, 0.67), "T. Ruiz, vLLM, MT-Bench, Qwen3-1.7B for Qwen3-32B, T = 0 (read off a figure)"
)


# vllm-project/speculators, issue 1135 (Apache-2.0): acceptance by position of a DSpark head.
def _one_pass(data: str, *shares: float) -> Published:
    rates = tuple(round(share / before, 3) for before, share in zip((1.0, *shares), shares, strict=False))
    return Published(rates, f"speculators issue 1135, DSpark, {data}, Llama-3.2-1B")


_QUESTIONS = _one_pass("question", 0.63, 0.389, 0.243, 0.158, 0.097, 0.064, 0.04, 0.025)

_NO_LIMIT: Final = LatencyLimits(math.inf, math.inf)

WORKLOADS = (
    TypicalWorkload(
        "chat",
        ExpectedLoad(1, prompt_tokens=1500, answer_tokens=256, cached_tokens=1200),
        LatencyLimits(first_token=0.3, between_tokens=0.04),
        _bench("ShareGPT", 0.595, 0.583, 0.636, 0.683, 0.726, 0.747, 0.756, 0.674),
        _CHAT_DRAFT,
        _one_pass("writing", 0.617, 0.388, 0.244, 0.158, 0.099, 0.062, 0.041, 0.026),
        _bench("ShareGPT", 0.113, 0.749, 0.789, 0.851, 0.847, 0.892, 0.911, 0.924),
    ),
    TypicalWorkload(
        "long documents",
        ExpectedLoad(1, prompt_tokens=8000, answer_tokens=256),
        LatencyLimits(first_token=5.0, between_tokens=0.1),
        _bench("CNN/DailyMail", 0.628, 0.621, 0.638, 0.658, 0.681, 0.725, 0.716, 0.677),
        _CHAT_DRAFT,
        _QUESTIONS,
        _bench("CNN/DailyMail", 0.11, 0.714, 0.753, 0.78, 0.792, 0.813, 0.821, 0.819),
    ),
    TypicalWorkload(
        "agents",
        ExpectedLoad(1, prompt_tokens=8000, answer_tokens=128, cached_tokens=7600),
        LatencyLimits(first_token=1.0, between_tokens=0.04),
        # 2.16 tokens a round of 5 drafts
        Published(0.565, "speculators pull request 610, EAGLE-3, tool calls, Qwen3-30B-A3B (Apache-2.0)"),
        _CHAT_DRAFT,
        _one_pass("tool calls", 0.733, 0.555, 0.413, 0.301, 0.202, 0.133, 0.081, 0.043),
        # 993 of 1,814 rounds had drafts; shares of 0.81, 0.74, 0.70, 0.68 and 0.66 of these were accepted by place.
        Published((0.443, 0.914, 0.946, 0.971, 0.971), "vLLM pull request 24344, edits of code, n-gram (Apache-2.0)"),
    ),
    TypicalWorkload(
        "code",
        ExpectedLoad(1, prompt_tokens=1000, answer_tokens=128, cached_tokens=500),
        LatencyLimits(first_token=0.3, between_tokens=0.025),
        _bench("InstructCoder", 0.591, 0.619, 0.684, 0.742, 0.765, 0.791, 0.793, 0.653),
        _CODE_DRAFT,
        _one_pass("HumanEval", 0.837, 0.685, 0.562, 0.46, 0.368, 0.283, 0.217, 0.161),
        _bench("InstructCoder", 0.246, 0.888, 0.914, 0.947, 0.94, 0.92, 0.964, 0.945),
    ),
    TypicalWorkload(
        "batch",
        ExpectedLoad(1, prompt_tokens=500, answer_tokens=256),
        _NO_LIMIT,
        _bench("GSM8K", 0.663, 0.644, 0.63, 0.65, 0.618, 0.649, 0.654, 0.563),
        _CHAT_DRAFT,
        _one_pass("math reasoning", 0.836, 0.682, 0.55, 0.438, 0.345, 0.258, 0.192, 0.134),
        _bench("GSM8K", 0.074, 0.56, 0.599, 0.632, 0.701, 0.696, 0.721, 0.674),
    ),
)
