"""Tests of how prompts are built: templates with variables, a message to continue, an echo."""

from __future__ import annotations

import pytest

from cluster.errors import InvalidRequestError
from services.router.chat.prompt import Conversation, render
from services.router.chat.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the dog "}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}<end>", "<the fox><the dog "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}<end>", "<the fox><the dog"),
    ],
)
def test_the_last_message_is_left_open(template: str, expected: str) -> None:
    conversation = Conversation(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    assert render(ChatTemplate(template), conversation) == expected


def test_a_chat_goes_on_with_its_last_message(router, target, tokenizer) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 3, "continue_final_message": True}
    assert router.chat(**fields, add_generation_prompt=False).status_code == 200
    assert tokenizer.decode(target.requests[-1].prompt_token_ids) == "<user>the fox<assistant>the dog "
    refused = router.chat(**fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("content", ["", "[HIDDEN]"])
def test_a_message_that_is_not_written_cannot_be_left_open(content: str) -> None:
    template = ChatTemplate("nothing of it")
    with pytest.raises(InvalidRequestError, match="does not write the last message"):
        render(
            template,
            Conversation(
                [{"role": "user", "content": content}], add_generation_prompt=False, continue_final_message=True
            ),
        )


def test_variables_of_a_templates_own() -> None:
    template = ChatTemplate("{% if thinks %}<think>{% endif %}{{ messages[0].content }}")
    assert template.render(MESSAGES, more={"thinks": True}) == "<think>the fox"
    assert template.render(MESSAGES, more={"messages": [], "thinks": False}) == "the fox"


@pytest.mark.parametrize("kwargs", [[], "x", 3])
def test_variables_are_an_object(shared_router, kwargs: object) -> None:
    answer = shared_router.chat(messages=MESSAGES, chat_template_kwargs=kwargs)
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_an_echo(shared_router, tokenizer) -> None:
    fox = tokenizer.encode("the fox")
    fields = {"prompt": ["the fox", "dog"], "n": 2, "max_tokens": 4, "echo": True}
    plain = [c["text"] for c in shared_router.complete(**fields | {"echo": False}).json()["choices"]]
    texts = [c["text"] for c in shared_router.complete(**fields).json()["choices"]]
    assert texts == [prompt + text for prompt, text in zip(["the fox"] * 2 + ["dog"] * 2, plain, strict=True)]
    streamed = shared_router.stream(prompt=fox, max_tokens=len(fox), echo=True)
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == "the fox" * 2
    assert shared_router.chat(messages=MESSAGES, echo=True).status_code == 400
