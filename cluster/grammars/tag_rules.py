"""Writes the rules of structural tags: formats that vLLM and xgrammar define."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.grammars.gbnf import gbnf_rules
from cluster.grammars.json_rules import JsonRules
from cluster.grammars.rules import Rules, literal, one_of, slashed, without_anchors
from cluster.grammars.vocabulary import Vocabulary

Part = Mapping[str, Any]

_ANY_TEXT = "/(?s:.*)/"


class TagRules:
    """Adds the rules of a structural tag to `rules`."""

    def __init__(self, rules: Rules, vocabulary: Vocabulary) -> None:
        self._rules = rules
        self._vocabulary = vocabulary

    def write(self, tag: Part) -> str:
        """Returns the name of the rule of the whole text. Raises InvalidRequestError."""
        return self._rules.add(self._part(_current_form(tag)["format"]))

    def _part(self, part: Part) -> str:
        kind = part.get("type")
        write = _WRITERS.get(str(kind))
        if write is None:
            raise _refusal(f"a structural tag has no type {str(kind)[:64]!r}")
        return write(self, part)

    def _schema(self, part: Part) -> str:
        if part.get("style", "json") != "json" or part.get("any_order") or part.get("excludes"):
            raise _refusal("json_schema has only the style json here, with properties in order and without excludes")
        return JsonRules(self._rules, part["json_schema"]).write()

    def _sequence(self, part: Part) -> str:
        return self._in_order(part["elements"])

    def _tag(self, part: Part) -> str:
        ends = part["end"] if isinstance(part["end"], list) else [part["end"]]
        return self._in_order([_boundary(part["begin"]), part["content"], _either_of([_boundary(end) for end in ends])])

    def _in_order(self, parts: Sequence[Part]) -> str:
        """A text before a constant ends at its first occurrence."""
        written, rest = [], list(parts)
        while rest:
            part = rest.pop(0)
            ends = _constants(rest[0]) if rest and part.get("type") == "any_text" else []
            if ends:
                _check_unlimited(part)
                rest.pop(0)
                others = [text for text in part.get("excludes", ()) if text not in ends]
                written.append(self._text_until(ends, others, part.get("max_chars")))
            else:
                written.append(self._part(part))
        return self._rules.add(" ".join(written) or '""')

    def _text_until(self, ends: Sequence[str], excludes: Sequence[str], max_chars: int | None = None) -> str:
        text = self._rules.terminal(f"({_text(excludes, max_chars)}) ({one_of(map(literal, ends))})")
        return self._rules.add(text, attributes="[lazy]")

    def _any_text(self, part: Part) -> str:
        _check_unlimited(part)
        return self._rules.terminal(_text(part.get("excludes", ()), part.get("max_chars")))

    def _token(self, part: Part) -> str:
        return f"<[{self._token_id(part['token'])}]>"

    def _tokens_but(self, part: Part) -> str:
        _check_unlimited(part)
        excluded = ",".join(str(self._token_id(token)) for token in part.get("exclude_tokens", ()))
        return (f"<[^{excluded}]>" if excluded else "<[*]>") + ("*" if part["type"] == "any_tokens" else "")

    def _token_id(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        token_ids = self._vocabulary.tokenizer.tokenize_str(token, parse_special=True)
        if len(token_ids) != 1:
            raise _refusal(f"{token[:64]!r} is not a token of the model")
        return token_ids[0]

    def _triggered(self, part: Part) -> str:
        """Any text, and a tag after each trigger, with which the tag begins."""
        pieces = []
        for trigger in part["triggers"]:
            tags = [tag for tag in part["tags"] if str(tag["begin"]).startswith(trigger)]
            rests = [self._tag({**tag, "begin": tag["begin"][len(trigger) :]}) for tag in tags]
            if rests:
                others = [other for other in part["triggers"] if other != trigger]
                pieces.append(f"{self._text_until([trigger], [*part.get('excludes', ()), *others])} ({one_of(rests)})")
        tail = self._any_text({"excludes": [*part["triggers"], *part.get("excludes", ())]})
        return self._repeated(one_of(pieces), part, tail)

    def _token_triggered(self, part: Part) -> str:
        triggers = [self._token_id(token) for token in part["trigger_tokens"]]
        text = self._tokens_but({"type": "any_tokens", "exclude_tokens": [*triggers, *part.get("exclude_tokens", ())]})
        tags = one_of(map(self._tag, part["tags"]))
        return self._repeated(f"{text} ({tags})", part, text)

    def _repeated(self, piece: str, part: Part, tail: str) -> str:
        least = "+" if part.get("at_least_one") else "*"
        if part.get("stop_after_first"):
            return self._rules.add(f"({piece})" if part.get("at_least_one") else f"({piece}) | {tail}")
        return self._rules.add(f"({piece}){least} {tail}")

    def _separated(self, part: Part) -> str:
        tag = self._rules.add(one_of(map(self._tag, part["tags"])))
        more = "" if part.get("stop_after_first") else f" ({literal(part['separator'])} {tag})*"
        return self._rules.add(f"{tag}{more}" if part.get("at_least_one") else f"({tag}{more})?")

    def _dispatch(self, part: Part) -> str:
        patterns, excludes = [pattern for pattern, _ in part["rules"]], part.get("excludes", ())
        pieces = []
        for pattern, of in part["rules"]:
            others = [other for other in patterns if other != pattern]
            pieces.append(f"{self._text_until([pattern], [*excludes, *others])} {self._part(of)}")
        tail = self._any_text({"excludes": [*patterns, *excludes]})
        return self._repeated(one_of(pieces), {"stop_after_first": not part.get("loop", True)}, tail)

    def _times(self, part: Part) -> str:
        inner = self._part(part["content"])
        if part["type"] == "repeat":
            least, most = int(part["min"]), int(part["max"])
            return self._rules.add(f"({inner}){{{least},{'' if most == -1 else most}}}" if most else '""')
        return self._rules.add(f"({inner})" + {"optional": "?", "plus": "+", "star": "*"}[part["type"]])

    def _either(self, part: Part) -> str:
        return self._rules.add(one_of(map(self._part, part["elements"])))


_WRITERS: dict[str, Callable[[TagRules, Part], str]] = {
    "const_string": lambda tags, part: literal(part["value"]),
    "json_schema": TagRules._schema,
    "regex": lambda tags, part: tags._rules.terminal(slashed(without_anchors(part["pattern"]))),
    "grammar": lambda tags, part: gbnf_rules(tags._rules, part["grammar"]),
    "any_text": TagRules._any_text,
    "sequence": TagRules._sequence,
    "or": TagRules._either,
    "tag": TagRules._tag,
    "triggered_tags": TagRules._triggered,
    "tags_with_separator": TagRules._separated,
    "token_triggered_tags": TagRules._token_triggered,
    "dispatch": TagRules._dispatch,
    "token": TagRules._token,
    "exclude_token": TagRules._tokens_but,
    "any_tokens": TagRules._tokens_but,
    **dict.fromkeys(("optional", "plus", "star", "repeat"), TagRules._times),
}


def _text(excludes: Sequence[str], max_chars: int | None) -> str:
    """Returns the terminal of the texts without `excludes`."""
    text = _ANY_TEXT if max_chars is None else f"/(?s:.){{0,{int(max_chars)}}}/"
    if not excludes:
        return text
    excluded = "|".join(map(re.escape, excludes))
    return f"{text} & ~{slashed(f'(?s:.*)({excluded})(?s:.*)')}"


def _current_form(tag: Part) -> Part:
    """Returns `tag`; the older form, which has `structures`, becomes the form of today."""
    if "structures" not in tag:
        return tag
    tags = [{**each, "content": _json(each["schema"])} for each in tag["structures"]]
    return {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}


def _check_unlimited(part: Part) -> None:
    if part.get("max_tokens") is not None:
        raise _refusal("max_tokens of a text is not supported: use max_chars")


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar cannot be used: {reason}")


def _boundary(mark: str | Part) -> Part:
    return {"type": "const_string", "value": mark} if isinstance(mark, str) else mark


def _either_of(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}


def _constants(part: Part) -> list[str]:
    """Returns the texts that `part` allows if it lists them; else []."""
    if part.get("type") == "const_string":
        return [part["value"]]
    each = [_constants(option) for option in part["elements"]] if part.get("type") == "or" else []
    return [text for texts in each for text in texts] if all(each) else []


def _json(schema: Part) -> Part:
    return {"type": "json_schema", "json_schema": schema}
