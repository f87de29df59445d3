"""The statistical assertions here have fixed keys and a stated chance of a false alarm, FALSE_ALARM each."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from cluster.speculation import noise
from cluster.speculation.noise import NoiseKey, gumbel_noise, noise_words

from .reference import philox4x64_10

FALSE_ALARM = 1e-6
LARGEST_Z = float(stats.norm.isf(FALSE_ALARM / 2))

# Random123 1.14, tests/kat_vectors, philox4x64 with 10 rounds: counter, key, words.
KNOWN_ANSWERS = [
    (
        [0, 0, 0, 0],
        [0, 0],
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    (
        [2**64 - 1] * 4,
        [2**64 - 1] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


def halves(words: list[int]) -> list[int]:
    """The 32-bit words of 64-bit words, the low half first."""
    return [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]


def little_endian(words: list[int]) -> int:
    return sum(word << (64 * index) for index, word in enumerate(words))


def expected_words(key: NoiseKey, position: int, num_tokens: int) -> list[int]:
    """The module's definition: counter (token // 8, position, 0, 0)."""
    blocks = range(-(-num_tokens // 8))
    words = [philox4x64_10([block, position, 0, 0], [key.low, key.high]) for block in blocks]
    return halves(list(itertools.chain.from_iterable(words)))[:num_tokens]


class TestWords:
    @pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
    def test_the_independent_generator_gives_the_published_answers(
        self, counter: list[int], key: list[int], words: list[int]
    ) -> None:
        assert philox4x64_10(counter, key) == words

    @pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
    def test_numpys_generator_started_one_below_gives_the_published_answers(
        self, counter: list[int], key: list[int], words: list[int]
    ) -> None:
        below = (little_endian(counter) - 1) % 2**256
        assert np.random.Philox(counter=below, key=little_endian(key)).random_raw(4).tolist() == words

    def test_position_zero_of_the_zero_key_is_the_published_answer(self) -> None:
        assert noise_words(NoiseKey(0, 0), 0, 8).tolist() == halves(KNOWN_ANSWERS[0][2])

    @pytest.mark.parametrize("position", [0, 1, 2, 4095, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1])
    @pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 61])
    def test_equal_the_independent_generators(self, position: int, num_tokens: int) -> None:
        bits = random.Random(position ^ num_tokens)
        for key in (NoiseKey(bits.getrandbits(64), bits.getrandbits(64)), NoiseKey(2**64 - 1, 0)):
            assert noise_words(key, position, num_tokens).tolist() == expected_words(key, position, num_tokens)

    def test_a_smaller_vocabulary_sees_the_first_words_of_a_larger_one(self) -> None:
        key = NoiseKey.derive(3, 0)
        all_words = noise_words(key, 17, 1000)
        for num_tokens in (1, 8, 13, 512, 999):
            np.testing.assert_array_equal(noise_words(key, 17, num_tokens), all_words[:num_tokens])


class TestKeys:
    def test_the_key_of_a_seed_never_changes(self) -> None:
        """A stored seed must give the same answer in every release."""
        assert NoiseKey.derive(0, 0) == NoiseKey(low=0x4AAA3D43C9634F9C, high=0x871A3C687EF13BD3)

    def test_differ_in_seed_and_choice(self) -> None:
        seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63)]
        keys = {NoiseKey.derive(seed, choice) for seed in seeds for choice in (0, 1, 2, 2**32 - 1)}
        assert len(keys) == len(seeds) * 4


class TestGumbel:
    def test_a_row_does_not_depend_on_its_batch_nor_on_the_vocabulary(self) -> None:
        draws = [(NoiseKey.derive(seed, seed % 2), position) for seed, position in [(1, 0), (2, 9), (1, 9), (5, 10**9)]]
        alone = [gumbel_noise([draw], 1003)[0] for draw in draws]
        for order in itertools.permutations(range(len(draws))):
            together = gumbel_noise([draws[i] for i in order], 1003)
            for row, index in enumerate(order):
                np.testing.assert_array_equal(together[row], alone[index])
        for num_tokens in (1, 2, 7, 8, 9, 64, 1001):
            smaller = gumbel_noise(draws, num_tokens)
            for row, expected in zip(smaller, alone, strict=True):
                np.testing.assert_array_equal(row, expected[:num_tokens])

    def test_is_the_documented_function_of_the_word(self) -> None:
        key = NoiseKey.derive(8, 0)
        expected = [-math.log(-math.log1p(-(int(x) + 0.5) / 2**32)) for x in noise_words(key, 5, 300)]
        np.testing.assert_allclose(gumbel_noise([(key, 5)], 300)[0], expected, rtol=2e-7)

    def test_the_extreme_words_are_finite(self, monkeypatch: pytest.MonkeyPatch) -> None:
        extremes = np.array([0, 2**32 - 1], dtype=np.uint32)
        monkeypatch.setattr(noise, "noise_words", lambda key, position, num_tokens: extremes)
        largest, smallest = 33 * math.log(2), -math.log(33 * math.log(2))
        np.testing.assert_allclose(gumbel_noise([(NoiseKey(0, 0), 0)], 2), [[largest, smallest]], rtol=1e-6)

    def test_no_draws_give_no_rows(self) -> None:
        assert gumbel_noise([], 5).shape == (0, 5)

    def test_mean_and_variance_are_those_of_the_distribution(self) -> None:
        sample = gumbel_noise([(NoiseKey.derive(seed, 0), 3) for seed in range(64)], 4096).astype(np.float64).ravel()
        variance = math.pi**2 / 6
        assert abs(sample.mean() - np.euler_gamma) < LARGEST_Z * math.sqrt(variance / sample.size)
        # The fourth central moment of a Gumbel variable is (3 + 12/5) of its squared variance.
        assert abs(sample.var() - variance) < LARGEST_Z * variance * math.sqrt((3 + 12 / 5 - 1) / sample.size)

    def test_follow_the_distribution(self) -> None:
        sample = gumbel_noise([(NoiseKey.derive(11, 0), position) for position in range(16)], 2048).ravel()
        assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > FALSE_ALARM


class TestRandomness:
    @pytest.mark.parametrize("shift", [24, 12, 0])
    def test_words_are_uniform(self, shift: int) -> None:
        words = np.concatenate([noise_words(NoiseKey.derive(seed, 0), seed, 4096) for seed in range(64)])
        counts = np.bincount((words >> shift) & 0xFF, minlength=256)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM

    @pytest.mark.parametrize("neighbour", ["seed", "position", "token", "choice"])
    def test_neighbours_are_independent(self, neighbour: str) -> None:
        def words(seed: int, position: int, choice: int) -> npt.NDArray[np.uint32]:
            return noise_words(NoiseKey.derive(seed, choice), position, 4097)

        first, second = [], []
        for index in range(32):
            seed, position = 100 + 2 * index, 1 + 2 * index
            here = words(seed, position, 0)
            there = {
                "seed": words(seed + 1, position, 0),
                "position": words(seed, position + 1, 0),
                "token": np.roll(here, -1),
                "choice": words(seed, position, 1),
            }[neighbour]
            first.append(here[:-1])
            second.append(there[:-1])
        a, b = np.concatenate(first), np.concatenate(second)
        correlation = np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]
        assert abs(correlation) * math.sqrt(a.size) < LARGEST_Z
        pairs = np.bincount((a >> 28) * 16 + (b >> 28), minlength=256)
        assert stats.chisquare(pairs).pvalue > FALSE_ALARM
