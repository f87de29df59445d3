"""Writes grammars in llguidance's form."""

from __future__ import annotations

import json
from typing import Any

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from cluster.grammars.gbnf import gbnf_rules
from cluster.grammars.json_rules import JsonRules
from cluster.grammars.rules import Rules, slashed, without_anchors
from cluster.grammars.tag_rules import TagRules
from cluster.grammars.vocabulary import Vocabulary


def write_rules(rules: Rules, grammar: Grammar, vocabulary: Vocabulary) -> str:
    """Adds the rules of `grammar`. Returns the name of the start. Raises InvalidRequestError if it is not valid."""
    try:
        return _start(rules, grammar, vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a part of the wrong form
        raise InvalidRequestError(
            f"the grammar cannot be used: it has a part of the wrong form ({error!r})"[:200]
        ) from error
    except RecursionError:
        raise InvalidRequestError("the grammar cannot be used: it is nested too deep") from None


def _start(rules: Rules, grammar: Grammar, vocabulary: Vocabulary) -> str:
    match grammar.form:
        case "json_schema":
            return JsonRules(rules, _parsed(grammar.text)).write()
        case "regex":
            return rules.terminal(slashed(without_anchors(grammar.text)))
        case "ebnf":
            return gbnf_rules(rules, grammar.text)
    return TagRules(rules, vocabulary).write(_parsed(grammar.text))


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"the grammar cannot be used: it should be JSON ({error})") from error
    if not isinstance(found, dict):
        raise InvalidRequestError("the grammar cannot be used: it should be an object")
    return found
