"""No object of an answer has a key twice, however it is spelled."""

from __future__ import annotations

import json

import pytest
import torch

from cluster.constraints import Grammar
from cluster.grammars.matcher import CompiledGrammar
from cluster.grammars.unique_keys import QuotingTokens, UniqueKeys

from .test_compiler import END, TOKENIZER, accepts, run

OPEN = Grammar("json_schema", "{}")
WITH_A = Grammar("json_schema", '{"type":"object","properties":{"a":{}},"additionalProperties":{}}')
REGEX = Grammar("regex", ".*")


@pytest.fixture(scope="module")
def compiled() -> dict[Grammar, CompiledGrammar]:
    grammars = (OPEN, WITH_A, REGEX)
    return {
        form: found for form, found in zip(grammars, run(*grammars), strict=True) if isinstance(found, CompiledGrammar)
    }


class Anything:
    """A matcher that allows every token."""

    error = None

    def accept_token(self, token_id: int, /) -> bool:
        return True

    def rollback(self, num_tokens: int, /) -> None: ...

    def is_terminated(self) -> bool:
        return False

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> bool:
        return False

    def likely_token_ids(self, most: int, /) -> list[int]:
        return []


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": 1, "b": 1, "\\u0061": 2}',
        '{"x": [{"a": {}, "a": 1}]}',
        '[{"": 1, "": 2}]',
        '{"é": 1, "\\u00e9": 2}',
        '{"\\"": 1, "\\u0022": 2}',
    ],
)
def test_a_key_comes_once(compiled: dict[Grammar, CompiledGrammar], text: str) -> None:
    assert not accepts(compiled[OPEN], text)
    assert not accepts(compiled[WITH_A], text)


@pytest.mark.parametrize(
    "text",
    ['{"a": {"a": 1}, "b": [{"a": 1}, {"a": "a"}]}', '{"a": "a", "ab": ["a", "a"], "b": "\\"a\\":"}', '["a", "a"]'],
)
def test_the_same_key_in_different_objects_is_allowed(compiled: dict[Grammar, CompiledGrammar], text: str) -> None:
    assert accepts(compiled[OPEN], text)


def test_other_forms_are_not_limited(compiled: dict[Grammar, CompiledGrammar]) -> None:
    assert accepts(compiled[REGEX], '{"a": 1, "a": 2}')


def test_the_mask_and_what_is_accepted_agree() -> None:
    spelled = [
        b"{",
        b'"',
        b"a",
        b'a"',
        b'"a"',
        b'"a":',
        b":",
        b"1",
        b",",
        b',"',
        b'\\u0061"',
        b"}",
        b'ab"',
        b"\\",
        b'u0061"',
    ]
    tokens = QuotingTokens(spelled)
    for texts in (('{"a":1,', "b"), ('{"a":1,"', "ab"), ('{"a":1,"a', "b"), ('{"a":1,"\\', "x"), ('{"ab":1,"a', "c")):
        matcher = UniqueKeys(Anything(), tokens)
        text = texts[0].encode()
        while text:  # the longest token first
            token = max((t for t in range(len(spelled)) if text.startswith(spelled[t])), key=lambda t: len(spelled[t]))
            assert matcher.accept_token(token)
            text = text[len(spelled[token]) :]
        mask = torch.full((1, 1), -1, dtype=torch.int32)
        matcher.fill_next_token_bitmask(mask, 0)
        for token in range(len(spelled)):
            is_accepted = matcher.accept_token(token)
            assert is_accepted == bool(int(mask[0, 0]) >> token & 1), (texts, spelled[token])
            if is_accepted:
                matcher.rollback(1)


def test_a_key_may_come_again_after_it_was_rolled_back(compiled: dict[Grammar, CompiledGrammar]) -> None:
    matcher = compiled[OPEN].new_matcher()
    beginning, again = (TOKENIZER.encode(text, add_special_tokens=False) for text in ('{"b": 1', ', "a": 1'))
    tokens = beginning + again
    assert all(map(matcher.accept_token, tokens))
    matcher.rollback(len(again))
    assert all(map(matcher.accept_token, again))
    assert matcher.accept_token(TOKENIZER.encode("}", add_special_tokens=False)[0])
    assert matcher.accept_token(END)
    assert json.loads(TOKENIZER.decode(tokens) + "}") == {"b": 1, "a": 1}
