"""Grammars of answers that begin with reasoning: any text up to its end, then the requested grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.constraints import MAX_WHITESPACE, Grammar
from services.router.output.message import Reader
from services.router.output.reasoning import BEGIN, END

_BLANKS = {"type": "regex", "pattern": f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"}

Format = dict[str, Any]  # a format of xgrammar's structural tags


def after_reasoning(grammar: Grammar, reader: Reader, special_tokens: Mapping[str, int]) -> Grammar:
    """Returns the grammar of an answer that may begin with reasoning, and follows `grammar` after it.

    If the prompt opens the reasoning, the answer has to close it; otherwise the model may reason or not.
    `special_tokens`: IDs by text; the marks of reasoning may be among them.
    """
    answer = _format_of(grammar)
    if answer is None or not (reader.reasoning_has_begun or reader.may_reason):
        return grammar
    if END in special_tokens:  # grammars refer to special tokens by ID: they have no text
        text: Format = {"type": "any_tokens", "exclude_tokens": sorted(special_tokens.values())}
    else:
        text = {"type": "any_text", "excludes": [END]}
    rest = [text, _mark(END, special_tokens), _BLANKS, answer]
    if reader.reasoning_has_begun:
        return _tag(_sequence(rest))
    return _tag({"type": "or", "elements": [answer, _sequence([_BLANKS, _mark(BEGIN, special_tokens), *rest])]})


def _format_of(grammar: Grammar) -> Format | None:
    """Returns `grammar` as a part of a structural tag; None: it cannot be one."""
    match grammar.form:
        case "json_schema":
            schema = json.loads(grammar.text)
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
    try:
        tag = json.loads(grammar.text)
    except ValueError:
        return None  # the target refuses it
    return tag.get("format") if isinstance(tag, dict) else None


def _mark(text: str, special_tokens: Mapping[str, int]) -> Format:
    if text in special_tokens:
        return {"type": "token", "token": special_tokens[text]}
    return {"type": "const_string", "value": text}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


def _tag(format_: Format) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": format_}))
