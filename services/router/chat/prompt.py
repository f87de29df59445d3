"""Converts a conversation to the token IDs of its prompt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.tokenization import Tokenizer
from services.router.chat.messages import Message, parts_of, text_of
from services.router.chat.special_tokens import SpecialTokenGuard, unescape
from services.router.chat.template import ChatTemplate

logger = logging.getLogger(__name__)

_ANSWER = "an answer"  # rendered to find the token that the template writes after an answer


@dataclass(frozen=True)
class Conversation:
    """The arguments of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # whether the prompt ends within the last message
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the template


def check_continuation(*, continues: bool, begins: bool) -> None:
    """Raises InvalidRequestError if a request both continues the last message and begins another."""
    if continues and begins:
        raise InvalidRequestError(
            "continue_final_message continues the last message: set add_generation_prompt to false",
            param="continue_final_message",
        )


class ChatPrompts:
    """Encodes conversations with the model's chat template and tokenizer."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer, problem: str | None = None) -> None:
        """`problem`: why there is no template, if the model's is broken."""
        self._template = template
        self._problem = problem or "messages need a chat template and this model has none"
        self._tokenizer = tokenizer
        self._guard = SpecialTokenGuard(tokenizer.special_tokens)
        self.turn_end_ids = _turn_end_ids(template, tokenizer.special_tokens)
        self._warned_of_tools = False

    def encode(
        self, conversation: Conversation, *, add_special_tokens: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the token IDs of the prompt, possibly more than `max_tokens`.

        Only the template writes special tokens: where `conversation` spells one, it is encoded as text.
        Raises InvalidRequestError if the model has no template, or if the template refuses the messages, and
        ContextLengthError if the text is clearly longer than `max_tokens`.
        """
        template = self._template and self._template.of_request(has_tools=bool(conversation.tools))
        if template is None:
            raise InvalidRequestError(f"{self._problem}; send a prompt to /v1/completions", param="messages")
        if conversation.tools and not template.traits.knows_tools and not self._warned_of_tools:
            self._warned_of_tools = True
            logger.warning("the model's chat template does not support tools: tools are ignored")
        (messages, tools, variables), stand_ins = self._guard.disguise(
            (conversation.messages, conversation.tools, conversation.variables), avoid=template.source
        )
        if stand_ins:
            conversation = replace(conversation, messages=messages, tools=tools, variables=variables)
        text = render(template, conversation, stand_ins)
        if max_tokens is not None:
            self._tokenizer.check_fits(text, max_tokens, "messages")
        if not stand_ins:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode_partly_literal(text, stand_ins, add_special_tokens=add_special_tokens)


def _turn_end_ids(template: ChatTemplate | None, special_tokens: Mapping[str, int]) -> frozenset[int]:
    """Returns the special token that `template` writes after an answer; empty if it writes none.

    It is needed because a model's configuration may still have the end tokens of the base model.
    """
    if template is None:
        return frozenset()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render(template, Conversation(turns, add_generation_prompt=False))
    except InvalidRequestError:
        return frozenset()
    rest = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    ends = [token for token in special_tokens if rest.startswith(token)]
    return frozenset([special_tokens[max(ends, key=len)]]) if ends else frozenset()


def render(template: ChatTemplate, conversation: Conversation, stand_ins: Collection[str] = ()) -> str:
    """Returns the text of a prompt. Raises InvalidRequestError if `template` refuses the messages.

    `stand_ins`: stand-in characters from `SpecialTokenGuard.disguise`.
    """
    messages = [_with_content_for(template, message) for message in conversation.messages]

    def rendered(messages: Sequence[Message]) -> str:
        return template.render(
            messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            more=conversation.variables,
        )

    try:
        text = rendered(messages)
    except InvalidRequestError:
        if all(message["role"] != "system" for message in messages[1:]) or conversation.continue_final_message:
            raise
        text = rendered(_with_one_system_message(messages))
    text = unescape(text, stand_ins)
    return _cut_after(text, _last_text(messages[-1]["content"])) if conversation.continue_final_message else text


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Returns `messages` with all system messages as one, at the front: some templates allow only this."""
    parts = [part for message in messages if message["role"] == "system" for part in parts_of(message["content"])]
    others = [message for message in messages if message["role"] != "system"]
    content = parts if any(isinstance(message["content"], list) for message in messages) else text_of(parts)
    return [{"role": "system", "content": content}, *others]


def _with_content_for(template: ChatTemplate, message: Message) -> Message:
    """Returns `message` with its content as text or as parts, whichever `template` takes."""
    content = message["content"]
    if isinstance(content, list) and not template.traits.takes_parts:
        return message | {"content": text_of(content)}
    if isinstance(content, str) and not template.traits.takes_text:
        return message | {"content": [{"type": "text", "text": content}] if content else []}
    return message


def _last_text(content: str | list[dict[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return content[-1]["text"] if content else ""


def _cut_after(text: str, content: str) -> str:
    """Returns `text` up to the end of the last message's `content`.

    The template may have stripped white space from `content`. Raises InvalidRequestError if `text` does not have it.
    """
    for written in (content, content.rstrip(), content.strip()):
        start = text.rfind(written) if written else -1
        if start >= 0:
            return text[: start + len(written)]
    raise InvalidRequestError(
        "continue_final_message: the chat template does not write the last message as it is", param="messages"
    )
