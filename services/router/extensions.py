"""Fields of a chat that other APIs pass on to it as they are: vLLM's and ours."""

from __future__ import annotations

EXTENSIONS = (
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "ignore_eos",
    "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "priority", "cache_salt",
    "request_id", "vllm_xargs", "skip_special_tokens", "include_reasoning", "chat_template_kwargs", "enable_thinking",
    "num_speculative_tokens",
)  # fmt: skip
