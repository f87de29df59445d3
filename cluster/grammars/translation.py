"""Writes grammars in llguidance's form."""

from __future__ import annotations

import json
from typing import Any

from cluster.constraints import Grammar
from cluster.grammars.gbnf import gbnf_part
from cluster.grammars.json_rules import JsonRules
from cluster.grammars.rules import Part, Rules, invalid_grammar, without_anchors
from cluster.grammars.tag_rules import TagRules
from cluster.grammars.vocabulary import Vocabulary


def to_lark(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """Returns the rules of `grammar`. Raises InvalidRequestError if it is not valid."""
    rules = Rules()
    try:
        text = rules.text(_start(rules, grammar, vocabulary))
    except KeyError as error:
        raise invalid_grammar(f"a part of it lacks the field {str(error)[:64]}") from error
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise invalid_grammar("a part of it has the wrong type") from error
    except RecursionError:
        raise invalid_grammar("it is nested too deep") from None
    plain = text.replace("\\", "")
    if any(special in plain for special in vocabulary.special_texts):
        # Where a text is the only one, llguidance would force the special token that is written like it.
        return f'%llguidance {{"no_forcing": true}}\n{text}'
    return text


def _start(rules: Rules, grammar: Grammar, vocabulary: Vocabulary) -> Part:
    match grammar.form:
        case "json_schema":
            return JsonRules(rules, _parsed(grammar.text)).write()
        case "regex":
            return rules.expression(without_anchors(grammar.text))
        case "ebnf":
            return gbnf_part(rules, grammar.text)
    return TagRules(rules, vocabulary).write(_parsed(grammar.text))


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise invalid_grammar(f"it should be JSON ({error})") from error
    if not isinstance(found, dict):
        raise invalid_grammar("it should be an object")
    return found
