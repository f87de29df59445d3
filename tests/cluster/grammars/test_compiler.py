"""Grammars are compiled in a process of their own, each once, and in bounded time and memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from cluster.config import Config
from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError, OutriderError, OverloadedError
from cluster.grammars import compiler as compiling
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
    (Grammar("regex", "(unclosed"), "parenthesis"),
    (Grammar("ebnf", "rot ::= 1"), "cannot be used"),
    (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
    (Grammar("structural_tag", "{}"), "cannot be used"),
    (Grammar("regex", "((((a*)*)*)*)*b"), "ambiguous"),
    (Grammar("json_schema", json.dumps({"enum": [f"value {i}" * 20 for i in range(3000)]})), "grammar"),
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


def test_nothing_is_guessed_inside_a_character(compiled: dict[Grammar, CompiledGrammar | OutriderError]) -> None:
    grammar = compiled[OF_SEVERAL_BYTES]
    assert isinstance(grammar, CompiledGrammar)
    matcher = grammar.new_matcher()
    tokens = TOKENIZER.encode("世", add_special_tokens=False)
    assert len(tokens) > 1
    for token in tokens:
        assert list(matcher.likely_token_ids(9)) == []
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


def test_a_deep_schema_ends_nobody_elses_process() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(450):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    deep, following = run(Grammar("json_schema", json.dumps(schema)), Grammar("regex", "a+"))
    assert isinstance(deep, CompiledGrammar | InvalidRequestError)
    assert accepts(following, "a")


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_COMPILE_SECONDS", 0.2)
    grammar = Grammar("json_schema", json.dumps({"enum": [f"{i}" * 10 for i in range(20_000)]}))
    started = 0
    start = GrammarCompiler._started

    async def count(compiler: GrammarCompiler) -> Any:
        nonlocal started
        started += 1
        return await start(compiler)

    monkeypatch.setattr(GrammarCompiler, "_started", count)
    slow, again, following = run(grammar, grammar, Grammar("regex", "a+"))
    assert isinstance(again, InvalidRequestError)
    assert started == 2, "what was refused is not compiled again"
    assert isinstance(slow, InvalidRequestError)
    assert "longer than" in slow.message
    assert isinstance(following, CompiledGrammar | InvalidRequestError)


def test_one_whose_answer_is_not_read_to_its_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    read, num_answers = compiling._read, 0

    async def read_two(process: asyncio.subprocess.Process) -> bytes:
        nonlocal num_answers
        num_answers += 1
        if num_answers == 3:  # after the vocabulary and the large one's header comes what is large
            await asyncio.sleep(60)
        return await read(process)

    monkeypatch.setattr(compiling, "_WAIT_SECONDS", 3.0)
    monkeypatch.setattr(compiling, "_read", read_two)
    properties = {f"p{i}": {"type": "string"} for i in range(100)}
    large, following = run(Grammar("json_schema", json.dumps({"properties": properties})), Grammar("regex", "a+"))
    assert isinstance(large, OverloadedError)
    assert accepts(following, "a")


WithCompiler = Callable[[Callable[[GrammarCompiler], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def with_compiler(loop: BackgroundLoop) -> Iterator[WithCompiler]:
    """with_compiler(use) runs `use(compiler)`. The tests share one started compiler. It caches grammars, so each test
    compiles grammars of its own."""
    compiler = GrammarCompiler(FOLDER, TOKENIZER.vocab_size, [END])
    loop.run(compiler.compile(Grammar("regex", "warm")))
    yield lambda use: loop.run(use(compiler))
    loop.run(compiler.close())


def test_each_is_compiled_once(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        first, second = [await compiler.compile(Grammar("regex", "once")) for _ in range(2)]
        assert first is second

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
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert accepts(await compiler.compile(Grammar("regex", "b")), "b")

    with_compiler(use)


def test_who_leaves_while_a_grammar_compiles_costs_the_others_nothing(with_compiler: WithCompiler) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        slow = Grammar("json_schema", json.dumps({"enum": [f"{i}" * 10 for i in range(2_000)]}))
        leaving = [asyncio.create_task(compiler.compile(slow)) for _ in range(3)]
        waiting = asyncio.create_task(compiler.compile(Grammar("regex", "x+")))
        staying = asyncio.create_task(compiler.compile(Grammar("regex", "y+")))
        process = compiler._process
        await asyncio.sleep(0.01)
        for job in (*leaving, waiting):
            job.cancel()
        await asyncio.gather(*leaving, waiting, return_exceptions=True)
        assert accepts(await compiler.compile(Grammar("regex", "x+")), "xx")  # which was cancelled a moment ago
        assert accepts(await staying, "yy")
        assert compiler._process is process, "it was not started anew"

    with_compiler(use)


def test_a_large_grammar_does_not_hold_up_the_event_loop(
    with_compiler: WithCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns = 0
    turns_while_reading = []

    async def use(compiler: GrammarCompiler) -> None:
        nonlocal num_turns
        await compiler.compile(Grammar("regex", "a"))  # now it has imported what reads
        read = compiler._matching.read_compiled

        def counted(*arguments: Any) -> Any:
            before = num_turns
            compiled = read(*arguments)
            turns_while_reading.append(num_turns - before)
            return compiled

        monkeypatch.setattr(compiler._matching, "read_compiled", counted)
        properties = {f"p{i}": {"type": "string"} for i in range(80)}  # megabytes as it is written
        job = asyncio.create_task(compiler.compile(Grammar("json_schema", json.dumps({"properties": properties}))))
        while not job.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert len((await job).written) > 3_000_000
        assert turns_while_reading[0] > 2, turns_while_reading  # in the loop's own thread it would be none

    with_compiler(use)
