"""Tests of the bounds of steps on GPUs, and of the measurements that are compared with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.roofline import (
    NUM_SEQS,
    ROWS,
    Case,
    burst_table,
    compare,
    compare_sampling,
    main,
    measured_models,
    verify_table,
)
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GPUS, parse_gpus

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PAGE = RESULTS.parents[1] / "docs" / "PLANNING.md"


def case(model: str, gpus: str, *, all_reduce_seconds: float = 0.0) -> Case:
    return Case(PlannedModel.parse(model), parse_gpus(gpus), 1000, all_reduce_seconds)


@pytest.mark.parametrize("gpus", [*GPUS, "4xA100-80", "4xH200"])
@pytest.mark.parametrize("model", ["1B", "8B", "70B"])
def test_a_row_of_one_sequence_takes_the_reading_of_the_weights(model: str, gpus: str) -> None:
    own = case(model, gpus)
    weights_ms = 1e3 * own.model.weight_bytes / own.gpus.bytes_per_second
    # 1,000 tokens of KV in addition to the weights: 1.6 % of the 1B's
    assert weights_ms < own.verify(1, 1).ms < 1.03 * weights_ms
    assert own.verify(1, 1).largest == "weights"


def test_what_most_of_a_step_is() -> None:
    own = case("70B", "4xA100-80")
    assert own.verify(1, 64).largest == "weights"
    # 2 * 70e9 * 16,384 rows / (4 * 312e12) = 1,838 ms
    assert own.verify(256, 64).largest == "arithmetic"
    assert own.verify(256, 64).ms_by_part["arithmetic"] == pytest.approx(1838, rel=1e-3)
    # 256 * 1,001.5 tokens of 32,768 bytes are 8.4 GB of KV; the weights are 2 GB
    assert case("1B", "H100").burst(256, 4).largest == "KV"


def test_a_bound_grows_with_sequences_and_rows() -> None:
    own = case("8B", "L4")
    for seqs in NUM_SEQS:
        times = [own.verify(seqs, rows).ms for rows in ROWS]
        assert times == sorted(set(times))
    for rows in ROWS:
        times = [own.verify(seqs, rows).ms for seqs in NUM_SEQS]
        assert times == sorted(set(times))


def test_all_reduces_are_a_part_of_their_own() -> None:
    # 2 * 80 layers * 10 us
    bound = case("70B", "4xH100", all_reduce_seconds=10e-6).verify(1, 1)
    assert bound.ms_by_part["all-reduces"] == pytest.approx(1.6)
    assert bound.ms == pytest.approx(case("70B", "4xH100").verify(1, 1).ms + 1.6)


def test_kv_that_is_read_once_takes_less_where_there_are_several_tiles() -> None:
    own = case("70B", "4xH100")
    assert own.verify(4, 4).ms_kv_once == own.verify(4, 4).ms
    # 4 tiles of 4 rows read 1,004, 1,008, 1,012 and 1,016 positions, once is 1,016; KV of a token 327,680 bytes
    again = 4 * (1004 + 1008 + 1012) * 327_680 / (4 * 3350e9)
    assert own.verify(4, 16).ms - own.verify(4, 16).ms_kv_once == pytest.approx(1e3 * again)


def test_what_has_no_room_is_marked() -> None:
    # (24 GB - 16 GB) * 0.9 / (1,000 tokens * 131,072 bytes) = 54 sequences
    own = case("8B", "A10G")
    assert own.verify(16, 4).fits
    assert not own.verify(64, 4).fits
    assert own.verify(64, 4).cell.endswith("*")


def test_the_measured_target_is_the_one_that_is_planned() -> None:
    document = json.loads((RESULTS / "gpu-engine-target.json").read_text(encoding="utf-8"))
    step = document["steps"][0]
    read = step["gigabytes_per_second"] * 1e9 * step["milliseconds"] / 1e3
    assert measured_models()["target"].weight_bytes == pytest.approx(read, rel=0.01)


def test_nothing_measured_is_below_its_bound() -> None:
    gpus, compared = compare(RESULTS)
    assert gpus.name == "H100"
    assert {one.model for one in compared} == {"4.2B", "outrider-draft-2m"}
    assert all(one.measured_over_bound > 1 for one in compared)
    sampled = compare_sampling(RESULTS)
    assert {one.vocab_size for one in sampled} == {4096, 128_256}
    assert all(one.measured_over_bound > 1 for one in sampled)


def test_the_committed_bounds_are_those_of_the_code(tmp_path: Path) -> None:
    out = tmp_path / "roofline.json"
    assert main(["--out", str(out), "--results", str(RESULTS)]) == 0
    assert json.loads(out.read_text()) == json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))


def test_a_model_that_is_not_known_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "9B", "H100"]) == 2
    assert "9B" in capsys.readouterr().err


def test_the_page_has_what_the_bench_prints() -> None:
    assert verify_table(case("70B:bf16", "4xH100", all_reduce_seconds=10e-6)) in PAGE.read_text("utf-8")


def test_a_table_of_bursts_has_a_row_for_each_gpu_and_depth() -> None:
    rows = burst_table([case("1B:bf16", gpu) for gpu in ("A10G", "H100")]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| 1B bf16 on A10G, k = 4",
        "| 1B bf16 on A10G, k = 8",
        "| 1B bf16 on H100, k = 4",
        "| 1B bf16 on H100, k = 8",
    ]
