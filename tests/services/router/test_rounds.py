"""A client that asks learns which step added which token, and which tokens were accepted drafts."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.wire.replies import RoundCounts
from services.router.output.accepted_drafts import answer_rounds

# The scripted target says of every step that it verified four drafts and accepted three, or as many as it has tokens.
FOX = "the quick brown fox jumps"


def steps(rounds: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(one["num_draft_tokens"], one["num_accepted_tokens"], len(one["tokens"])) for one in rounds]


def text_of(rounds: list[dict[str, Any]]) -> str:
    return "".join(text for one in rounds for text in one["tokens"])


@pytest.mark.parametrize(
    ("texts", "rounds", "expected"),
    [
        ("abcd", [RoundCounts(4, 3)], [(4, 3, "abcd")]),
        ("abcdef", [RoundCounts(4, 1), RoundCounts(2, 2, 3)], [(4, 1, "ab"), (0, 0, "c"), (2, 2, "def")]),
        ("abc", [RoundCounts(3, 0, 2)], [(0, 0, "a"), (0, 0, "b"), (3, 0, "c")]),
        ("ab", [RoundCounts(4, 3)], [(4, 2, "ab")]),  # a stop string, or the end of the sequence among the drafts
        ("a", [RoundCounts(4, 0), RoundCounts(4, 2, 1)], [(4, 0, "a")]),
        ("ab", [], [(0, 0, "a"), (0, 0, "b")]),
        ("", [], []),
    ],
)
def test_tokens_are_told_by_the_step_that_added_them(texts, rounds, expected):
    found = answer_rounds(list(texts), rounds)
    assert [(one.num_draft_tokens, one.num_accepted_tokens, "".join(one.texts)) for one in found] == expected


@pytest.mark.parametrize("tokens_per_reply", [1, 4, 7])
def test_a_completion_has_them_when_asked(target, router, tokenizer, tokens_per_reply):
    target.tokens_per_reply = tokens_per_reply
    prompt = tokenizer.encode(FOX)
    fields = {"prompt": prompt, "max_tokens": len(prompt), "seed": 1}
    (choice,) = router.complete(**fields, return_rounds=True).json()["choices"]
    assert text_of(choice["rounds"]) == choice["text"] == FOX
    told = min(tokens_per_reply, len(prompt))
    assert steps(choice["rounds"])[0] == (4, min(3, told), min(4, told))
    streamed = [event["choices"][0] for event in router.stream(**fields, return_rounds=True)[:-1]]
    assert [one for chunk in streamed for one in chunk["rounds"]] == choice["rounds"]
    for chunk in streamed:
        assert text_of(chunk["rounds"]) == chunk["text"]
    assert "rounds" not in router.complete(**fields).json()["choices"][0]


def test_a_chat_has_them_when_asked(target, router):
    target.tokens_per_reply = 4
    fields = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 12, "return_rounds": True}
    (choice,) = router.chat(**fields).json()["choices"]
    assert text_of(choice["rounds"]) == choice["message"]["content"]
    assert steps(choice["rounds"]) == [(4, 3, 4)] * 3
    streamed = [event["choices"][0] for event in router.stream_chat(**fields)[:-1]]
    assert [one for chunk in streamed for one in chunk["rounds"]] == choice["rounds"]


def test_a_token_that_ends_inside_a_character_has_no_text_of_its_own(target, router, tokenizer):
    prompt = tokenizer.encode("a🦊b")  # four bytes, a token each
    fields = {"prompt": prompt, "max_tokens": len(prompt), "return_rounds": True}
    streamed = [event["choices"][0] for event in router.stream(**fields)[:-1]]
    told = [text for chunk in streamed for one in chunk["rounds"] for text in one["tokens"]]
    assert told == ["a", "", "", "", "🦊", "b"]


def test_a_character_that_stays_incomplete_is_told_with_the_last_token(target, router, tokenizer):
    prompt = tokenizer.encode("a🦊")[:3]
    (choice,) = router.complete(prompt=prompt, max_tokens=3, return_rounds=True).json()["choices"]
    assert choice["text"] == text_of(choice["rounds"])
    assert choice["text"].endswith("�")


def test_tokens_after_a_stop_string_are_not_told(target, router, tokenizer):
    target.tokens_per_reply = 4
    prompt = tokenizer.encode("abcdefgh")
    fields = {"prompt": prompt, "max_tokens": len(prompt), "stop": ["f"], "return_rounds": True}
    (choice,) = router.complete(**fields).json()["choices"]
    assert choice["text"] == "abcde"
    assert [one["tokens"] for one in choice["rounds"]] == [["a", "b", "c", "d"], ["e", "f"]]
    assert steps(choice["rounds"])[-1] == (4, 2, 2)


def test_the_token_that_ends_an_answer_is_told_without_text(target, router):
    target.scripts = [[70, 71]]
    (choice,) = router.complete(prompt=[70], max_tokens=5, return_rounds=True).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert [text for one in choice["rounds"] for text in one["tokens"]] == [*choice["text"], ""]
