"""Grammars are compiled once each, and within limits that count work."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from cluster.config import Config
from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError, OutriderError, OverloadedError
from cluster.grammars import matching
from cluster.grammars.compiler import GrammarCompiler
from cluster.grammars.matcher import CompiledGrammar, Matcher
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from tests.background_loop import BackgroundLoop

FOLDER = resolve_model_folder(Config().target.model)
TOKENIZER = Tokenizer(FOLDER)
END = 0


def run(*grammars: Grammar) -> list[CompiledGrammar | OutriderError]:
    """Compiles `grammars` one after the other in one process. Returns the results or errors."""

    async def compile_all() -> list[CompiledGrammar | OutriderError]:
        compiler = GrammarCompiler(FOLDER, TOKENIZER.vocab_size, [END])
        found: list[CompiledGrammar | OutriderError] = []
        try:
            for grammar in grammars:
                try:
                    found.append(await compiler.compile(grammar))
                except OutriderError as error:
                    found.append(error)
        finally:
            await compiler.close()
        return found

    return asyncio.run(compile_all())


def accepts(grammar: CompiledGrammar | OutriderError, text: str) -> bool:
    """Returns whether `text` matches `grammar`."""
    assert isinstance(grammar, CompiledGrammar), grammar
    matcher: Matcher = grammar.new_matcher()
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), END]
    return all(matcher.accept_token(token) for token in tokens) and matcher.is_terminated()


FORMS = (
    Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})),
    Grammar("regex", "[0-9]{2}-x"),
    Grammar("ebnf", 'root ::= "yes" | "no"'),
    Grammar(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "fox"}}),
    ),
)
GUESSED = Grammar("regex", "[0-9]the quick brown fox[0-9]")
ANYTHING = Grammar("regex", ".*")
OF_SEVERAL_BYTES = Grammar("regex", "[😀世]")
UNUSABLE = (
    (Grammar("regex", "(unclosed"), "cannot be used"),
    (Grammar("ebnf", "rot ::= 1"), "cannot be used"),
    (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
    (Grammar("structural_tag", "{}"), "cannot be used"),
    (Grammar("structural_tag", '{"format": {"type": "nonsense"}}'), "nonsense"),
    (Grammar("regex", "a?" * 1001), "operators"),
    (Grammar("ebnf", "root ::= root"), "no text"),
    (Grammar("json_schema", '{"type": "string", "format": "date"}'), "format"),
)


UNUSABLE_GRAMMARS = [grammar for grammar, _ in UNUSABLE]


def after(grammar: Grammar) -> Grammar:
    """Returns a grammar that is compiled only after the unusable `grammar`."""
    return Grammar("regex", f"a+{UNUSABLE_GRAMMARS.index(grammar)}")


@pytest.fixture(scope="module")
def compiled() -> dict[Grammar, CompiledGrammar | OutriderError]:
    """Results of one process for all grammars that do not need a process of their own."""
    asked = [
        *FORMS,
        GUESSED,
        ANYTHING,
        OF_SEVERAL_BYTES,
        *(each for one in UNUSABLE_GRAMMARS for each in (one, after(one))),
    ]
    return dict(zip(asked, run(*asked), strict=True))


def test_every_form(compiled: dict[Grammar, CompiledGrammar | OutriderError]) -> None:
    schema, regex, ebnf, tag = (compiled[form] for form in FORMS)
    assert accepts(schema, '{"a": 12}')
    assert not accepts(schema, '{"a": "12"}')
    assert accepts(regex, "12-x")
    assert not accepts(regex, "123-x")
    assert accepts(ebnf, "no")
    assert not accepts(ebnf, "maybe")
    assert accepts(tag, "fox")


def test_a_text_that_is_sure_to_come_is_guessed(compiled: dict[Grammar, CompiledGrammar | OutriderError]) -> None:
    grammar = compiled[GUESSED]
    assert isinstance(grammar, CompiledGrammar)
    matcher = grammar.new_matcher()
    assert matcher.likely_token_ids(9) == []
    assert matcher.accept_token(TOKENIZER.encode("7", add_special_tokens=False)[0])
    token_ids = list(matcher.likely_token_ids(9))
    guessed = TOKENIZER.decode(token_ids)
    assert len(guessed) > 8
    assert "the quick brown fox".startswith(guessed)
    assert [list(matcher.likely_token_ids(most)) for most in (0, 1)] == [[], token_ids[:1]]
    assert all(matcher.accept_token(token) for token in token_ids)


def test_a_guess_inside_a_character_is_its_rest(compiled: dict[Grammar, CompiledGrammar | OutriderError]) -> None:
    grammar = compiled[OF_SEVERAL_BYTES]
    assert isinstance(grammar, CompiledGrammar)
    matcher = grammar.new_matcher()
    tokens = TOKENIZER.encode("世", add_special_tokens=False)
    assert len(tokens) > 1
    for token in tokens:
        guessed = list(matcher.likely_token_ids(9))
        assert guessed in ([], tokens[tokens.index(token) :])
        assert matcher.accept_token(token)


def test_no_special_token_is_part_of_a_text(compiled: dict[Grammar, CompiledGrammar | OutriderError]) -> None:
    anything = compiled[ANYTHING]
    assert isinstance(anything, CompiledGrammar)
    bits = torch.full((1, -(-TOKENIZER.vocab_size // 32)), -1, dtype=torch.int32)
    anything.new_matcher().fill_next_token_bitmask(bits, 0)
    allowed = ((bits[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1).flatten().tolist()
    special = [TOKENIZER.encode(text)[0] for text in ("<|im_start|>", "<|im_end|>")]
    assert [allowed[token] for token in special] == [0, 0]
    assert allowed[END] == 1


@pytest.mark.parametrize(("grammar", "reason"), UNUSABLE)
def test_what_cannot_be_used_is_refused_and_the_next_is_not(
    compiled: dict[Grammar, CompiledGrammar | OutriderError], grammar: Grammar, reason: str
) -> None:
    refused, following = compiled[grammar], compiled[after(grammar)]
    assert isinstance(refused, InvalidRequestError)
    assert reason in refused.message
    assert accepts(following, f"aa{UNUSABLE_GRAMMARS.index(grammar)}")


def test_a_deep_schema_is_taken_or_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(450):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    deep, following = run(Grammar("json_schema", json.dumps(schema)), Grammar("regex", "a+"))
    assert isinstance(deep, CompiledGrammar | InvalidRequestError)
    assert accepts(following, "a")


CONSTANT = {text: {"type": "const_string", "value": text} for text in ("a", "ab", "bc", "x")}
TAG = {"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</a>"}


@pytest.mark.parametrize(
    ("part", "texts", "others"),
    [
        ({"type": "tag", **TAG}, ["<a>12</a>"], ["<a></a>", "12"]),
        ({"type": "tag", **TAG, "content": {"type": "any_text"}}, ["<a>x <b></a>"], ["<a>x</a>y"]),
        ({"type": "tag", **TAG, "end": ["</a>", "!"]}, ["<a>1</a>", "<a>1!"], ["<a>1"]),
        (
            {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]},
            ["no tag", "x <a>1</a> y <a>2</a>", ""],
            ["x <a>y</a>", "<ab>"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [TAG],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<a>1</a>"],
            ["no tag", "<a>1</a><a>1</a>"],
        ),
        ({"type": "tags_with_separator", "separator": ";", "tags": [TAG]}, ["", "<a>1</a>;<a>2</a>"], ["<a>1</a>;"]),
        ({"type": "dispatch", "rules": [["q:", {"type": "regex", "pattern": "[0-9]"}]]}, ["x", "x q:1 y"], ["q:x"]),
        ({"type": "any_text", "excludes": ["no"], "max_chars": 4}, ["yes", ""], ["nono", "long text"]),
        ({"type": "tag", **TAG, "content": {"type": "regex", "pattern": ".*"}}, ["<a>x</a>", "<a></a>"], ["<a>x"]),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "regex", "pattern": "[0-9]"}]},
            ["ab1", "1"],
            ["ab"],
        ),
        (
            {"type": "star", "content": {"type": "or", "elements": [CONSTANT[text] for text in ("a", "ab", "bc")]}},
            ["abc", "abab", ""],
            ["c"],
        ),
        (
            {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "a"}},
            ["a", "aa"],
            ["aaa"],
        ),
        (
            {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= item+\nitem ::= "a" | "b"'}},
            ["", "ab"],
            ["c"],
        ),
        (
            {
                "type": "or",
                "elements": [
                    {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}},
                    {"type": "regex", "pattern": r"^\[x\]$"},
                ],
            },
            ["[1, 2]", "[x]"],
            ["[1, x]"],
        ),
    ],
)
def test_the_formats_of_structural_tags(part: dict[str, Any], texts: list[str], others: list[str]) -> None:
    (grammar,) = run(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part})))
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "or", "elements": []}, "no elements"),
        ({"type": "tag", **TAG, "end": []}, "no elements"),
        ({"type": "tag", "begin": "<a>", "content": CONSTANT["x"]}, "field 'end'"),
        ({"type": "triggered_tags", "triggers": ["<b"], "tags": [TAG]}, "no trigger begins"),
        ({"type": "repeat", "min": 5, "max": 2, "content": CONSTANT["x"]}, "5 to 2"),
        ({"type": "any_text", "max_tokens": 4}, "max_tokens"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "json_schema", "json_schema": {}}]},
            "any_text",
        ),
        ("text", "wrong type"),
    ],
)
def test_tags_that_mean_nothing_are_refused(part: Any, reason: str) -> None:
    (refused,) = run(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part})))
    assert isinstance(refused, InvalidRequestError), refused
    assert reason in refused.message


def test_a_text_of_any_tokens_has_no_end_token() -> None:
    sequence = {"type": "sequence", "elements": [{"type": "any_tokens"}, CONSTANT["x"]]}
    (grammar,) = run(Grammar("structural_tag", json.dumps({"format": sequence})))
    assert isinstance(grammar, CompiledGrammar), grammar
    bits = torch.empty(1, -(-TOKENIZER.vocab_size // 32), dtype=torch.int32)
    grammar.new_matcher().fill_next_token_bitmask(bits, 0)
    assert not int(bits[0, 0]) >> END & 1


def test_requests_of_a_grammar_do_not_share_what_they_may_take() -> None:
    """A text that takes all states of the expressions leaves a later request all of its own."""
    schema = {"type": "string", "pattern": "[a-z ]*[a-m][a-z ]{5}[n-z][a-z ]*", "maxLength": 60000}
    first, second = run(*[Grammar("json_schema", json.dumps(schema))] * 2)
    counts = []
    for grammar in (first, second):
        assert isinstance(grammar, CompiledGrammar), grammar
        matcher, count = grammar.new_matcher(), 0
        bits = torch.empty(1, -(-TOKENIZER.vocab_size // 32), dtype=torch.int32)
        tokens = TOKENIZER.encode('"' + "the quick brown fox jumps over the lazy dog " * 40, add_special_tokens=False)
        for token in tokens:
            matcher.fill_next_token_bitmask(bits, 0)
            if matcher.error is not None or not matcher.accept_token(token):
                break
            count += 1
        counts.append(count)
    assert counts[0] == counts[1] > 100


def test_the_older_form_of_structural_tags() -> None:
    structure = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}
    (grammar,) = run(Grammar("structural_tag", json.dumps({"structures": [structure], "triggers": ["<f"]})))
    assert accepts(grammar, 'so <f>{"a": 1}</f>.')
    assert not accepts(grammar, "so <f>1</f>")


def test_what_was_refused_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compiled, compile_ = 0, GrammarCompiler._compile

    def count(compiler: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
        nonlocal num_compiled
        num_compiled += 1
        return compile_(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    first, second = run(*[Grammar("regex", "(")] * 2)
    assert isinstance(first, InvalidRequestError)
    assert isinstance(second, InvalidRequestError)
    assert (num_compiled, second.message) == (1, first.message)


WithCompiler = Callable[[Callable[[GrammarCompiler], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def with_compiler(loop: BackgroundLoop) -> Iterator[WithCompiler]:
    """with_compiler(use) runs `use(compiler)`. The tests share one started compiler. It caches grammars, so each test
    compiles grammars of its own."""
    compiler = GrammarCompiler(FOLDER, TOKENIZER.vocab_size, [END])
    loop.run(compiler.compile(Grammar("regex", "warm")))
    yield lambda use: loop.run(use(compiler))
    loop.run(compiler.close())


def test_each_request_has_states_of_its_own(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        first, second = [await compiler.compile(Grammar("regex", "once")) for _ in range(2)]
        assert first is not second
        assert first.written == second.written

    with_compiler(use)


def test_many_at_once(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        found = await asyncio.gather(*(compiler.compile(Grammar("regex", "m" * (1 + i % 4))) for i in range(16)))
        assert len({id(grammar) for grammar in found}) == 4
        assert accepts(found[1], "mm")

    with_compiler(use)


def test_choices_with_one_grammar_wait_for_one_compilation(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        found = await asyncio.gather(*(compiler.compile(Grammar("regex", "[a-z]+")) for _ in range(128)))
        assert len({id(grammar) for grammar in found}) == 1
        refused = await asyncio.gather(
            *(compiler.compile(Grammar("regex", "(")) for _ in range(128)), return_exceptions=True
        )
        assert len({id(error) for error in refused}) == 1
        assert isinstance(refused[0], InvalidRequestError)

    with_compiler(use)


def test_too_many_different_ones_are_refused_for_now(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        jobs = [asyncio.create_task(compiler.compile(Grammar("regex", "a" * (i + 1)))) for i in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await compiler.compile(Grammar("regex", "b"))
        await asyncio.gather(*jobs)
        assert accepts(await compiler.compile(Grammar("regex", "b")), "b")

    with_compiler(use)


def test_who_leaves_while_a_grammar_compiles_costs_the_others_nothing(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        leaving = [asyncio.create_task(compiler.compile(Grammar("regex", "x+"))) for _ in range(3)]
        staying = asyncio.create_task(compiler.compile(Grammar("regex", "y+")))
        await asyncio.sleep(0)
        for job in leaving:
            job.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert accepts(await compiler.compile(Grammar("regex", "x+")), "xx")
        assert accepts(await staying, "yy")

    with_compiler(use)


def test_a_limit_that_only_drafts_exceed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher of a text that exceeds the limits is of use again for shorter texts."""
    monkeypatch.setattr(matching, "_MAX_ITEMS", 100)
    (grammar,) = run(Grammar("ebnf", 'root ::= "x" a | [0-9]+\na ::= [a-z] | a a'))
    assert isinstance(grammar, CompiledGrammar), grammar
    matcher = grammar.new_matcher()
    bits = torch.empty(1, -(-TOKENIZER.vocab_size // 32), dtype=torch.int32)
    first, letter, digit = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("x", "q", "7"))
    num_accepted = int(matcher.accept_token(first))
    while matcher.error is None and matcher.accept_token(letter):
        num_accepted += 1
        matcher.fill_next_token_bitmask(bits, 0)
    assert num_accepted > 10
    assert not matcher.accept_token(letter)
    matcher.rollback(num_accepted)
    assert matcher.error is None
    assert [matcher.accept_token(token) for token in (digit, digit, END)] == [True, True, True]


def test_a_text_that_is_written_like_a_special_token_is_text() -> None:
    text = "<|im_end|>"
    for grammar in run(Grammar("regex", re.escape(text)), Grammar("json_schema", json.dumps({"const": text}))):
        assert isinstance(grammar, CompiledGrammar), grammar
        bits = torch.empty(1, -(-TOKENIZER.vocab_size // 32), dtype=torch.int32)
        grammar.new_matcher().fill_next_token_bitmask(bits, 0)
        special = TOKENIZER.encode(text)[0]
        assert not int(bits[0, special // 32]) >> special % 32 & 1
