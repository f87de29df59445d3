"""Grammars of answers: a requested format, or calls of tools in its place, and reasoning before both."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from services.router.output.grammar_parts import BLANKS, Part, grammar_of_part, mark, one_of, part_of, sequence
from services.router.output.message import Reader
from services.router.output.reasoning import BEGIN, END
from services.router.output.tool_calls import ARGUMENT_KEYS, NAME_KEYS
from services.router.output.tools import Tool
from services.router.structured.errors import SchemaError
from services.router.structured.references import References
from services.router.structured.values import are_apart


def answer_grammar(grammar: Grammar, field: str, reader: Reader, special_tokens: Mapping[str, int]) -> Grammar:
    """Returns the grammar of an answer that follows `grammar`, or calls tools instead, after any reasoning.

    If the prompt opens the reasoning, the answer has to close it; otherwise the model may reason or not.
    `special_tokens`: IDs by text; the marks of reasoning and of calls may be among them. Raises InvalidRequestError,
    naming the `field` that asks for `grammar`, if an answer could be both a call and in that form.
    """
    reasons = reader.reasoning_has_begun or reader.may_reason
    answer, calls = part_of(grammar), reader.call_format
    if answer is None or not (reasons or calls):
        return grammar
    if calls is not None:
        if not calls.has_markers:
            _check_apart(grammar, field, reader.tools)
        answer = one_of(calls.part(reader.tools, special_tokens, reader.parallel_calls), answer)
    if not reasons:
        return grammar_of_part(answer)
    if END in special_tokens:
        text: Part = {"type": "any_tokens", "exclude_tokens": sorted(special_tokens.values())}
    else:
        text = {"type": "any_text", "excludes": [END]}
    rest = [text, mark(END, special_tokens), BLANKS, answer]
    if reader.reasoning_has_begun:
        return grammar_of_part(sequence(*rest))
    return grammar_of_part(one_of(answer, sequence(BLANKS, mark(BEGIN, special_tokens), *rest)))


def _check_apart(grammar: Grammar, field: str, tools: Sequence[Tool]) -> None:
    """Raises InvalidRequestError unless `grammar` is a schema that excludes calls written as plain objects."""
    schema = json.loads(grammar.text) if grammar.form == "json_schema" else {}
    names, references = {"enum": [tool.name for tool in tools]}, References(schema)
    with contextlib.suppress(SchemaError):
        if all(
            are_apart(schema, {"type": "object", "properties": {name: names}, "required": [name, key]}, references)
            for name in NAME_KEYS
            for key in ARGUMENT_KEYS
        ):
            return
    raise InvalidRequestError(
        f"{field} and tools are ambiguous together: this model writes calls as plain objects "
        '{"name": ..., "parameters": ...}, which only a JSON schema can exclude. Give one that does, or omit the tools',
        param=field,
    )
