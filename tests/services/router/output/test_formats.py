"""Tests that model output in every format is read correctly, in whatever pieces it comes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from services.router.output.formats import TOOL_FORMATS, Program, named, plain, required
from services.router.output.message import MessageWriter, Reader
from services.router.output.source import Said
from services.router.output.tools import to_tools

TOOLS = to_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "hours": {"type": "array"},
                        "exact": {"type": ["boolean", "null"]},
                    },
                },
            },
        },
        {"type": "function", "function": {"name": "time"}},
    ]
)
PARIS = '{"city": "Paris"}'
PARIS_CALL = ("weather", PARIS)

# text, content, reasoning, calls
Case = tuple[str, str | None, list[tuple[str, str]]]

HERMES: list[Case] = [
    ("hello", "hello", []),
    ("", "", []),
    (" \n", " \n", []),
    (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', None, [PARIS_CALL]),
    (f'Let me see. \n<tool_call>{{"name":"weather","arguments":{PARIS}}}</tool_call>', "Let me see.", [PARIS_CALL]),
    (
        f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "time", "arguments": {}}\n</tool_call>',
        None,
        [PARIS_CALL, ("time", "{}")],
    ),
    (f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>', None, [PARIS_CALL]),
    ('<tool_call>{"name": "time"}</tool_call>', None, [("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": null}</tool_call>', None, [("time", "{}")]),
    (f'<tool_call>{{"name": "weather", "arguments": {json.dumps(PARIS)}}}</tool_call>', None, [PARIS_CALL]),
    (
        '<tool_call>{"name": "unknown", "arguments": {"a": [1.5e3, -0, true, {}]}}</tool_call>',
        None,
        [("unknown", '{"a": [1.5e3, -0, true, {}]}')],
    ),
    (
        '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>\\" é \\u00e9"}}</tool_call>',
        None,
        [("time", '{"a": "</tool_call>\\" é \\u00e9"}')],
    ),
    # A newline that the model forgot to escape.
    ('<tool_call>{"name": "time", "arguments": {"a": "x\ny"}}</tool_call>', None, [("time", '{"a": "x\\ny"}')]),
    # The end tag is forgotten, or the bracket before it.
    (f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}', None, [PARIS_CALL]),
    (f'<tool_call>{{"name": "weather", "arguments": {PARIS}</tool_call> so', " so", [PARIS_CALL]),
    (f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call> and so on', " and so on", [PARIS_CALL]),
    ('<tool_call>{"name": "time"}\n<tool_call>{"name": "time"}', None, [("time", "{}"), ("time", "{}")]),
    # No calls.
    ("<tool_call>", "<tool_call>", []),
    ("a < b <tool_ call> <", "a < b <tool_ call> <", []),
    ("<tool_call>\nhello</tool_call>", "<tool_call>\nhello</tool_call>", []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "time", "arguments": [1]}', '<tool_call>{"name": "time", "arguments": [1]}', []),
    ('<tool_call>{"name": "ti', '<tool_call>{"name": "ti', []),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    ('<tool_call>x<tool_call>{"name": "time"}</tool_call>', "<tool_call>x", [("time", "{}")]),
    ("<tool_call>" * 3, "<tool_call>" * 3, []),
    # Broken once the arguments have begun: they are as far as they go.
    ('<tool_call>{"name": "time", "arguments": {"a": 1', None, [("time", '{"a": 1')]),
    ('<tool_call>{"name": "time", "arguments": {"a": 1]} there', "]} there", [("time", '{"a": 1')]),
    ('<tool_call>{"name": "time", "arguments": {"a": 01}}', "}}", [("time", '{"a": 01')]),
]

QWEN_XML: list[Case] = [
    (
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    ("<function=time></function>", None, [("time", "{}")]),
    ("<tool_call><function=time>\n</function></tool_call>", None, [("time", "{}")]),
    (
        "<tool_call><function=weather><parameter=city>5</parameter><parameter=days>many</parameter>"
        "<parameter=hours>[1, 2]</parameter><parameter=exact>True</parameter></function></tool_call>",
        None,
        [("weather", '{"city": "5", "days": "many", "hours": [1, 2], "exact": true}')],
    ),
    (
        "<tool_call><function=weather><parameter=exact>null</parameter><parameter=other>null</parameter></function>",
        None,
        [("weather", '{"exact": null, "other": "null"}')],
    ),
    (
        '<tool_call><function=weather><parameter=city>a\n"<b>\n</parameter></function></tool_call>',
        None,
        [("weather", '{"city": "a\\n\\"<b>"}')],
    ),
    (
        "<tool_call><function=weather><parameter=city>Paris<parameter=days>3</function></tool_call>",
        None,
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    ("<tool_call><function=weather><parameter=city>Par", None, [("weather", "")]),
    ("<tool_call><function=weather><parameter=city>Paris</parameter>", None, [("weather", '{"city": "Paris"')]),
    ("<tool_call>text</tool_call>", "<tool_call>text</tool_call>", []),
    ("<tool_call><tool_call><function=time></function>", "<tool_call>", [("time", "{}")]),
    ("<function=time></func</tool_call>", "</func</tool_call>", [("time", "{}")]),
    ("<tool_call><function=time></tool_call>", None, [("time", "{}")]),
    ("<function=a b", "<function=a b", []),
]

LLAMA3: list[Case] = [
    (f'{{"name": "weather", "parameters": {PARIS}}}', None, [PARIS_CALL]),
    (f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', None, [PARIS_CALL]),
    (f'Sure. <|python_tag|>{{"name": "x", "arguments": {PARIS}}}', "Sure.", [("x", PARIS)]),
    (
        f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}; {{"name": "time", "parameters": {{}}}}',
        None,
        [PARIS_CALL, ("time", "{}")],
    ),
    (f'{{"type": "function", "function": "weather", "parameters": {PARIS}}} done', " done", [PARIS_CALL]),
    # Answers in JSON that are no calls.
    ('{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ('{"name": "time"}', '{"name": "time"}', []),
    (' {"name": "wea', ' {"name": "wea', []),
    ('a {"name": "time", "parameters": {}}', 'a {"name": "time", "parameters": {}}', []),
    ('<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ("{", "{", []),
]

MISTRAL: list[Case] = [
    (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]', None, [PARIS_CALL]),
    (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}, "id": "x"}}, {{"name": "time", "arguments": {{}}}}]',
        None,
        [PARIS_CALL, ("time", "{}")],
    ),
    (f"So:[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]time{{}}", "So:", [PARIS_CALL, ("time", "{}")]),
    (f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time [ARGS] {{}}", None, [PARIS_CALL, ("time", "{}")]),
    (f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{PARIS}", None, [PARIS_CALL]),
    ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("[TOOL_CALLS]weather[WHAT]{}", "[TOOL_CALLS]weather[WHAT]{}", []),
    ("[TOOL_CALLS]{5}", "[TOOL_CALLS]{5}", []),
    ("[TOOL_CALL] [[", "[TOOL_CALL] [[", []),
]

REQUIRED: list[Case] = [
    (f'[{{"name": "weather", "parameters": {PARIS}}}]', None, [PARIS_CALL]),
    (
        f' [ {{"name": "weather", "parameters": {PARIS}}} ,\n{{"name":"time","parameters":{{}}}}] ',
        None,
        [PARIS_CALL, ("time", "{}")],
    ),
    (f'[{{"name": "weather", "parameters": {PARIS[:-3]}', None, [("weather", PARIS[:-3])]),
    ("I will not", "I will not", []),
    ("[1]", "[1]", []),
]

NAMED: list[Case] = [
    (PARIS, None, [PARIS_CALL]),
    (" " + PARIS + "\n", None, [PARIS_CALL]),
    (PARIS[:-3], None, [("weather", PARIS[:-3])]),
    ("Paris", "Paris", []),
]

PROGRAMS: dict[str, tuple[Program, list[Case]]] = {
    **{
        name: (TOOL_FORMATS[name].program, cases)
        for name, cases in {
            "hermes": HERMES,
            "qwen": HERMES,
            "qwen3_xml": QWEN_XML,
            "llama3": LLAMA3,
            "mistral": MISTRAL,
        }.items()
    },
    "required": (required, REQUIRED),
    "named": (named("weather"), NAMED),
}
CASES = [(name, *case) for name, (_, cases) in PROGRAMS.items() for case in cases]


def reader_of(name: str, **settings: Any) -> Reader:
    return Reader(program=PROGRAMS[name][0], tools=TOOLS, **settings)


def read(reader: Reader, pieces: list[str]) -> list[Said]:
    """Returns the parts of an answer that comes in `pieces`, with neighbours of one kind joined."""
    started = reader.start()
    joined: list[Said] = []
    for index, piece in enumerate(pieces):
        for said in started.push(piece, is_last=index == len(pieces) - 1):
            if joined and joined[-1].kind == said.kind != "call":
                joined[-1] = Said(said.kind, joined[-1].text + said.text)
            else:
                joined.append(said)
    return joined


def message_of(reader: Reader, text: str) -> dict[str, Any]:
    return MessageWriter(reader).message(reader.start().push(text, is_last=True))


def split(text: str, random_numbers: random.Random) -> list[str]:
    cuts = sorted(random_numbers.randint(0, len(text)) for _ in range(random_numbers.randint(0, 8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_what_an_answer_says(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    reader = reader_of(name)
    writer = MessageWriter(reader)
    message = writer.message(reader.start().push(text, is_last=True))
    assert message["content"] == content
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [(function["name"], function["arguments"]) for function in functions] == calls
    assert writer.finish_reason("stop") == ("tool_calls" if calls else "stop")
    assert writer.finish_reason("length") == "length"


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES])
def test_pieces_say_what_the_whole_says(name: str, text: str) -> None:
    reader = reader_of(name, reads_reasoning=True)
    assert read(reader, [text]) == read(reader_of(name), [text])
    for answer in (text, f"<think>\nhm\n\n</think>\n\n{text}"):
        whole = read(reader, [answer])
        assert read(reader, [*answer, ""]) == whole
        random_numbers = random.Random(answer)
        for _ in range(30):
            assert read(reader, split(answer, random_numbers)) == whole


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "<think>", "</think>", '{"name": "time", ', '"arguments": ', '"parameters": ', "{",
    "}", "[", "]", '"', ":", ",", ";", "\\", "\n", " ", "5", "-", "null", "time", ">", "é", "\\u12",
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_text_is_read_alike_in_any_pieces(name: str) -> None:
    random_numbers = random.Random(name)
    reader = reader_of(name, reads_reasoning=True)
    for _ in range(400):
        text = "".join(random_numbers.choices(FRAGMENTS, k=random_numbers.randint(1, 25)))
        whole = read(reader, [text])
        assert read(reader, [*text, ""]) == whole, text
        assert read(reader, split(text, random_numbers)) == whole, text


def test_arguments_are_streamed_as_they_come() -> None:
    started = reader_of("hermes").start()
    kinds = []
    for piece in ("<tool", '_call>{"name": "time", "argum', 'ents": {"a', '": 1, "b": "', 'xyz"}}', "</tool_", "call>"):
        kinds.append([(said.kind, said.text) for said in started.push(piece, is_last=False)])
    assert kinds == [
        [],
        [],
        [("call", "time"), ("arguments", '{"a')],
        [("arguments", '": 1, "b": "')],
        [("arguments", 'xyz"}')],
        [],
        [],
    ]


def test_only_the_first_call_is_kept_where_they_may_not_be_parallel() -> None:
    text = '<tool_call>{"name": "time"}</tool_call><tool_call>{"name": "weather"}</tool_call> bye'
    message = message_of(reader_of("hermes", parallel_calls=False), text)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["time"]
    assert message["content"] == " bye"


def test_ids_of_calls() -> None:
    for short in (False, True):
        message = message_of(reader_of("hermes", has_short_ids=short), '<tool_call>{"name": "time"}</tool_call>' * 2)
        first, second = (call["id"] for call in message["tool_calls"])
        assert first != second
        assert (len(first) == 9 and first.isalnum()) if short else first.startswith("call_")


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n<think>hm</think>yes ", False, "hm", "yes "),
        ("<think>\n\n</think>\n\nyes", False, None, "yes"),
        ("yes <think>hm</think>", False, None, "yes <think>hm</think>"),
        (" <thin", False, None, " <thin"),
        ("hm, </thin\n\n</think>\nyes", True, "hm, </thin", "yes"),
        ("hm", True, "hm", None),
        ("<think>hm\n\nmore\n", False, "hm\n\nmore", None),
        ("</think>yes", True, None, "yes"),
        ("", True, None, ""),
    ],
)
def test_reasoning(text: str, has_begun: bool, reasoning: str | None, content: str | None) -> None:
    reader = Reader(program=plain, reads_reasoning=True, reasoning_has_begun=has_begun)
    message = message_of(reader, text)
    assert message["content"] == content
    assert message.get("reasoning_content") == message.get("reasoning") == reasoning
    assert all(read(reader, [text[:cut], text[cut:]]) == read(reader, [text]) for cut in range(len(text)))


def test_reasoning_can_be_left_out() -> None:
    reader = Reader(reads_reasoning=True, include_reasoning=False)
    assert message_of(reader, "<think>hm</think>yes") == {"role": "assistant", "content": "yes", "refusal": None}
