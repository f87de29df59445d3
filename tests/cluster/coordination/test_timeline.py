"""The last steps and answers are kept, and who reads them gets each one once."""

from __future__ import annotations

import itertools

from bench.in_process import SIMULATED, SimulatedCluster
from cluster.config.file import load_config
from cluster.coordination.timeline import AnswerSpan, News, Spans, StepSpan, Timeline, TimelineReader
from tests.waiting import WAIT_S


def test_a_reader_gets_what_came_since_it_last_read() -> None:
    spans: Spans[str] = Spans()
    assert spans.since(0) == (0, [])
    spans.add("a")
    spans.add("b")
    assert spans.since(0) == (2, ["a", "b"])
    assert spans.since(2) == (2, [])
    spans.add("c")
    assert spans.since(2) == (3, ["c"])


def test_the_oldest_are_forgotten() -> None:
    spans: Spans[int] = Spans()
    for number in range(1000):
        spans.add(number)
    following, kept = spans.since(0)
    assert following == 1000
    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) < 500


def test_a_follower_hands_on_each_span_once_also_of_a_timeline_that_begins_anew() -> None:
    follower, copy = TimelineReader(), Timeline()
    for timeline in (Timeline(), Timeline()):
        for number in range(3):
            timeline.steps.add(StepSpan(float(number), 0.0, 0.1, 1, 1, has_prompts=False))
            timeline.answers.add(AnswerSpan(float(number), 0.1, 0.1, 0.1, 1, 1, "draft"))
            copy.add(follower.news(timeline))
        assert follower.news(timeline) == News([], [])
    assert [span.ended_at for span in copy.steps.since(0)[1]] == 2 * [0.0, 1.0, 2.0]
    assert [span.came_at for span in copy.answers.since(0)[1]] == 2 * [0.0, 1.0, 2.0]


def test_steps_and_answers_are_as_long_as_the_engines_make_them() -> None:
    times = ("simulation.target_step_ms=[[1, 4.0]]", "simulation.draft_step_ms=[[1, 2.0]]")
    settings = (
        *times,
        "speculation.controller=fixed",
        "speculation.max_run_ahead=0",
        "speculation.draft_timeout_ms=60000",
    )
    with SimulatedCluster(load_config(None, [*SIMULATED, *settings])) as running:
        name = running.submit(60, num_speculative_tokens=3, prompt_len=8)
        running.wait([name], timeout=WAIT_S)
        timeline = running.target.timeline
    assert timeline is not None
    (_, steps), (_, answers) = timeline.steps.since(0), timeline.answers.since(0)
    verifying = [span for span in steps if not span.has_prompts and span.num_rows > span.num_sequences]
    assert len(verifying) > 5
    assert {(span.num_sequences, span.num_rows) for span in verifying[:-1]} == {(1, 4)}
    assert min(span.seconds for span in verifying) >= 0.004
    # Nothing is drafted ahead: a step waits for three tokens of 2 ms each.
    assert sorted(span.waited_seconds for span in verifying)[len(verifying) // 2] >= 0.005
    assert steps[0].has_prompts
    for earlier, later in itertools.pairwise(steps):
        assert later.ended_at - later.seconds - later.waited_seconds >= earlier.ended_at - 1e-4
    proposing = [span for span in answers if span.num_proposals]
    assert proposing
    for span in proposing:
        assert span.seconds >= span.held_seconds >= 0.0
        assert span.batch == 1
    assert min(span.step_seconds for span in proposing) >= 0.002
