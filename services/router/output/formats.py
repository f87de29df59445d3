"""The formats in which models call tools.

Text that turns out not to be a call becomes content, with its markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.router.output.call_grammar import CallPart, hermes_calls, llama3_calls, mistral_calls, qwen3_xml_calls
from services.router.output.qwen_xml import read_function
from services.router.output.source import WHITE_SPACE, Reading, Source, Writer
from services.router.output.tool_calls import is_name, read_arguments, read_call, read_calls
from services.router.output.tools import Tool

Program = Callable[[Source, Writer, Sequence[Tool]], Reading[None]]


def plain(source: Source, writer: Writer, _: Sequence[Tool] = ()) -> Reading[None]:
    """Reads the whole answer as content."""
    yield from source.until((), writer.content)


def _hermes(source: Source, writer: Writer, _: Sequence[Tool]) -> Reading[None]:
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times."""
    while marker := (yield from source.until(("<tool_call>",), writer.content)):
        source.mark()
        character = yield from source.skip()
        if character == "{" and (yield from read_call(source, writer)):
            yield from _pass_over(source, "</tool_call>")
            continue
        if character != "{":
            source.unread(character)
        writer.content(marker + source.since_mark())


def _qwen3_xml(source: Source, writer: Writer, tools: Sequence[Tool]) -> Reading[None]:
    """Reads `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    The outer tag may be missing.
    """
    parameters = {tool.name: tool.parameters for tool in tools}
    while marker := (yield from source.until(("<tool_call>", "<function="), writer.content)):
        source.mark()
        if marker == "<tool_call>":
            source.unread((yield from source.skip()))
            if not (yield from source.expect("<function=")):
                writer.content(marker + source.since_mark())
                continue
        if (yield from read_function(source, writer, parameters)):
            yield from _pass_over(source, "</tool_call>")
        else:
            writer.content(marker + source.since_mark())


def _llama3(source: Source, writer: Writer, tools: Sequence[Tool]) -> Reading[None]:
    """Reads `{"name": ..., "parameters": {...}}` at the start or after `<|python_tag|>`.

    Calls that follow each other may be separated by `;`.
    """
    names = {tool.name for tool in tools}
    has_tag = False
    while True:
        source.mark()
        character = yield from source.skip()
        if character == "{" and (yield from read_call(source, writer, None if has_tag else names)):
            has_tag = False
            source.mark()
            character = yield from source.skip()
            if character == ";":
                continue
            source.unread(character)
            if character == "{":
                continue
            writer.content(source.since_mark())
        else:
            if character != "{":
                source.unread(character)
            writer.content(("<|python_tag|>" if has_tag else "") + source.since_mark())
        if not (yield from source.until(("<|python_tag|>",), writer.content)):
            return
        has_tag = True


def _mistral(source: Source, writer: Writer, _: Sequence[Tool]) -> Reading[None]:
    """Reads `[TOOL_CALLS]` before a list of calls or before each call.

    A call after the marker is an object, `name{...}` or `name[ARGS]{...}`.
    """
    while marker := (yield from source.until(("[TOOL_CALLS]",), writer.content)):
        source.mark()
        character = yield from source.skip()
        if character == "[":
            is_call = yield from read_calls(source, writer)
        elif character == "{":
            is_call = yield from read_call(source, writer)
        else:
            source.unread(character)
            is_call = yield from _named_call(source, writer)
        if not is_call:
            writer.content(marker + source.since_mark())


def _named_call(source: Source, writer: Writer) -> Reading[bool]:
    name = ""
    while (character := (yield from source.read())) and character not in WHITE_SPACE + "[{":
        name += character
    if character and character in WHITE_SPACE:
        character = yield from source.skip()
    if not is_name(name):
        source.unread(character)
        return False
    if character == "[":
        source.unread(character)
        while (tag := (yield from _tag(source))) == "[CALL_ID]":  # the router may choose the call's ID
            while (character := (yield from source.read())) and character not in "[{":
                pass
            source.unread(character)
        if tag != "[ARGS]":
            return False
        character = yield from source.skip()
    if character != "{":
        source.unread(character)
        return False
    writer.begin_call(name)
    yield from read_arguments(source, writer)
    return True


def _tag(source: Source) -> Reading[str]:
    """Returns the next tag in brackets, or other text if there is none."""
    if not (yield from source.expect("[")):
        return ""
    tag = "["
    while len(tag) < len("[CALL_ID]") and (character := (yield from source.read())):
        tag += character
        if character == "]":
            break
    return tag


def required(source: Source, writer: Writer, _: Sequence[Tool]) -> Reading[None]:
    """Reads the whole answer as a list of calls."""
    source.mark()
    character = yield from source.skip()
    if character == "[" and (yield from read_calls(source, writer)):
        source.unread((yield from source.skip()))
    else:
        if character != "[":
            source.unread(character)
        writer.content(source.since_mark())
    yield from plain(source, writer)


def named(name: str) -> Program:
    """Returns the program that reads the whole answer as the arguments of a call of `name`."""

    def read(source: Source, writer: Writer, _: Sequence[Tool]) -> Reading[None]:
        source.mark()
        character = yield from source.skip()
        if character == "{":
            writer.begin_call(name)
            yield from read_arguments(source, writer)
            character = yield from source.skip()
            source.unread(character)
        else:
            source.unread(character)
            writer.content(source.since_mark())
        yield from plain(source, writer)

    return read


def _pass_over(source: Source, tag: str) -> Reading[None]:
    """Skips white space and `tag` if it comes next: models may forget it."""
    source.mark()
    source.unread((yield from source.skip()))
    if not (yield from source.expect(tag)):
        source.unread(source.since_mark())


@dataclass(frozen=True)
class ToolFormat:
    program: Program
    part: CallPart  # of the grammar of an answer, for calls
    markers: tuple[str, ...]  # markers that the text must show even if they are special tokens
    has_markers: bool = True  # whether every call has one; otherwise calls may be plain objects
    has_short_ids: bool = False  # whether calls need IDs of nine letters and digits: the template refuses others


_TOOL_CALL = ("<tool_call>", "</tool_call>")
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(_hermes, hermes_calls, _TOOL_CALL),
    "qwen": ToolFormat(_hermes, hermes_calls, _TOOL_CALL),
    "qwen3_xml": ToolFormat(_qwen3_xml, qwen3_xml_calls, _TOOL_CALL),
    "llama3": ToolFormat(_llama3, llama3_calls, ("<|python_tag|>",), has_markers=False),
    "mistral": ToolFormat(_mistral, mistral_calls, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), has_short_ids=True),
}

# Strings in a template that identify its format; the first match counts.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>", "<function="), "qwen3_xml"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (('"parameters": dictionary of argument name and its value',), "llama3"),
)
_OTHER_FORMATS = ("<arg_key>",)  # strings of unsupported formats with partly the same markup: GLM's


def format_of(template_source: str, tokens: Mapping[str, Any]) -> str | None:
    """Returns the name of a chat template's tool format; None if it is unknown.

    `tokens`: the model's special tokens. They decide if the template has tools but does not show their markup.
    """
    if any(sign in template_source for sign in _OTHER_FORMATS):
        return None
    for signs, name in _SIGNS:
        if all(sign in template_source for sign in signs):
            return name
    if "tools" in template_source:
        for signs, name in _SIGNS:
            if all(sign in tokens for sign in signs):
                return name
    return None
