"""Fields of chats that other modules share: template variables, and fields that other APIs pass on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

# Fields of vLLM and Outrider that /v1/responses and /v1/messages pass on to the chat unchanged.
EXTENSIONS = (
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "ignore_eos",
    "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "priority", "cache_salt",
    "prompt_cache_key", "request_id", "vllm_xargs", "skip_special_tokens", "include_reasoning", "chat_template_kwargs",
    "enable_thinking", "num_speculative_tokens", "outrider",
)  # fmt: skip

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateVariables(BaseModel):
    """Base of requests whose prompt is written by a chat template."""

    chat_template_kwargs: dict[str, Any] = Field(default={}, description="variables of the template")
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="a variable of the template; `none` turns thinking off"
    )
    enable_thinking: bool | None = Field(
        default=None, description="a variable of the template, as in `chat_template_kwargs`"
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables; `chat_template_kwargs` has precedence, then `enable_thinking`."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables | self.chat_template_kwargs
