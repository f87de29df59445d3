"""Rounds on the device give the tokens of the target alone, with steps launched ahead or read first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.pool import DraftPool
from cluster.drafters.burst import Burst
from cluster.engine.limits import StepLimits
from cluster.engine.loader import load_model
from cluster.engine.model import TorchModel
from cluster.engine.runner import ModelRunner
from cluster.engine.triton_model import TritonModel
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.device_speculator import DeviceSpeculator
from cluster.targets.torch import TorchTarget
from tests.cluster.drafters.interpreted.burst import PARAMS
from tests.interpreter import spare_bookkeeping
from tests.soak import length, only_in_soak

CPU = torch.device("cpu")
LIMITS = StepLimits(max_model_len=96, max_num_seqs=5, max_num_batched_tokens=16)
BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)


class Engine:
    """A target whose steps the test runs. Counts all drafts."""

    def __init__(
        self,
        folder: Path,
        draft: Path | None = None,
        *,
        ahead: bool = True,
        num_blocks: int = 96,
        k: int = 3,
        most: int = 4,
        controller: str = "fixed",
    ) -> None:
        speculation = SpeculationConfig(num_speculative_tokens=k, max_speculative_tokens=most, controller=controller)
        # The target computes with PyTorch's operators, because interpreted kernels take long.
        loaded = load_model(folder, torch.float32, CPU, form=TorchModel)
        runner, speculator = ModelRunner(loaded, BLOCK_SIZE, num_blocks), None
        if draft is not None:
            draft_runner = self._draft_runner(draft, num_blocks)
            burst = Burst.of(draft_runner, LIMITS)
            assert burst is not None
            speculator = DeviceSpeculator(runner, draft_runner, burst, LIMITS, speculation)
        self.blocks = runner.blocks
        self.target = TorchTarget("tiny", runner, LIMITS, DraftPool("none"), speculation, speculator=speculator)
        self.target.launches_ahead = ahead
        self.outputs: dict[str, list[GenerationOutput]] = {}

    @staticmethod
    def _draft_runner(folder: Path, num_blocks: int) -> ModelRunner:
        runner = ModelRunner(load_model(folder, torch.float32, CPU, form=TritonModel), BLOCK_SIZE, num_blocks)
        assert isinstance(runner.model, TritonModel)
        runner.model.record(LIMITS.max_num_batched_tokens, LIMITS.max_model_len, lambda call: call)
        return runner

    def publish(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            assert output.error is None
            self.outputs.setdefault(output.request_id, []).append(output)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        for request in requests:
            self.target.submit(request)
        while self.target.run_step(self.publish):
            pass
        assert self.blocks.num_used_blocks == 0
        return [self.tokens(request) for request in requests]

    def tokens(self, request: GenerationRequest) -> list[int]:
        return [token for output in self.outputs[request.request_id] for token in output.token_ids]

    @property
    def num_drafted(self) -> int:
        return sum(output.num_draft_tokens for outputs in self.outputs.values() for output in outputs)

    @property
    def num_accepted(self) -> int:
        return sum(output.num_accepted_tokens for outputs in self.outputs.values() for output in outputs)


def request(
    seed: int, num_prompt: int, max_tokens: int, *, k: int | None = None, params: SamplingParams | None = None
) -> GenerationRequest:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, 500, (num_prompt,), generator=generator).tolist()
    params = params or PARAMS[seed % len(PARAMS)]
    return GenerationRequest(
        f"request {seed}", prompt, num_prompt, params, NoiseKey.derive(seed, 0), max_tokens, True, k
    )


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[..., Path]) -> tuple[Path, Path]:
    """A target, and a draft that is sometimes right."""
    return tiny_folder(seed=0), tiny_folder(seed=1)


MIXED = [(0, 3, 7, None), (1, 18, 5, 2), (2, 1, 6, 4), (5, 6, 4, 0)]  # seed, tokens of prompt and answer, k


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    """The answers to `MIXED` without drafts, each step read before the next."""
    return Engine(folders[0], ahead=False, k=0).generate(mixed())


def mixed() -> list[GenerationRequest]:
    return [request(seed, num_prompt, most, k=k) for seed, num_prompt, most, k in MIXED]


@pytest.mark.parametrize(
    ("is_perfect", "ahead"), length([(False, True)], [(True, True), (False, True), (False, False)])
)
def test_same_tokens(is_perfect: bool, ahead: bool, folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    """Prompts in several chunks, and of one token; depths that differ; answers that end with drafts in flight."""
    engine = Engine(folders[0], folders[0] if is_perfect else folders[1], ahead=ahead)
    assert engine.generate(mixed()) == expected
    assert engine.num_drafted > 0
    if is_perfect:
        assert engine.num_accepted >= 0.95 * engine.num_drafted


@only_in_soak
def test_a_prompt_of_several_steps_alone(folders: tuple[Path, Path]) -> None:
    """Its first steps choose no token."""
    alone = [request(1, 18, 3)]
    expected = Engine(folders[0], ahead=False, k=0).generate(alone)
    assert Engine(folders[0], folders[0]).generate(alone) == expected


def test_ends_and_neighbours_that_need_the_host(folders: tuple[Path, Path]) -> None:
    """A stop token among accepted drafts, with log-probabilities and penalties of other requests."""
    plain = [request(seed, 5, 9) for seed in range(2)]
    others = [
        replace(request(2, 4, 4), num_logprobs=1),
        request(3, 6, 4, params=SamplingParams(repetition_penalty=1.2)),
    ]
    alone = Engine(folders[0], ahead=False, k=0)
    expected = alone.generate([*plain, *others])
    stop = expected[0][4]
    expected[0] = expected[0][: expected[0].index(stop) + 1]
    plain[0] = replace(plain[0], stop_token_ids=frozenset({stop}))
    engine = Engine(folders[0], folders[0])
    assert engine.generate([*plain, *others]) == expected
    assert engine.num_accepted > 0


def test_preemption_and_aborts(folders: tuple[Path, Path]) -> None:
    requests = [request(seed, 4, 10) for seed in range(3)]
    expected = Engine(folders[0], ahead=False, k=0).generate(requests)
    engine = Engine(folders[0], folders[0], num_blocks=8)
    left = request(7, 3, 25)
    engine.target.submit(left)
    for _ in range(4):
        assert engine.target.run_step(engine.publish)
    engine.target.abort(left.request_id)
    assert engine.generate(requests) == expected
    preempted = {reading.name: reading.value for reading in engine.target.readings() if not reading.labels}
    assert preempted["vllm:num_preemptions"] > 0


@only_in_soak
def test_the_controller_tries_depths(folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    """The trials before the first request do not count as committed tokens."""
    engine = Engine(folders[0], folders[0], controller="goodput", k=2, most=2)
    engine.target.profile()
    values = {reading.name: reading.value for reading in engine.target.readings() if not reading.labels}
    assert values["outrider_committed_tokens"] == 0
    assert engine.generate(mixed()) == expected


@only_in_soak
def test_a_sequence_without_drafts_gets_none_later(folders: tuple[Path, Path]) -> None:
    """A step without drafts leaves the draft's cache without its tokens."""
    requests = [request(1, 4, 9, k=0), request(2, 4, 5, k=3)]
    expected = Engine(folders[0], ahead=False, k=0).generate(requests)
    engine = Engine(folders[0], folders[0])
    assert engine.generate(requests) == expected
    drafted = [sum(o.num_draft_tokens for o in engine.outputs[r.request_id]) for r in requests]
    assert drafted[0] == 0 < drafted[1]
