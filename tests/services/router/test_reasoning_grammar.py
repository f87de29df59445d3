"""A demanded form is that of the answer: a model that reasons does so before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar

from cluster.constraints import Grammar
from cluster.grammars.matching import ReadGrammar, Vocabulary, make_matcher, probe
from cluster.grammars.vocabulary import read_vocabulary
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.router.output.message import Reader
from services.router.output.reasoning_grammar import after_reasoning

from .chat_model import HERMES_TEMPLATE, NAMED, PARAMETERS, WEATHER, Model, functions_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FORMS = {
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"\{\"a\": [0-9]+\}"),
    "ebnf": Grammar("ebnf", r'root ::= "{\"a\": " [0-9]+ "}"'),
    "structural_tag": Grammar(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ),
}
ANSWER = '{"a": 1}'


class Matching:
    """Grammars over the bundled model's tokens."""

    def __init__(self) -> None:
        folder = resolve_model_folder("outrider-target-12m")
        self.tokenizer = Tokenizer(folder)
        info = read_vocabulary(folder, self.tokenizer.vocab_size, [0])
        self._vocabulary = Vocabulary(info)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def is_answer(self, grammar: Grammar, text: str) -> bool:
        compile_ = {
            "json_schema": self._compiler.compile_json_schema,
            "structural_tag": self._compiler.compile_structural_tag,
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
        }[grammar.form]
        compiled = ReadGrammar(compile_(grammar.text), self._vocabulary, grammar.form)
        probe(compiled)
        matcher = make_matcher(compiled)
        return all(matcher.accept_token(token) for token in [*self.tokenizer.encode(text, add_special_tokens=False), 0])


@pytest.fixture(scope="module")
def matching() -> Matching:
    return Matching()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("text", "open_", "may", "neither"),
    [
        (ANSWER, False, True, True),
        (f'so {{ maybe "x" </thin </think>\n\n{ANSWER}', True, False, False),
        (f"</think>{ANSWER}", True, False, False),
        (f"<think>\nso</think>\n\n{ANSWER}", True, True, False),
        (f"\n<think></think>{ANSWER}", True, True, False),
        ("so</think>\nno", False, False, False),
        ("<think>so</think>no", False, False, False),
    ],
)
def test_answers_by_how_their_reasoning_begins(
    matching: Matching, form: str, text: str, open_: bool, may: bool, neither: bool
) -> None:
    readers = {
        Reader(reads_reasoning=True, reasoning_has_begun=True): open_,
        Reader(reads_reasoning=True, may_reason=True): may,
        Reader(reads_reasoning=True): neither,
    }
    for reader, expected in readers.items():
        assert matching.is_answer(after_reasoning(FORMS[form], reader, {}), text) == expected


def test_marks_that_are_special_tokens_are_named_by_their_ids() -> None:
    """They spell nothing in a grammar."""
    special = {"<think>": 7, "</think>": 8, "<|end|>": 9}
    reader = Reader(reads_reasoning=True, may_reason=True)
    tag = json.loads(after_reasoning(FORMS["regex"], reader, special).text)["format"]
    _, begin, text, end, _, answer = tag["elements"][1]["elements"]
    assert (begin, end) == ({"type": "token", "token": 7}, {"type": "token", "token": 8})
    assert text == {"type": "any_tokens", "exclude_tokens": [7, 8, 9]}
    assert answer == tag["elements"][0]


THINKING = "<think>so: {</think>\n\n"


@pytest.mark.parametrize("tokens_per_reply", [1, 1000])
def test_reasoning_and_answer_are_told_apart(model: Model, tokens_per_reply: int) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.will_say(f"{THINKING}{ANSWER}")
    message = model.chat(response_format=FORMAT, tools=[])["message"]
    assert (message["content"], message["reasoning_content"]) == (ANSWER, "so: {")
    assert model.tag["type"] == "or"
    assert model.grammar == SCHEMA


def test_a_template_that_opens_the_reasoning(model: Model) -> None:
    model.will_say(f"so</think>{ANSWER}")
    choice = model.chat(response_format=FORMAT, tools=[], chat_template_kwargs={"thinks": True})
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (ANSWER, "so")
    assert model.tag["type"] == "sequence"


def test_a_template_that_ends_the_reasoning(new_model: Callable[..., Model]) -> None:
    model = new_model(HERMES_TEMPLATE + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}")
    model.will_say(ANSWER)
    assert model.chat(response_format=FORMAT, tools=[])["message"]["content"] == ANSWER
    assert json.loads(model.target.requests[-1].constraints.grammar.json_schema) == SCHEMA


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_demanded_calls_come_after_reasoning_too(model: Model, choice: Any) -> None:
    arguments = '{"city": "Paris"}'
    model.will_say(THINKING + (arguments if choice is NAMED else f'[{{"name": "weather", "parameters": {arguments}}}]'))
    message = model.chat(tools=[WEATHER], tool_choice=choice)["message"]
    assert functions_of(message) == [("weather", arguments)]
    assert (message["content"], message["reasoning_content"]) == (None, "so: {")
    assert PARAMETERS["properties"] == (model.grammar if choice is NAMED else PARAMETERS)["properties"]
