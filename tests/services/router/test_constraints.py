"""Tests of requests' constraints, which go to targets, and of log-probabilities in answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from cluster.logprobs import TokenLogprobs
from cluster.tokenization import Tokenizer
from cluster.wire.replies import CallReply, decode_replies, encode_replies
from protos.speculation.v1 import target_pb2
from services.router.api.wire_requests import bad_words
from services.router.output.logprobs import LogprobsFormat
from services.router.output.tools import Tool, ToolChoice, tool_grammar
from services.router.structured.grammar import MAX_GRAMMAR_CHARACTERS, grammar_of
from services.router.structured.references import MAX_SCHEMAS

from .conftest import Router, ScriptedTarget

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ENFORCED = Grammar(
    "json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}'
)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            ENFORCED,
        ),
        ({"guided_json": json.dumps(SCHEMA)}, ENFORCED),
        ({"structured_outputs": {"json": SCHEMA}}, ENFORCED),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Grammar("regex", "a+")),
        ({"guided_choice": ['a"b', "c\\\n"]}, Grammar("regex", 'a"b|c\\\\\\\n')),
        ({"guided_grammar": 'root ::= "x"'}, Grammar("ebnf", 'root ::= "x"')),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "json_schema", "json_schema": SCHEMA}}}},
            Grammar("structural_tag", f'{{"format":{{"type":"json_schema","json_schema":{ENFORCED.text}}}}}'),
        ),
    ],
)
def test_the_grammar_of_a_request(fields: dict[str, object], grammar: Grammar | None) -> None:
    assert grammar_of(fields) == grammar


def test_at_most_one_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="give one") as raised:
        grammar_of({"response_format": {"type": "json_object"}, "guided_regex": "a"})
    assert raised.value.param == "guided_regex"


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        ("allOf", {"allOf": [{"type": "string"}, {"minLength": 1}]}),
        ("not", {"not": {"type": "null"}}),
        ("multipleOf", {"type": "integer", "multipleOf": 5}),
    ],
)
def test_every_schema_is_checked_alike(router: Router, keyword: str, schema: dict[str, object]) -> None:
    wrong = {"type": "object", "properties": {"a": schema}}
    messages = [{"role": "user", "content": "fox"}]
    function = {"name": "f", "parameters": wrong}
    tools = [{"type": "function", "function": {"name": "g"}}, {"type": "function", "function": function}]
    form = {"type": "json_schema", "name": "x", "schema": wrong}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": wrong}}
    for path, fields in (
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("guided_json", {"guided_json": wrong}),
        ("structured_outputs.json", {"structured_outputs": {"json": json.dumps(wrong)}}),
        ("structured_outputs.structural_tag.format.json_schema", {"structured_outputs": {"structural_tag": tag}}),
        ("tools[1].function.parameters", {"tools": tools, "tool_choice": "required"}),
        (
            "tools[1].function.parameters",
            {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
    ):
        response = router.chat(messages=messages, **fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith(f"{path}.properties.a.{keyword} ")
    response = router.client.post("/v1/responses", json={"input": "fox", "text": {"format": form}})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"text.format.schema.properties.a.{keyword} ")
    assert response.json()["error"]["param"] == "text"
    named = {"type": "function", "function": {"name": "g"}}
    for choice in ("auto", named):  # neither enforces the wrong parameters
        assert router.chat(messages=messages, tools=tools, tool_choice=choice).status_code == 200


def test_definitions_of_tools_are_kept_apart() -> None:
    def tool(name: str, type_: str) -> Tool:
        schema = {"properties": {"$ref": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": type_}}}
        return Tool(name, schema, {})

    grammar = tool_grammar(ToolChoice("required"), [tool("a", "null"), tool("b", "boolean")], parallel=False)
    assert grammar is not None
    for call in json.loads(grammar.text)["items"]["anyOf"]:
        parameters = call["properties"]["parameters"]
        definition = parameters["properties"]["$ref"]["$ref"].rpartition("/")[2]
        kinds = {"a": "null", "b": "boolean"}
        assert parameters["$defs"][definition]["type"] == kinds[call["properties"]["name"]["const"]]


def test_the_schemas_of_a_request_have_one_limit_together() -> None:
    properties = {f"p{number}": {"type": "null"} for number in range(MAX_SCHEMAS // 4)}
    tools = [Tool(f"f{number}", {"properties": properties}, {}, f"tools[{number}]") for number in range(5)]
    assert tool_grammar(ToolChoice("required"), tools[:3], parallel=False) is not None
    with pytest.raises(InvalidRequestError, match=r"^tools\[3\].function.parameters has more than"):
        tool_grammar(ToolChoice("required"), tools, parallel=False)
    tag = {"begin": "<", "end": ">", "schema": {"properties": properties}}
    tags = {"type": "structural_tag", "structures": [tag] * 5, "triggers": ["<"]}
    with pytest.raises(InvalidRequestError, match=r"^response_format.structures\[3\].schema has more than"):
        grammar_of({"response_format": tags})


def test_a_grammar_is_of_bounded_length() -> None:
    with pytest.raises(InvalidRequestError, match="may have"):
        grammar_of({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)})


def test_a_target_is_told_everything(router: Router, target: ScriptedTarget) -> None:
    fields = {
        "stop_token_ids": [7, 9],
        "min_tokens": 2,
        "bad_words": ["fox"],
        "allowed_token_ids": [1, 2],
        "guided_regex": "a+",
        "logprobs": 3,
        "prompt_logprobs": 1,
        "priority": -4,
        "cache_salt": "mine",
        "vllm_xargs": {"num_speculative_tokens": 2},
    }
    response = router.complete(prompt=[1, 2], max_tokens=4, **fields)
    assert response.status_code == 200
    first, second = response.json()["choices"][0]["prompt_logprobs"]
    assert (first, "2" in second) == (None, True)
    (request,) = target.requests
    assert list(request.stop_token_ids) == [7, 9]
    assert request.constraints.min_tokens == 2
    assert list(request.constraints.allowed_token_ids) == [1, 2]
    assert len(request.constraints.bad_words) > 0
    assert request.constraints.grammar.regex == "a+"
    assert (request.num_logprobs, request.num_prompt_logprobs) == (3, 1)
    assert (request.priority, request.cache_salt, request.num_speculative_tokens) == (-4, "mine", 2)


def test_a_plain_request_says_nothing_of_it(router: Router, target: ScriptedTarget) -> None:
    assert router.complete(prompt=[1, 2], max_tokens=4).status_code == 200
    (request,) = target.requests
    for field in ("constraints", "num_logprobs", "num_prompt_logprobs"):
        assert not request.HasField(field)


def test_workers_of_a_version_before_are_not_asked_for_what_they_do_not_know(
    new_target: Callable[[], ScriptedTarget], new_router: Callable[..., Router]
) -> None:
    old = new_target()
    old.description.wire_version = 4
    router = new_router([old.address])
    response = router.complete(prompt=[1, 2], guided_regex="a")
    assert response.status_code == 503
    assert "older version" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 0
    assert router.complete(prompt=[1, 2]).status_code == 200


def test_no_tokens_but_the_prompts(router: Router, target: ScriptedTarget) -> None:
    body = router.complete(prompt=[70, 71, 72], max_tokens=0, echo=True).json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 0)
    assert choice["text"] == router.client.post("/detokenize", json={"tokens": [70, 71, 72]}).json()["prompt"]


def test_bad_words_are_those_after_a_space_too(tokenizer: Tokenizer) -> None:
    found = bad_words(["fox"], tokenizer)
    assert [tokenizer.decode(word) for word in found] in (["fox", " fox"], ["fox"])
    assert bad_words(["fox", " fox", "fox"], tokenizer) == found


def test_columns_of_scores_come_through_the_wire() -> None:
    scores = TokenLogprobs(2, [1, 3], [-0.5, -2.25], [4, 5, 6, 7], [-0.5, -1.0, -0.25, -1.5])
    prompt = TokenLogprobs(0, [9], [-8.0])
    sent = {3: CallReply([1, 2], logprobs=scores, prompt_logprobs=prompt), 4: CallReply([5])}
    back = decode_replies(encode_replies(sent))
    assert (back[3].logprobs, back[3].prompt_logprobs) == (scores, prompt)
    assert back[4].logprobs is None
    back[3].merge(CallReply([8], logprobs=scores.part(0, 1)))
    assert back[3].logprobs is not None
    assert len(back[3].logprobs) == 3


@pytest.mark.parametrize("broken", [{"ranks": [1]}, {"top_token_ids": [1, 2, 3]}, {"top_logprobs": [0.5]}])
def test_columns_that_do_not_fit_are_refused(broken: dict[str, list[float]]) -> None:
    fields = {"ranks": [1, 1], "logprobs": [0.0, 0.0], "top_token_ids": [1, 2], "top_logprobs": [0.0, 0.0]} | broken
    message = target_pb2.GenerateReplies(calls=[1], num_tokens=[2], token_ids=[1, 2])
    message.logprobs.append(target_pb2.CallLogprobs(call=1, **fields))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not match"):
        decode_replies(message)


def test_a_token_has_its_bytes_and_the_likeliest_their_names(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("fox 🦊", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in token_ids) == "fox 🦊".encode()
    scores = TokenLogprobs(1, [1] * len(token_ids), [-1.0] * len(token_ids), token_ids, [-1.0] * len(token_ids))
    form = LogprobsFormat(tokenizer)
    chat = form.chat(token_ids, scores)["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]) == "fox 🦊".encode()
    completion, _ = form.completion(token_ids, scores, has_first=True, text_offset=0)
    assert {len(completion[key]) for key in completion} == {len(token_ids)}
    named, _ = LogprobsFormat(tokenizer, as_token_ids=True).completion(token_ids, scores, has_first=True, text_offset=0)
    assert named["tokens"] == [f"token_id:{token}" for token in token_ids]


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logit_bias": {"0": 100}, "ignore_eos": True}])
def test_streams_and_whole_completions_tell_the_same_scores(router: Router, more: dict[str, object]) -> None:
    fields = {"prompt": [70, 71, 72], "max_tokens": 5, "logprobs": 2, "seed": 1, **more}
    (choice,) = router.complete(**fields).json()["choices"]
    whole = choice["logprobs"]
    fields["stop"] = [choice["text"][-4:-1] + "never"]  # some text is kept back for a while
    events = router.stream(**fields)
    pieces = [event["choices"][0]["logprobs"] for event in events if isinstance(event, dict) and event["choices"]]
    assert {key: [value for piece in pieces for value in piece[key]] for key in whole} == whole
    assert len(whole["tokens"]) == (8 if "echo" in more else 5)


def test_streams_and_whole_chats_tell_the_same_scores(router: Router) -> None:
    messages = [{"role": "user", "content": "fox"}]
    chat = {"messages": messages, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "seed": 1}
    content = router.chat(**chat).json()["choices"][0]["logprobs"]["content"]
    events = router.stream_chat(**chat)
    told = [event["choices"][0]["logprobs"] for event in events if isinstance(event, dict) and event["choices"]]
    assert [entry for piece in told if piece is not None for entry in piece["content"]] == content
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 5
