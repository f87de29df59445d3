"""Parts that make the grammar of an answer: formats of structural tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.constraints import MAX_WHITESPACE, Grammar

Part = dict[str, Any]

BLANKS: Part = {"type": "regex", "pattern": f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"}


def text(value: str) -> Part:
    return {"type": "const_string", "value": value}


def mark(value: str, special_tokens: Mapping[str, int]) -> Part:
    """Returns the part for `value`, by its ID if it is a special token: those have no text in a grammar."""
    return {"type": "token", "token": special_tokens[value]} if value in special_tokens else text(value)


def json_value(schema: Mapping[str, Any]) -> Part:
    return {"type": "json_schema", "json_schema": schema}


def sequence(*parts: Part) -> Part:
    return {"type": "sequence", "elements": list(parts)}


def one_of(*parts: Part) -> Part:
    return {"type": "or", "elements": list(parts)} if len(parts) > 1 else parts[0]


def optional(part: Part) -> Part:
    return {"type": "optional", "content": part}


def several(part: Part, between: Part) -> Part:
    """Returns one or more of `part`."""
    return sequence(part, {"type": "star", "content": sequence(between, part)})


def part_of(grammar: Grammar) -> Part | None:
    """Returns `grammar` as a part; None: it cannot be one."""
    match grammar.form:
        case "json_schema":
            return json_value(json.loads(grammar.text))
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
    try:
        tag = json.loads(grammar.text)
    except ValueError:
        return None  # the target refuses it
    return tag.get("format") if isinstance(tag, dict) else None


def grammar_of_part(part: Part) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part}))
