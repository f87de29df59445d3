"""Parts of grammars for calls that a model may make or not, in every syntax in which models write them.

Arguments are unchecked, as schemas of many tools would make grammars too large. `formats` reads these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from services.router.output.qwen_xml import END, END_OF_CALL, END_OF_PARAMETER, PARAMETER
from services.router.output.tools import NO_PARAMETERS, Tool, call_object

_ANY_OBJECT = {"type": "object"}

CallPart = Callable[[Sequence[Tool], Mapping[str, int], bool], Part]
"""Returns the part for tools, special tokens by text, and whether several calls are allowed."""


def hermes_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    return _in_tags(json_value(_call_schema(tools, "arguments")), special_tokens, parallel)


def qwen3_xml_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    """Values are any text without the tags that end one: the syntax has no escapes."""
    value = {"type": "any_text", "excludes": [END_OF_PARAMETER, PARAMETER, END, END_OF_CALL]}
    key = {"type": "regex", "pattern": r"[^<>\x00-\x1f]{1,256}"}
    parameter = sequence(text(PARAMETER), key, text(">"), value, text(END_OF_PARAMETER), BLANKS)
    names = one_of(*(text(tool.name) for tool in tools))
    inside = sequence(BLANKS, {"type": "star", "content": parameter})
    return _in_tags(sequence(text("<function="), names, text(">"), inside, text(END)), special_tokens, parallel)


def llama3_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    tag = optional(mark("<|python_tag|>", special_tokens))
    call = sequence(tag, json_value(_call_schema(tools, "parameters")))
    return several(call, sequence(text(";"), BLANKS)) if parallel else call


def mistral_calls(tools: Sequence[Tool], special_tokens: Mapping[str, int], parallel: bool) -> Part:
    """Calls come as a list, or each with its name before the arguments."""
    opening, separator = mark("[TOOL_CALLS]", special_tokens), optional(mark("[ARGS]", special_tokens))
    limit = {} if parallel else {"maxItems": 1}
    listed = {"type": "array", "items": _call_schema(tools, "arguments"), "minItems": 1, **limit}
    named = one_of(*(sequence(text(tool.name), separator, json_value(_arguments(tool))) for tool in tools))
    each = sequence(opening, BLANKS, named)
    return one_of(sequence(opening, BLANKS, json_value(listed)), several(each, BLANKS) if parallel else each)


def _call_schema(tools: Sequence[Tool], argument_key: str) -> dict[str, Any]:
    """Returns the schema of a call {"name": ..., `argument_key`: ...}."""
    options = []
    for arguments in (NO_PARAMETERS, _ANY_OBJECT):
        if names := [tool.name for tool in tools if _arguments(tool) == arguments]:
            options.append(call_object({"enum": names}, argument_key, arguments))
    return {"anyOf": options}


def _arguments(tool: Tool) -> Mapping[str, Any]:
    return NO_PARAMETERS if tool.parameters == NO_PARAMETERS else _ANY_OBJECT


def _in_tags(call: Part, special_tokens: Mapping[str, int], parallel: bool) -> Part:
    begin, end = mark("<tool_call>", special_tokens), mark("</tool_call>", special_tokens)
    tagged = sequence(begin, BLANKS, call, BLANKS, end)
    return several(tagged, BLANKS) if parallel else tagged
