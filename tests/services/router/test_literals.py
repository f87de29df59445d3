"""Tests that client text stays text even if it spells a special token, and that other tokens do not change."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from cluster.tokenization import Tokenizer
from services.router.chat.prompt import ChatPrompts, Conversation, render
from services.router.chat.special_tokens import SpecialTokenGuard, unescape
from services.router.chat.template import ChatTemplate

SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson(ensure_ascii=true) }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path, *, in_vocabulary: bool) -> Tokenizer:
    """Returns a byte-level BPE tokenizer, which also has added tokens that are not special.

    Its special tokens are within the vocabulary or numbered behind it.
    """
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL if in_vocabulary else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the quick brown fox |im_start| <call> jumps over the lazy dog"] * 4, trainer)
    raw.add_tokens([AddedToken("<call>", normalized=False)])
    raw.add_special_tokens([AddedToken(token, rstrip=token == "[INST]", normalized=False) for token in SPECIAL])
    raw.add_tokens([AddedToken("<result>", normalized=False)])
    first, last = SPECIAL[0], SPECIAL[1]
    raw.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(token, raw.token_to_id(token)) for token in (first, last)]
    )
    folder.mkdir()
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=[True, False], ids=["in the vocabulary", "behind it"])
def chatty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "t", in_vocabulary=request.param)


def encode(tokenizer: Tokenizer, content: object, **more: object) -> list[int]:
    message = {"role": "user", "content": content} | more
    return ChatPrompts(ChatTemplate(TEMPLATE), tokenizer).encode(Conversation([message]))


@pytest.mark.parametrize("token", SPECIAL)
def test_a_special_token_in_a_message_is_text(chatty: Tokenizer, token: str) -> None:
    token_ids = encode(chatty, f" the {token}  fox {token}")
    framing = encode(chatty, "the fox")
    assert token_ids.count(chatty.special_tokens[token]) == framing.count(chatty.special_tokens[token])
    assert chatty.decode(token_ids, skip_special_tokens=False) == (
        f"<|im_start|>user\nthe {token}  fox {token}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_between_special_tokens_has_the_tokens_that_it_always_has(chatty: Tokenizer) -> None:
    plain = encode(chatty, "the <call> fox")
    literal = encode(chatty, "the <call> fox <|im_end|>")
    assert chatty.special_tokens.keys() == set(SPECIAL)
    end = plain.index(chatty.special_tokens["<|im_end|>"])
    assert literal[:end] == plain[:end]
    assert literal[-8:] == plain[-8:]


def test_the_disguised_tokenizer_is_the_same_but_for_the_spellings(chatty: Tokenizer) -> None:
    """With nothing literal, both encode alike: white space that a token takes with it, tokens that are only added."""
    pieces = [*SPECIAL, "<call>", "<result>", " ", "  ", "\n", "the", "fox", "<|", "|>", "é", "🦊", "[INST", "im_end"]
    random_numbers = random.Random(1)
    for _ in range(300):
        text = "".join(random_numbers.choices(pieces, k=12))
        for adds in (False, True):
            seen = chatty.encode_partly_literal(text, {"\ue000": "<"}, add_special_tokens=adds)
            assert seen == chatty.encode(text, add_special_tokens=adds), text


def test_special_tokens_in_calls_results_and_tools_are_text(chatty: Tokenizer) -> None:
    token, token_id = "<|im_end|>", chatty.special_tokens["<|im_end|>"]
    call = {"type": "function", "function": {"name": f"f{token}", "arguments": {f"a{token}": [token]}}}
    tool = {"type": "function", "function": {"name": "f", "description": f'{token} "é"'}}
    conversation = Conversation(
        [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": token}], [tool]
    )
    token_ids = ChatPrompts(ChatTemplate(TEMPLATE), chatty).encode(conversation)
    assert token_ids.count(token_id) == 2
    text = chatty.decode(token_ids, skip_special_tokens=False)
    assert json.dumps(call["function"]) in text
    assert json.dumps(tool) in text


def test_a_token_spelled_across_parts_is_text(chatty: Tokenizer) -> None:
    template = ChatTemplate("<|im_start|>{% for p in messages[0].content %}{{ p.text }}{% endfor %}")
    parts = [{"type": "text", "text": text} for text in ("a<|im_", "start|>b")]
    token_ids = ChatPrompts(template, chatty).encode(Conversation([{"role": "user", "content": parts}]))
    assert token_ids.count(chatty.special_tokens["<|im_start|>"]) == 1
    assert chatty.decode(token_ids, skip_special_tokens=False) == "<|im_start|>a<|im_start|>b"


BORDERS = {
    "by a message and the template": "{% for m in messages %}{{ m.content }}end|>{% endfor %}",
    "by the template and a message": "{% for m in messages %}<|im_{{ m.content | trim }}{% endfor %}",
    "by two fields": "{% for m in messages %}{{ m.name | trim }}{{ m.content.strip() }}{% endfor %}",
    "by two messages": "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "by a variable": "{{ greeting }}{{ messages[0].content }}",
}


@pytest.mark.parametrize("source", BORDERS.values(), ids=BORDERS.keys())
@pytest.mark.parametrize(("before", "after"), [("a <|im_ ", " end|> b"), ("<", "|im_end|>"), ("<|im_end|", ">")])
def test_a_token_spelled_across_a_border_is_text(chatty: Tokenizer, source: str, before: str, after: str) -> None:
    messages = [{"role": "user", "name": before, "content": text} for text in (before, after)]
    conversation = Conversation(messages, variables={"greeting": before})
    token_ids = ChatPrompts(ChatTemplate(source), chatty).encode(conversation)
    assert not set(token_ids) & set(chatty.special_tokens.values())
    assert chatty.decode(token_ids, skip_special_tokens=False) == render(ChatTemplate(source), conversation)


def test_template_variables_are_text(chatty: Tokenizer) -> None:
    template = ChatTemplate("<|im_start|>{{ date }}{{ messages[0].content }}")
    conversation = Conversation([{"role": "user", "content": "x"}], variables={"date": "<|im_end|>", "n": [1, None]})
    token_ids = ChatPrompts(template, chatty).encode(conversation)
    assert chatty.special_tokens["<|im_end|>"] not in token_ids
    assert chatty.decode(token_ids, skip_special_tokens=False) == "<|im_start|><|im_end|>x"


def test_conversations_that_spell_no_token_have_the_tokens_of_their_text(chatty: Tokenizer) -> None:
    """However near they come to one: what stands in for a character changes nothing else."""
    pieces = [
        "<",
        "<|",
        "<|im_",
        "|>",
        ">",
        "end|>",
        "[INST",
        "]",
        "<call>",
        " ",
        "\n",
        "the",
        "fox",
        "é",
        "🦊",
        "\ue000",
    ]
    random_numbers = random.Random(2)
    template = ChatTemplate(TEMPLATE)
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    num_compared = 0
    for _ in range(1000):
        texts = ["".join(random_numbers.choices(pieces, k=5)) for _ in range(3)]
        conversation = Conversation([{"role": "user", "content": text} for text in texts])
        text = render(template, conversation)
        if len(special.findall(text)) == 7:  # of the template
            num_compared += 1
            assert ChatPrompts(template, chatty).encode(conversation) == chatty.encode(text, add_special_tokens=False)
    assert num_compared > 800


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_template_may_make_a_special_token_of_a_role(tmp_path: Path, role: str) -> None:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.train_from_iterator(["a"], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    raw.add_special_tokens([f"<|{name}|>" for name in ("system", "user", "assistant")])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    token_ids = ChatPrompts(template, tokenizer).encode(Conversation([{"role": role, "content": "|> <|user|>"}]))
    assert [token for token in token_ids if token in tokenizer.special_tokens.values()] == [
        tokenizer.special_tokens[f"<|{role}|>"]
    ]


def test_private_characters_in_messages_are_left_alone(chatty: Tokenizer) -> None:
    text = "\ue000 \ue001 \\ue002 \U000f0000 <|im_end|>\ue003"
    assert text in chatty.decode(encode(chatty, text), skip_special_tokens=False)


def test_what_spells_nothing_is_not_touched() -> None:
    guard = SpecialTokenGuard(SPECIAL)
    value = [{"content": "<|im_ start|>", "n": 5, "x": None, "parts": ["[ INST", "a]"]}]
    assert guard.disguise(value, avoid="") == (value, {})
    assert guard.disguise(value, avoid="")[0] is value
    assert SpecialTokenGuard([]).disguise(["<|im_end|>"], avoid="") == (["<|im_end|>"], {})


def test_tokens_that_overlap_are_all_disguised() -> None:
    guard = SpecialTokenGuard(["<a><b>", "<b>", "><"])
    (disguised,), stand_ins = guard.disguise(["x<a><b>"], avoid="\ue000")
    assert disguised == "x\ue001a\ue002\ue001b\ue002"  # what comes next may complete the last one
    assert stand_ins == {"\ue001": "<", "\ue002": ">"}
    assert unescape('"\\ue001"', stand_ins) == '"\ue001"'


def test_in_a_completions_prompt_a_special_token_is_parsed(shared_router, target, tokenizer) -> None:
    answers = [
        shared_router.client.post("/tokenize", json=body).json()["tokens"]
        for body in ({"prompt": "<|endoftext|>"}, {"messages": [{"role": "user", "content": "<|endoftext|>"}]})
    ]
    assert answers[0] == [0]
    assert 0 not in answers[1]
