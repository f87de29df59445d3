"""Recorded answers in virtual time: drafts come true where they did, and steps take what they are said to."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.replay import Answer, Behaviour, Recording, replay, simulated
from cluster.config import Config
from tests.soak import length, only_in_soak

STEP_MS = 25.0
NUM_STREAMS = 2


def recording(*answers: tuple[bool, ...]) -> Recording:
    """Returns a recording of a draft that takes almost no time."""
    return Recording(0.0, tuple(Answer(8, marks) for marks in answers), ((1, STEP_MS),), ((1, 0.025),), {"cores": 2})


def rate(recorded: Recording, depth: int | None, behaviour: Behaviour | None = None) -> tuple[float, float]:
    config = simulated(Config(), recorded)
    return replay(recorded, config, NUM_STREAMS, depth, behaviour or Behaviour(), seconds=length(6.0, 20.0), seed=1)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path):
    recorded = recording((False, True, True), (True, False))
    recorded.write(tmp_path / "folder" / "recording.json")
    assert Recording.read(tmp_path / "folder" / "recording.json") == recorded


@pytest.mark.parametrize(
    ("marks", "tokens_a_round"),
    [((True,) * 400, 4.0), ((False,) * 400, 1.0), ((True, True, False) * 133, 3.0)],  # with 3 drafts
)
def test_drafts_come_true_where_they_did(marks, tokens_a_round):
    tokens_per_second, num_drafts = rate(recording(marks), 3)
    rounds_per_second = NUM_STREAMS / (STEP_MS / 1e3)
    assert tokens_per_second == pytest.approx(tokens_a_round * rounds_per_second, rel=0.1)
    assert num_drafts == pytest.approx(3.0, rel=0.1)


def test_the_controller_drafts_where_drafts_come_true():
    assert rate(recording((True,) * 400), None)[1] > 6.0
    wrong = recording((False,) * 400)
    assert rate(wrong, None)[0] >= 0.99 * rate(wrong, 0)[0]


@only_in_soak
def test_steps_scatter_about_what_they_take():
    recorded = recording((True,) * 400)
    steady, scattered = rate(recorded, 3)[0], rate(recorded, 3, Behaviour(scatter=0.2))[0]
    assert scattered != steady
    assert scattered == pytest.approx(steady, rel=0.1)  # of 240 steps: 1.3 % is one deviation, slow ones add 1 %
