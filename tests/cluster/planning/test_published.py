"""The published figures of the cluster that this project was modelled on, compared with the limits of its GPUs.

Both limits follow from the data sheet, at full bandwidth and peak, without KV, all-reduces or any other work:

    ms a token    a round takes at least the time to read the weights, once for the target and k times for the draft,
                  even if both overlap perfectly: max(t_verify, k * t_draft) / E; their sum if they share GPUs
    tokens/s      every token costs (k + 1) / E rows of 2 * parameters FLOPs on the target

The acceptance is the published acceptance of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GPUS, GpuGroup
from cluster.planning.kernels import linears
from cluster.planning.steps import Roofline
from cluster.speculation.speed import expected_tokens, round_seconds
from tests.cluster.planning.ideal import IDEAL

_A100, _H100, _A10G = GPUS["A100-80"], GPUS["H100"], GPUS["A10G"]
_TARGET = PlannedModel.parse("70B")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    name: str
    target: GpuGroup
    tokens_per_second: float
    ms_per_token: float
    speedup: float
    dollars_per_million_tokens: float
    num_speculative_tokens: int = 0
    acceptance_rate: float = 0.0
    draft: PlannedModel | None = None
    draft_gpus: GpuGroup | None = None  # GPUs of one draft


@dataclass(frozen=True, slots=True)
class Floor:
    """A limit that no software can pass."""

    tokens_a_round: float
    draft_token_ms: float  # time to read the draft's weights once
    ms_per_token: float
    tokens_per_second: float  # bound by the target's peak FLOPs


@dataclass(frozen=True, slots=True)
class CheckedRow:
    published: PublishedRow
    floor: Floor

    @property
    def is_below_bandwidth_floor(self) -> bool:
        return self.published.ms_per_token < self.floor.ms_per_token

    @property
    def is_above_peak_compute(self) -> bool:
        return self.published.tokens_per_second > self.floor.tokens_per_second


PUBLISHED = (
    PublishedRow("70B standard, 4xA100", GpuGroup(_A100, 4), 5120, 12.5, 1.0, 0.65),
    PublishedRow(
        "70B + 7B, K=5, 4xA100 + 4xA10G", GpuGroup(_A100, 4), 9850, 6.8, 1.92, 0.50, 5, 0.78,
        PlannedModel.parse("7B"), GpuGroup(_A10G),
    ),
    PublishedRow(
        "70B + distilled 1B, K=7, 4xA100 + 1xA10G", GpuGroup(_A100, 4), 12400, 5.4, 2.42, 0.37, 7, 0.82,
        PlannedModel.parse("1B"), GpuGroup(_A10G),
    ),
    PublishedRow(
        "70B + EAGLE, K=5, 4xA100", GpuGroup(_A100, 4), 11200, 5.9, 2.19, 0.32, 5, 0.78,
        PlannedModel.parse("0.5B/1x8x128"), GpuGroup(_A100, 4),
    ),
    PublishedRow("70B standard, 4xH100", GpuGroup(_H100, 4), 7840, 8.2, 1.53, 0.35),
)  # fmt: skip


def floor(row: PublishedRow) -> Floor:
    target, k, draft_seconds = Roofline(_TARGET, row.target, IDEAL), row.num_speculative_tokens, 0.0
    verified = linears(_TARGET, k + 1)
    if row.draft is not None:
        assert row.draft_gpus is not None
        draft_seconds = Roofline(row.draft, row.draft_gpus, IDEAL).read_seconds(linears(row.draft, 1))
    tokens = expected_tokens(row.acceptance_rate, k)
    verify_seconds = target.read_seconds(verified)
    overlaps = row.draft_gpus != row.target  # target and draft cannot overlap on the same GPUs
    seconds = round_seconds(k * draft_seconds, verify_seconds, overlaps=overlaps)
    return Floor(
        tokens,
        1e3 * draft_seconds,
        1e3 * seconds / tokens,
        tokens / target.compute_seconds(verified),
    )


def checked_table() -> list[CheckedRow]:
    return [CheckedRow(row, floor(row)) for row in PUBLISHED]


def test_what_lies_below_the_bandwidth_floor_is_marked() -> None:
    rows = {row.published.name: row for row in checked_table()}
    assert {name for name, row in rows.items() if row.is_below_bandwidth_floor} == {
        "70B standard, 4xA100",
        "70B + 7B, K=5, 4xA100 + 4xA10G",
        "70B standard, 4xH100",
    }
    # 140 GB / (4 * 2,039 GB/s) = 17.17 ms, and 12.5 were published
    assert rows["70B standard, 4xA100"].floor.ms_per_token == pytest.approx(17.165, rel=1e-3)
    # five tokens of 14 GB / 600 GB/s = 23.33 ms are 116.7 ms; E = (1 - 0.78^6) / 0.22 = 3.522: 33.1 ms, and not 6.8
    drafted = rows["70B + 7B, K=5, 4xA100 + 4xA10G"].floor
    assert drafted.draft_token_ms == pytest.approx(23.33, rel=1e-3)
    assert drafted.ms_per_token == pytest.approx(33.13, rel=1e-3)
    # seven of 2 GB / 600 GB/s = 23.3 ms; E = (1 - 0.82^8) / 0.18 = 4.420: 5.28 ms, just under the published 5.4
    assert rows["70B + distilled 1B, K=7, 4xA100 + 1xA10G"].floor.ms_per_token == pytest.approx(5.279, rel=1e-3)


def test_what_lies_above_peak_compute_is_marked() -> None:
    rows = {row.published.name: row for row in checked_table()}
    # 4 * 312e12 / (2 * 70e9 * 6 rows / 3.522 tokens) = 5,232 tokens/s, and 9,850 were published
    assert rows["70B + 7B, K=5, 4xA100 + 4xA10G"].floor.tokens_per_second == pytest.approx(5232, rel=1e-3)
    assert [row.is_above_peak_compute for row in rows.values()] == [False, True, True, True, False]
