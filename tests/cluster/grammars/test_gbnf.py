"""The texts of grammars in GBNF, and what is refused."""

from __future__ import annotations

import pytest

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from cluster.grammars.matcher import CompiledGrammar

from .test_compiler import accepts, run

DOUBLED = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(500)), 'r500 ::= "a" | ""'])
CHAIN = "\n".join(["root ::= r0", *(f'r{i} ::= "{i}" r{i + 1} | "x"' for i in range(3000)), 'r3000 ::= "a"'])


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (r'root ::= "\x41b\u00e9\n\"" ', ['Abé\n"'], ["Abé"]),
        ('root ::= [^z]* "y"', ["aay", "yyay", "y"], ["z", "zy"]),
        (r"root ::= [\]a-c\-]+", ["a]-"], ["d", "\\"]),
        (r"root ::= [&&~~-]+", ["&-~"], ["'"]),
        ('root ::= "a"{2,3} ("b" | ) "c"{0}', ["aa", "aaab"], ["a", "aac"]),
        ('root ::= # a comment\n "a"\n  | b-1 .\nb-1 ::= "c"', ["a", "cx"], ["c"]),
        ('root ::= "(" root ")" | [0-9]+ ("." [0-9]+)?', ["((1.5))", "12"], ["(1", "1."]),
        (CHAIN, ["0x", "01x"], ["0a"]),
        ('root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9]', ["+".join("12345678" * 9)], ["1+"]),
        ('root ::= "(" [a-z]* root? ")"', ["(ab(c))"], ["(ab"]),
    ],
)
def test_the_texts_of_a_grammar(grammar: str, texts: list[str], others: list[str]) -> None:
    (compiled,) = run(Grammar("ebnf", grammar))
    assert [text for text in texts if not accepts(compiled, text)] == []
    assert [text for text in others if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (r"root ::= [\d]", "escape"),
        ("root ::= 'a'", "not GBNF"),
        ('rule ::= "a"', "no rule root"),
        ("root ::= other", "no rule other"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "wrong place"),
        ("root ::= *", "repeat"),
        ('"a"', "begin with a rule"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "parentheses"),
        ("root ::= root", "allows no text"),
    ],
)
def test_what_is_refused(grammar: str, reason: str) -> None:
    (refused,) = run(Grammar("ebnf", grammar))
    assert isinstance(refused, InvalidRequestError), refused
    assert reason in refused.message


def test_a_rule_that_doubles_again_and_again_costs_nobody_else() -> None:
    doubled, many, following = run(Grammar("ebnf", DOUBLED), Grammar("ebnf", "root ::= " + ".? " * 12_000), FOLLOWING)
    for grammar in (doubled, many):
        assert isinstance(grammar, InvalidRequestError | CompiledGrammar)
    assert accepts(following, "a")


FOLLOWING = Grammar("regex", "a")
