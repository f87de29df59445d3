"""Writes the rules of structural tags: formats that vLLM and xgrammar define."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.grammars.gbnf import gbnf_part
from cluster.grammars.json_rules import JsonRules
from cluster.grammars.rules import Part, Rules, invalid_grammar, literal, one_of, repeated, slashed, without_anchors
from cluster.grammars.vocabulary import Vocabulary

Tag = Mapping[str, Any]  # a format as a client writes it

_ANY_TEXT = "/(?s:.*)/"


class TagRules:
    """Adds the rules of a structural tag to `rules`."""

    def __init__(self, rules: Rules, vocabulary: Vocabulary) -> None:
        self._rules = rules
        self._vocabulary = vocabulary

    def write(self, tag: Tag) -> Part:
        """Returns the start. Raises InvalidRequestError, or an error for a missing or wrong field."""
        return self._part(_current_form(tag)["format"])

    def _part(self, tag: Tag) -> Part:
        kind = str(tag.get("type"))
        if kind not in _WRITERS:
            raise invalid_grammar(f"a structural tag has the unknown type {kind[:64]!r}")
        return _WRITERS[kind](self, tag)

    def _schema(self, tag: Tag) -> Part:
        for field in ("any_order", "excludes", "max_whitespace_cnt"):
            if tag.get(field) not in (None, False, []):
                raise invalid_grammar(f"{field} of json_schema is not supported")
        if tag.get("style", "json") != "json":
            raise invalid_grammar("json_schema has only the style json here")
        return JsonRules(self._rules, tag["json_schema"]).write()

    def _sequence(self, tag: Tag) -> Part:
        return self._in_order(tag["elements"])

    def _tag(self, tag: Tag) -> Part:
        ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        return self._in_order([_boundary(tag["begin"]), tag["content"], _either_of([_boundary(end) for end in ends])])

    def _in_order(self, tags: Sequence[Tag]) -> Part:
        """Returns `tags` one after another. A text before a constant ends at its first occurrence."""
        parts: list[Part] = []
        rest, is_open = list(tags), False
        while rest:
            tag = rest.pop(0)
            ends = _constants(rest[0]) if rest and tag.get("type") == "any_text" else []
            if ends and all(ends):
                _check_unlimited(tag)
                rest.pop(0)
                others = [text for text in tag.get("excludes", ()) if text not in ends]
                part = Part(self._text_until(ends, others, tag.get("max_chars")), is_expression=False)
            else:
                part = self._part(tag)
            if is_open and not part.is_expression:
                raise invalid_grammar("any_text needs a const_string, a regex or the end after it")
            is_open = part.is_expression and tag.get("type") == "any_text"
            parts.append(part)
        return self._rules.sequence(parts)

    def _text_until(self, ends: Sequence[str], excludes: Sequence[str], max_chars: int | None = None) -> str:
        text = self._rules.terminal(f"({_text(excludes, max_chars)}) ({one_of(map(literal, ends))})")
        return self._rules.add(text, attributes="[lazy]")

    def _any_text(self, tag: Tag) -> Part:
        _check_unlimited(tag)
        return Part(f"({_text(tag.get('excludes', ()), tag.get('max_chars'))})")

    def _token(self, tag: Tag) -> Part:
        return Part(f"<[{self._token_id(tag['token'])}]>", is_expression=False)

    def _tokens_but(self, tag: Tag) -> Part:
        _check_unlimited(tag)
        excluded = {*map(self._token_id, tag.get("exclude_tokens", ())), *self._vocabulary.end_token_ids}
        token = f"<[^{','.join(map(str, sorted(excluded)))}]>" if excluded else "<[*]>"
        return Part(f"{token}*" if tag["type"] == "any_tokens" else token, is_expression=False)

    def _token_id(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        token_ids = self._vocabulary.tokenizer.tokenize_str(token, parse_special=True)
        if len(token_ids) != 1:
            raise invalid_grammar(f"{token[:64]!r} is not a token of the model")
        return token_ids[0]

    def _triggered(self, tag: Tag) -> Part:
        """Returns any text, and a tag after each trigger, with which the tag begins."""
        triggers = tag["triggers"]
        cases: list[tuple[str, Part]] = []
        for trigger in triggers:
            own = [each for each in tag["tags"] if str(each["begin"]).startswith(trigger)]
            rests = [self._tag({**each, "begin": each["begin"][len(trigger) :]}) for each in own]
            if rests:
                cases.append((trigger, self._rules.alternatives(rests)))
        for each in tag["tags"]:
            if not any(str(each["begin"]).startswith(trigger) for trigger in triggers):
                raise invalid_grammar(f"no trigger begins the tag {str(each['begin'])[:64]!r}")
        return self._after_texts(cases, triggers, tag, is_single=bool(tag.get("stop_after_first")))

    def _dispatch(self, tag: Tag) -> Part:
        cases = [(pattern, self._part(following)) for pattern, following in tag["rules"]]
        patterns = [pattern for pattern, _ in cases]
        return self._after_texts(cases, patterns, tag, is_single=not tag.get("loop", True))

    def _after_texts(
        self, cases: Sequence[tuple[str, Part]], triggers: Sequence[str], tag: Tag, *, is_single: bool
    ) -> Part:
        """Returns any text in which the part of a case follows its trigger."""
        excludes = tag.get("excludes", ())
        pieces = [
            f"{self._text_until([trigger], [*excludes, *(other for other in triggers if other != trigger)])} "
            f"{self._rules.reference(following)}"
            for trigger, following in cases
        ]
        tail = self._rules.reference(self._any_text({"excludes": [*triggers, *excludes]}))
        return self._several(one_of(pieces), tail, is_single=is_single, is_needed=bool(tag.get("at_least_one")))

    def _token_triggered(self, tag: Tag) -> Part:
        excluded = [*tag["trigger_tokens"], *tag.get("exclude_tokens", ())]
        text = self._tokens_but({"type": "any_tokens", "exclude_tokens": excluded}).body
        tags = self._rules.reference(self._rules.alternatives(list(map(self._tag, tag["tags"]))))
        is_single, is_needed = bool(tag.get("stop_after_first")), bool(tag.get("at_least_one"))
        return self._several(f"{text} {tags}", text, is_single=is_single, is_needed=is_needed)

    def _several(self, piece: str, tail: str, *, is_single: bool, is_needed: bool) -> Part:
        if not piece:
            raise invalid_grammar("a structural tag has no tags")
        if is_single:
            return Part(self._rules.add(piece if is_needed else f"({piece}) | {tail}"), is_expression=False)
        return Part(self._rules.add(f"({piece}){'+' if is_needed else '*'} {tail}"), is_expression=False)

    def _separated(self, tag: Tag) -> Part:
        one = self._rules.alternatives(list(map(self._tag, tag["tags"])))
        each = one
        if not tag.get("stop_after_first"):
            more = repeated(self._rules.sequence([Part(literal(tag["separator"])), one]), "*")
            each = self._rules.sequence([one, more])
        return each if tag.get("at_least_one") else repeated(each, "?")

    def _repetition(self, tag: Tag) -> Part:
        inner = self._part(tag["content"])
        if tag["type"] != "repeat":
            return repeated(inner, {"optional": "?", "plus": "+", "star": "*"}[tag["type"]])
        least, most = int(tag["min"]), int(tag["max"])
        if least < 0 or most < -1 or -1 < most < least:
            raise invalid_grammar(f"nothing can repeat {least} to {most} times")
        return repeated(inner, f"{{{least},{'' if most == -1 else most}}}") if most else Part('""')

    def _either(self, tag: Tag) -> Part:
        if not tag["elements"]:
            raise invalid_grammar("or has no elements")
        return self._rules.alternatives(list(map(self._part, tag["elements"])))


_WRITERS: dict[str, Callable[[TagRules, Tag], Part]] = {
    "const_string": lambda tags, tag: Part(literal(tag["value"])),
    "json_schema": TagRules._schema,
    "regex": lambda tags, tag: tags._rules.expression(without_anchors(tag["pattern"])),
    "grammar": lambda tags, tag: gbnf_part(tags._rules, tag["grammar"]),
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
    **dict.fromkeys(("optional", "plus", "star", "repeat"), TagRules._repetition),
}


def _text(excludes: Sequence[str], max_chars: int | None) -> str:
    """Returns the expression of the texts without `excludes`."""
    text = _ANY_TEXT if max_chars is None else f"/(?s:.){{0,{int(max_chars)}}}/"
    if not excludes:
        return text
    excluded = "|".join(map(re.escape, excludes))
    return f"{text} & ~{slashed(f'(?s:.*)({excluded})(?s:.*)')}"


def _current_form(tag: Tag) -> Tag:
    """Returns `tag`; the older form, which has `structures`, becomes the form of today."""
    if "structures" not in tag:
        return tag
    tags = [{**each, "content": {"type": "json_schema", "json_schema": each["schema"]}} for each in tag["structures"]]
    return {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}


def _check_unlimited(tag: Tag) -> None:
    if tag.get("max_tokens") is not None:
        raise invalid_grammar("max_tokens of a text is not supported: use max_chars")


def _boundary(mark: str | Tag) -> Tag:
    return {"type": "const_string", "value": mark} if isinstance(mark, str) else mark


def _either_of(tags: Sequence[Tag]) -> Tag:
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}


def _constants(tag: Tag) -> list[str]:
    """Returns the texts that `tag` allows if it lists them; else []."""
    if tag.get("type") == "const_string":
        return [tag["value"]]
    each = [_constants(option) for option in tag["elements"]] if tag.get("type") == "or" else []
    return [text for texts in each for text in texts] if all(each) else []
