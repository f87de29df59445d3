"""Stop strings: the matching alone, then through real servers."""

from __future__ import annotations

import random

import pytest

from services.router.output.stop import StopMatcher, StopStrings
from tests.waiting import WAIT_S, wait_until


def run(pieces, *strings: str, in_output: bool = False) -> list[str]:
    """Returns the output for each of `pieces`, and that at the end."""
    matcher = StopMatcher(StopStrings(strings, in_output=in_output))
    return [*(matcher.push(piece) for piece in pieces), matcher.flush()]


def cut(text: str, strings, in_output: bool) -> str:
    """Cuts `text` by the definition: at the first end of a stop string, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            return text[:end] if in_output else text[: end - max(map(len, ending))]
    return text


@pytest.mark.parametrize(
    ("pieces", "strings", "expected"),
    [
        (["one. two"], ["."], ["one", ""]),
        (["one", ". ", "two"], ["."], ["one", "", "", ""]),
        (["a", "b", "c", "d"], ["bcd"], ["a", "", "", "", ""]),
        (["a", "b", "c", "x"], ["bcd"], ["a", "", "", "bcx", ""]),
        (["a", "b", "c"], ["bcd"], ["a", "", "", "bc"]),
        (["aa", "ab"], ["aab"], ["", "a", ""]),
        (["abab", "ab", "ac"], ["abac"], ["ab", "ab", "", ""]),
        (["abcd"], ["abcd", "bc"], ["a", ""]),
        (["abc"], ["c", "bc"], ["a", ""]),
        (["🦊", "!?"], ["!?"], ["🦊", "", ""]),
        (["anything"], [], ["anything", ""]),
        (["", "x"], ["x"], ["", "", ""]),
    ],
)
def test_where_a_text_ends_and_what_is_held_back(pieces, strings, expected):
    assert run(pieces, *strings) == expected
    assert "".join(expected) == cut("".join(pieces), strings, in_output=False)


@pytest.mark.parametrize("seed", range(300))
def test_the_pieces_of_a_text_never_matter(seed):
    source = random.Random(seed)
    alphabet = source.choice(["ab", "abc", "a🦊"])

    def word(most: int) -> str:
        return "".join(source.choices(alphabet, k=source.randint(1, most)))

    text = word(60)
    strings = [word(6) for _ in range(source.randint(1, 4))]
    in_output = source.random() < 0.5
    matcher = StopMatcher(StopStrings(strings, in_output=in_output))
    passed_on = ""
    start = 0
    while start < len(text):
        end = start + source.randint(0, 5)
        passed_on += matcher.push(text[start:end])
        start = end
        assert (matcher.stopped_at is not None) == any(string in text[:end] for string in strings)
        if matcher.stopped_at is None and not in_output:
            # Held back is what may be the start of a stop string, and nothing else.
            held = text[len(passed_on) : end]
            assert passed_on + held == text[:end]
            starts = {string[:length] for string in strings for length in range(len(string))}
            longest = max((start for start in starts if text[:end].endswith(start)), key=len)
            assert held == longest
        if matcher.stopped_at is None and in_output:
            assert passed_on == text[:end]
    passed_on += matcher.flush()
    assert passed_on == cut(text, strings, in_output)


PROMPT = "the quick 🦊 jumps over the lazy dog"


@pytest.mark.parametrize("tokens_per_reply", [1, 5, 100])
def test_an_answer_ends_before_a_stop_string(router, target, tokenizer, tokens_per_reply):
    target.tokens_per_reply = tokens_per_reply
    for stop, text in [
        (" over", "the quick 🦊 jumps"),
        ("🦊 j", "the quick "),
        (["no such", "ick"], "the qu"),
        (["the"], ""),
        ("no such", PROMPT),
    ]:
        check_answer_with_stop(router, tokenizer, stop, text)


def check_answer_with_stop(router, tokenizer, stop, text):
    prompt = tokenizer.encode(PROMPT)
    fields = {"prompt": prompt, "max_tokens": len(prompt), "stop": stop, "return_token_ids": True}
    body = router.complete(**fields).json()
    (choice,) = body["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == ("length" if text == PROMPT else "stop")
    # The tokens end with the one that completed the stop string, however many came with it.
    num_tokens = len(choice["token_ids"])
    assert body["usage"]["completion_tokens"] == num_tokens
    if text != PROMPT:
        stops = [stop] if isinstance(stop, str) else stop
        assert any(string in tokenizer.decode(prompt[:num_tokens]) for string in stops)
        assert not any(string in tokenizer.decode(prompt[: num_tokens - 1]) for string in stops)

    events = router.stream(**fields)
    streamed = [event["choices"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in streamed) == text
    assert [token_id for piece in streamed for token_id in piece["token_ids"]] == choice["token_ids"]
    assert [piece["finish_reason"] for piece in streamed if piece["finish_reason"]] == [choice["finish_reason"]]
    assert events[-1] == "[DONE]"


def test_the_stop_string_is_in_the_output_when_asked_for(router):
    fields = {"prompt": PROMPT, "max_tokens": 50, "stop": [" jum"], "include_stop_str_in_output": True}
    assert router.complete(**fields).json()["choices"][0]["text"] == "the quick 🦊 jum"
    events = router.stream(**fields)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "the quick 🦊 jum"


def test_the_generation_is_cancelled_at_a_stop_string(router, target, tokenizer):
    target.hang_after = len(tokenizer.encode("the quick "))
    body = router.complete(prompt=PROMPT, max_tokens=50, stop="quick").json()
    assert body["choices"][0]["text"] == "the "
    assert target.cancelled.wait(WAIT_S)


def test_an_unfinished_character_at_the_end_can_be_a_stop_string(router):
    choice = router.complete(prompt="🦊", max_tokens=3, stop="\N{REPLACEMENT CHARACTER}").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_each_choice_stops_for_itself(router, target, tokenizer):
    prompt = tokenizer.encode("fox.dog.")
    target.delay_s = 0.01
    body = router.complete(prompt=prompt, n=len(prompt), max_tokens=3 * len(prompt), stop=".").json()
    expected = [tokenizer.decode(prompt[first:] + prompt).partition(".")[0] for first in range(len(prompt))]
    assert [choice["text"] for choice in body["choices"]] == expected
    wait_until(lambda: target.num_cancelled == len(prompt))
