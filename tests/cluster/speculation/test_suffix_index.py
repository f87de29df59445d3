"""Tests of the suffix index: its matches, that they are of one owner, and its size."""

from __future__ import annotations

import random

import pytest

from cluster.speculation.suffix_index import RUNS, Match, SuffixIndex, Text, following

ALICE, BOB = b"alice", b"bob"


@pytest.fixture
def index() -> SuffixIndex:
    return SuffixIndex(2048)


def known(index: SuffixIndex, token_ids: list[int], owner: bytes = ALICE) -> Text:
    text = index.begin(owner, token_ids)
    index.take_in([(text, len(token_ids))])
    return text


def found(index: SuffixIndex, text: Text) -> Match:
    (match,) = index.find([text])
    assert match is not None
    return match


def test_what_followed_in_another_text_is_found(index: SuffixIndex) -> None:
    earlier = known(index, list(range(100, 160)))
    later = known(index, [5, 6, *range(110, 130)])
    match = found(index, later)
    assert (match.text, match.place, match.run) == (earlier, 30, 8)
    assert following(match, later, 4) == [130, 131, 132, 133]
    index.end(earlier)
    assert following(found(index, later), later, 4) == [130, 131, 132, 133]


def test_texts_of_others_are_not_found(index: SuffixIndex) -> None:
    index.end(known(index, list(range(100, 160))))
    assert index.find([known(index, list(range(110, 130)), BOB)]) == [None]


def test_nor_if_the_hashes_of_two_owners_are_equal(index: SuffixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.speculation.suffix_index._salt", lambda _: 7)
    known(index, list(range(100, 160)))
    assert index.find([known(index, list(range(110, 130)), BOB)]) == [None]


def test_a_text_that_grows_is_taken_in_further(index: SuffixIndex) -> None:
    tokens = [1, 2, 3, 4]
    text = known(index, tokens)
    assert index.find([text]) == [None]
    tokens += [9, 3, 4]
    index.take_in([(text, len(tokens))])
    assert following(found(index, text), text, 5) == [9, 3, 4, 9, 3]


def test_tokens_that_are_not_taken_in_yet_follow_a_match(index: SuffixIndex) -> None:
    tokens = list(range(20))
    text = known(index, tokens)
    tokens += [0, 1, 2]
    assert following(found(index, text), text, 3) == [3, 4, 5]


def test_all_matches_are_true_among_many_texts_that_share_slots(index: SuffixIndex) -> None:
    """Against a search of all texts; the tables have fewer slots than there are runs."""
    rng = random.Random(1)
    texts = [known(index, [rng.randrange(6) for _ in range(100)], rng.choice((ALICE, BOB))) for _ in range(60)]
    num_longest = 0
    for text, match in zip(texts, index.find(texts), strict=True):
        assert match is not None
        assert match.text.owner == text.owner
        assert list(match.text.token_ids[match.place - match.run : match.place]) == text.token_ids[-match.run :]
        longest = max(run for run in RUNS if _occurs(text, run, texts))
        num_longest += match.run == longest
    assert num_longest > len(texts) / 2


def test_the_oldest_texts_are_dropped(index: SuffixIndex) -> None:
    """A day's traffic takes no more than was allowed."""
    rng = random.Random(2)
    last: list[int] = []
    for _ in range(200):
        last = [rng.randrange(10**6) for _ in range(100)]
        index.end(known(index, last))
        assert index.num_kept_tokens <= index.max_tokens == 2048
    assert following(found(index, again := known(index, last[:50])), again, 3) == last[50:53]
    assert len(index._texts) <= 22
    assert index._tables.nbytes == 2048 * 8 * len(RUNS)


def test_of_a_text_longer_than_all_that_is_kept_nothing_stays(index: SuffixIndex) -> None:
    index.end(known(index, list(range(3000))))
    assert index.num_kept_tokens == 0
    assert index.find([known(index, list(range(10)))]) == [None]


def test_bytes_are_those_of_tables_and_texts() -> None:
    assert SuffixIndex.of_bytes(1 << 20).max_tokens == 1 << 14


def _occurs(text: Text, run: int, texts: list[Text]) -> bool:
    wanted = list(text.token_ids[-run:])
    for other in texts:
        for place in range(run, len(other.token_ids)):
            if other.owner == text.owner and list(other.token_ids[place - run : place]) == wanted:
                return True
    return False
