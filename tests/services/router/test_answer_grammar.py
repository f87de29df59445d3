"""A demanded form is that of the answer: reasoning comes before it, and calls of tools may come in its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.constraints import Grammar
from cluster.grammars.matching import compile_grammar
from cluster.grammars.vocabulary import Vocabulary
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.router.output.answer_grammar import answer_grammar
from services.router.output.formats import TOOL_FORMATS
from services.router.output.message import MessageWriter, Reader
from services.router.output.tools import to_tools

from .chat_model import HERMES_TEMPLATE, NAMED, PARAMETERS, TIME, WEATHER, Model, call_of, functions_of

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
        self._vocabulary = Vocabulary.of_model(folder, self.tokenizer.vocab_size, [0])

    def is_answer(self, grammar: Grammar, text: str) -> bool:
        matcher = compile_grammar(grammar, self._vocabulary).new_matcher()
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
        assert matching.is_answer(answer_grammar(FORMS[form], "", reader, {}), text) == expected


def test_marks_that_are_special_tokens_are_named_by_their_ids() -> None:
    """They spell nothing in a grammar."""
    special = {"<think>": 7, "</think>": 8, "<|end|>": 9}
    reader = Reader(reads_reasoning=True, may_reason=True)
    tag = json.loads(answer_grammar(FORMS["regex"], "", reader, special).text)["format"]
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


PARIS = '{"city": "Paris"}'
CALLS = {
    "hermes": [call_of("weather", PARIS), f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'],
    "qwen3_xml": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ],
    "llama3": [
        f'{{"name": "weather", "parameters": {PARIS}}}',
        f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}',
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]',
        f"[TOOL_CALLS]weather{PARIS}",
        f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    ],
}


def reader_of(name: str, **settings: Any) -> Reader:
    """Returns the reader for a model that may call tools in the format `name`."""
    format_ = TOOL_FORMATS[name]
    return Reader(format_.program, to_tools([WEATHER, TIME]), call_format=format_, **settings)


def read(reader: Reader, text: str) -> dict[str, Any]:
    return MessageWriter(reader).message(reader.start().push(text, is_last=True))


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_a_call_or_in_the_form(matching: Matching, name: str) -> None:
    reader = reader_of(name)
    grammar = answer_grammar(FORMS["json_schema"], "", reader, {})
    assert matching.is_answer(grammar, ANSWER)
    assert read(reader, ANSWER)["content"] == ANSWER
    for call in CALLS[name]:
        assert matching.is_answer(grammar, call)
        assert functions_of(read(reader, call)) == [("weather", PARIS)]
        assert not matching.is_answer(grammar, call.replace("weather", "letter"))
        assert not matching.is_answer(grammar, f"Well. {call}")
        assert not matching.is_answer(grammar, call + ANSWER)


@pytest.mark.parametrize("name", CALLS)
def test_several_calls_only_if_they_may_be_parallel(matching: Matching, name: str) -> None:
    separator = {"llama3": "; ", "mistral": ""}.get(name, "\n")
    two = separator.join([CALLS[name][-1]] * 2)
    for parallel in (True, False):
        grammar = answer_grammar(FORMS["json_schema"], "", reader_of(name, parallel_calls=parallel), {})
        assert matching.is_answer(grammar, two) == parallel


def test_calls_and_the_form_come_after_reasoning(matching: Matching) -> None:
    reader = reader_of("hermes", reads_reasoning=True, may_reason=True)
    grammar = answer_grammar(FORMS["json_schema"], "", reader, {})
    for answer in (ANSWER, CALLS["hermes"][0]):
        assert matching.is_answer(grammar, answer)
        assert matching.is_answer(grammar, f"<think>so {{</think>\n\n{answer}")


def test_a_tool_without_parameters_takes_none(matching: Matching) -> None:
    grammar = answer_grammar(FORMS["json_schema"], "", reader_of("hermes"), {})
    assert matching.is_answer(grammar, call_of("time", "{}"))
    assert not matching.is_answer(grammar, call_of("time", '{"a": 1}'))
    assert matching.is_answer(grammar, call_of("weather", '{"a": 1}'))


@pytest.mark.parametrize("tokens_per_reply", [1, 1000])
def test_a_model_calls_a_tool_before_it_answers_in_the_form(model: Model, tokens_per_reply: int) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.will_say(CALLS["hermes"][0], ANSWER)
    choice = model.chat(response_format=FORMAT)
    assert functions_of(choice["message"]) == [("weather", PARIS)]
    assert choice["finish_reason"] == "tool_calls"
    assert model.chat(response_format=FORMAT)["message"]["content"] == ANSWER
    model.will_say(CALLS["hermes"][0])
    deltas = [choice["delta"] for choice in model.stream(response_format=FORMAT)]
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", []) if "id" in call] == [
        "weather"
    ]
    assert not [delta["content"] for delta in deltas if delta.get("content")]


def object_of(*names: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {} for name in names}, "required": [*names]}
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


# It takes very many steps to compare with anything.
MAZE = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 5} for i in range(6)} | {"d6": {"type": "object"}}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        object_of("name", "parameters"),
        object_of("function", "arguments"),
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/d0", "$defs": MAZE}}},
    ],
    ids=lambda form: str(form)[-40:],
)
def test_a_form_that_could_be_a_call_is_refused(new_model: Callable[..., Model], form: dict[str, Any]) -> None:
    model = new_model("{{ messages[0].content }}", tool_call_parser="llama3")
    fields = {"messages": [{"role": "user", "content": "Paris?"}], "tools": [WEATHER]}
    response = model.router.chat(**fields, response_format=form)
    assert response.status_code == 400
    assert "response_format and tools are ambiguous together" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "response_format"
    regex = model.router.chat(**fields, response_format={"type": "text"}, guided_regex="[0-9]+")
    assert regex.json()["error"]["param"] == "guided_regex"
    tool = {"name": "weather", "input_schema": PARAMETERS}
    format_ = {"type": "json_schema", "schema": {}}
    body = {"max_tokens": 9, "messages": fields["messages"], "tools": [tool], "output_config": {"format": format_}}
    messages = model.router.client.post("/v1/messages", json=body | {"model": "chat-model"})
    assert messages.status_code == 400
    assert messages.json()["error"]["message"].startswith("output_config and tools are ambiguous together")
    model.will_say(ANSWER)
    assert model.chat(response_format=FORMAT)["message"]["content"] == ANSWER
