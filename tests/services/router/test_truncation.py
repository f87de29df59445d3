"""`truncation: auto` of /v1/responses: the same prompts as a search through all cuts, for little work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.errors import ContextLengthError
from cluster.tokenization import Tokenizer
from services.router.chat.prompt import ChatPrompts, Conversation
from services.router.chat.template import ChatTemplate
from services.router.responses.truncation import longest_that_fits

from .chat_model import HERMES_TEMPLATE

Message = dict[str, Any]
WORDS = ("fox ", "the quick brown fox ", "<|endoftext|>", "jumps\n", " " * 30, "ü")


def search_all(messages: Sequence[Message], encode: Any, room: int) -> list[int]:
    """Tries every cut, from the longest prompt to the shortest."""
    for start in [0, *(index for index in range(1, len(messages)) if messages[index]["role"] == "user")]:
        kept = [message for message in messages[:start] if message["role"] == "system"]
        try:
            prompt: list[int] = encode([*kept, *messages[start:]])
        except ContextLengthError:
            continue
        if len(prompt) <= room:
            return prompt
    return []


def chat(source: random.Random) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": "fox"}]
    for _ in range(source.choice((0, 3, 40))):
        text = "".join(source.choices(WORDS, k=source.choice((0, 1, 5, 5, 5, 300))))
        message: Message = {"role": source.choice(("user", "user", "assistant", "system", "tool")), "content": text}
        if source.random() < 0.2:
            message["content"] = [{"type": "text", "text": text}, {"type": "text", "text": "dog"}]
        if message["role"] == "assistant" and source.random() < 0.3:
            message["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"a": text}}}]
        messages.append(message)
    return messages


@pytest.mark.parametrize("seed", range(40))
def test_the_prompt_is_that_of_a_search_through_all_cuts(tokenizer: Tokenizer, seed: int) -> None:
    source = random.Random(seed)
    prompts = ChatPrompts(ChatTemplate(HERMES_TEMPLATE), tokenizer)
    messages = chat(source)
    for room in (0, 5, 50, 200, 1000, 100_000):

        def encode(kept: Sequence[Message], room: int = room) -> list[int]:
            return prompts.encode(Conversation(kept), max_tokens=room)

        assert longest_that_fits(messages, encode, room) == search_all(messages, encode, room)


@pytest.mark.parametrize("characters_per_token", [1, 4, 40])
def test_little_more_is_encoded_than_fits(characters_per_token: int) -> None:
    lengths: list[int] = []

    def encode(kept: Sequence[Message]) -> list[int]:
        lengths.append(sum(len(message["content"]) for message in kept))
        return [1] * (lengths[-1] // characters_per_token)

    messages = [{"role": ("user", "assistant")[index % 2], "content": "x" * 2000} for index in range(3900)]
    assert len(longest_that_fits(messages, encode, 5_000)) >= 4_000
    assert len(lengths) <= 5
    assert sum(lengths) < 6 * 5_000 * max(4, characters_per_token)
