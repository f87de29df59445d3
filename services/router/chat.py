"""POST /v1/chat/completions: the request's messages, the reply's message."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator

from cluster.errors import InvalidRequestError
from services.router.api_request import UNSUPPORTED_FIELDS, ApiRequest, MaxTokens
from services.router.chat_template import ChatTemplate
from services.router.endpoint import Endpoint, Serving
from services.router.errors import excerpt
from services.router.reply import Piece, Reply
from services.router.speculation_stats import SpeculationStats

logger = logging.getLogger(__name__)

# What a client may call a role, and what chat templates call it.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES = frozenset({"tool", "function"})
# Fields of a message. An earlier answer that a client sends back has them too, empty: that is accepted.
_UNSUPPORTED_MESSAGE_FIELDS = frozenset({"tool_calls", "tool_call_id", "function_call", "audio", "refusal"})

_MESSAGE_FIELDS = frozenset({"role", "content", "name"})

Message = dict[str, str]


def to_messages(value: object) -> list[Message]:
    """A request's `messages`, checked, as templates take them. Raises ValueError or InvalidRequestError."""
    if not isinstance(value, list):
        raise ValueError("should be a list")
    if not value:
        raise ValueError("is empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise _refusal(f"{where} should be an object", value)
    for field in _UNSUPPORTED_MESSAGE_FIELDS & value.keys():
        if value[field] not in (None, []):
            raise _refusal(f"{where}.{field} is not supported yet", value[field])
    for field in value.keys() - _MESSAGE_FIELDS - _UNSUPPORTED_MESSAGE_FIELDS:
        if value[field] is not None:
            logger.warning("ignored the unknown field %s of a message", excerpt(field))
    role = value.get("role")
    if isinstance(role, str) and role in _UNSUPPORTED_ROLES:
        raise _refusal(f"{where}.role is not supported yet", role)
    if not isinstance(role, str) or role not in _ROLES:
        raise _refusal(f"{where}.role should be one of {', '.join(_ROLES)}", role)
    message = {"role": _ROLES[role], "content": _content(value.get("content"), f"{where}.content")}
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise _refusal(f"{where}.name should be a string", name)
        message["name"] = name
    return message


def _content(value: object, where: str) -> str:
    """The text of a message; of several parts, one under the other, as vLLM has it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _refusal(f"{where} should be a string or a list of text parts", value)
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _refusal(f'{where}[{index}] should be a part of the type "text": no other is supported yet', part)
        if not isinstance(part.get("text"), str):
            raise _refusal(f"{where}[{index}].text should be a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def _refusal(reason: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{reason} (got {excerpt(value)})", param="messages")


class ChatRequest(ApiRequest):
    unsupported_fields = UNSUPPORTED_FIELDS | {
        "echo": (False,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
    }
    prompt_field = "messages"

    messages: Annotated[list[Message], PlainValidator(to_messages)]
    max_completion_tokens: MaxTokens | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the template writes them itself
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="variables of the template's own")

    @model_validator(mode="after")
    def _either_continues_or_begins(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message: set add_generation_prompt to false",
                param="continue_final_message",
            )
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit

    @property
    def num_characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


class ChatReply(Reply):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, index: int, choice: Piece) -> dict[str, Any]:
        return self._with_extras(
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            },
            choice.token_ids,
            choice.speculation,
        )

    def _deltas(self, index: int, piece: Piece, *, is_first: bool) -> Iterator[dict[str, Any]]:
        if is_first:
            yield self._delta(index, {"role": "assistant", "content": ""})
        if piece.text or (self.has_token_ids and piece.token_ids):
            yield self._delta(index, {"content": piece.text}, token_ids=piece.token_ids)
        if piece.finish_reason is not None:
            yield self._delta(index, {}, finish_reason=piece.finish_reason, speculation=piece.speculation)

    def _delta(
        self,
        index: int,
        delta: dict[str, str],
        token_ids: Sequence[int] = (),
        finish_reason: str | None = None,
        speculation: SpeculationStats | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._with_extras(choice, token_ids, speculation)


class ChatCompletions(Endpoint[ChatRequest]):
    request_type = ChatRequest
    reply_type = ChatReply

    def __init__(self, serving: Serving, template: ChatTemplate | None) -> None:
        super().__init__(serving)
        self._template = template

    def _encode(self, request: ChatRequest) -> list[list[int]]:
        text = render(
            self._template,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            more=request.chat_template_kwargs,
        )
        return [self._serving.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)]


def render(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    more: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that `messages` make. Raises InvalidRequestError where there is no template or it refuses them.

    With `continue_final_message` it ends within the last message; `more` are variables of the template's own.
    """
    if template is None:
        raise InvalidRequestError(
            "messages need a chat template and this model has none; send a prompt to /v1/completions",
            param="messages",
        )
    text = template.render(messages, add_generation_prompt=add_generation_prompt, more=more)
    return _cut_after(text, messages[-1]["content"]) if continue_final_message else text


def _cut_after(text: str, content: str) -> str:
    """`text` without what a template wrote after the last message's `content`, from which it may have cut blanks."""
    for written in (content, content.rstrip(), content.strip()):
        start = text.rfind(written) if written else -1
        if start >= 0:
            return text[: start + len(written)]
    raise InvalidRequestError(
        "continue_final_message: the chat template does not write the last message as it is", param="messages"
    )
