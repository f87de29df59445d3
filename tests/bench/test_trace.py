from __future__ import annotations

import pytest

from bench.trace import Course, Phase
from cluster.config.file import load_config
from cluster.targets.base import GenerationOutput


@pytest.mark.parametrize(
    ("phase", "depth"),
    [
        (Phase(1, 0.0), 0),  # nothing comes true
        (Phase(1, 0.5), 1),  # 1.5 tokens in 33 ms, against 1 in 24 and 1.75 in 39
        (Phase(1, 1.0), 16),  # all come true: as many as are allowed
        (Phase(64, 0.75), 0),  # every row costs
    ],
)
def test_the_oracle_takes_what_pays(phase, depth):
    config = load_config(None, ["simulation.draft_step_ms=[[1, 6]]"])
    assert phase.best_depth(config) == depth


def test_a_course_is_kept_by_the_second():
    course = Course()
    course.add(0.5, [GenerationOutput("a", [1, 2, 3], None, 4, 2), GenerationOutput("b", [1], None, 0, 0)])
    course.add(2.5, [GenerationOutput("a", [1], None, 2, 0)])
    assert course.tokens == [4, 0, 1]
    assert course.depths == [2.0, 0.0, 2.0]
    assert course.tokens_of(1, 2.0) == 1
