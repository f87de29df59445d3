"""Parts of grammars for calls of tools, in every syntax in which models write them: `formats` reads these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.router.output.grammar_parts import (
    BLANKS,
    Part,
    json_value,
    mark,
    one_of,
    optional,
    sequence,
    several,
    text,
)
from services.router.output.tools import Tool, calls_schema, parameters_schema

CallPart = Callable[[Sequence[Tool], Mapping[str, int], bool], Part]
"""Returns the part for tools, special tokens by text, and whether several calls are allowed."""


def hermes_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    return _in_tags(json_value(calls_schema(tools, "arguments")), special_tokens, parallel)


def qwen3_xml_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    """Parameters are any text: the syntax has no escapes."""
    end = "</function>"
    inner = {"type": "any_text", "excludes": [end]}
    calls = one_of(*(sequence(text(f"<function={tool.name}>"), inner) for tool in tools))
    return _in_tags(sequence(calls, text(end)), special_tokens, parallel)


def llama3_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    tag = optional(mark("<|python_tag|>", special_tokens))
    call = sequence(tag, json_value(calls_schema(tools, "parameters")))
    return several(call, sequence(text(";"), BLANKS)) if parallel else call


def mistral_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    """Calls come as a list, or each with its name before the arguments."""
    opening, separator = mark("[TOOL_CALLS]", special_tokens), optional(mark("[ARGS]", special_tokens))
    schema = calls_schema(tools, "arguments")
    definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
    listed = {"type": "array", "items": schema, "minItems": 1, **({} if parallel else {"maxItems": 1})} | definitions
    named = one_of(*(sequence(text(tool.name), separator, json_value(parameters_schema(tool))) for tool in tools))
    each = sequence(opening, BLANKS, named)
    return one_of(sequence(opening, BLANKS, json_value(listed)), several(each, BLANKS) if parallel else each)


def _in_tags(call: Part, special_tokens: Mapping[str, int], parallel: bool) -> Part:
    begin, end = mark("<tool_call>", special_tokens), mark("</tool_call>", special_tokens)
    tagged = sequence(begin, BLANKS, call, BLANKS, end)
    return several(tagged, BLANKS) if parallel else tagged
