"""The model for invariant numerics passes the check at start, and computes what the plain one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine import invariance, triton_linear
from cluster.engine.batch import Segment, pack
from cluster.engine.invariance import check_invariance
from cluster.engine.kv_cache import KVCache
from cluster.engine.loader import load_model
from cluster.engine.model import TorchModel
from cluster.engine.quantization import Quantization
from cluster.engine.runner import ModelRunner
from cluster.engine.triton_model import InvariantTritonModel
from cluster.errors import ConfigurationError
from tests.cluster.engine.filled_caches import BLOCK_SIZE, CPU, model_and_cache
from tests.interpreter import spare_bookkeeping
from tests.interpreter_dot import dot_in_order
from tests.soak import length, only_in_soak

NUM_LAYERS = length(1, 2)  # layers of the models under test
FAMILIES = [{}, {"family": "qwen3"}, {"family": "qwen2"}]  # plain, with a norm of each head, with a bias


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)
    dot_in_order(monkeypatch)


@pytest.fixture(params=length(FAMILIES[2:], FAMILIES), ids=str)
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(num_hidden_layers=NUM_LAYERS, **request.param)


def new_runner(folder: Path, form: type[InvariantTritonModel] = InvariantTritonModel) -> ModelRunner:
    return ModelRunner(load_model(folder, torch.bfloat16, CPU, form=form), BLOCK_SIZE, 32)


def test_the_same_logits_as_pytorchs(folder: Path) -> None:
    batch = pack([Segment([5, 6, 7], 8, [3, 4, 5], 3), Segment([9] * 20, 0, list(range(10, 15)), 20)], BLOCK_SIZE, CPU)
    expected, found = (model_and_cache(folder, form)[0].forward(batch) for form in (TorchModel, InvariantTritonModel))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.fixture
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check decodes only some tokens one by one."""
    monkeypatch.setattr(invariance, "_CUTS", length(([1] * 7 + [38], *invariance._CUTS[1:]), invariance._CUTS))


@only_in_soak
@pytest.mark.usefixtures("fewer_steps")
def test_it_passes_the_check(tiny_folder: Callable[..., Path]) -> None:
    runner = new_runner(tiny_folder(family="qwen3", num_hidden_layers=NUM_LAYERS))
    check_invariance(runner)
    assert runner.blocks.num_used_blocks == 0


@only_in_soak
@pytest.mark.usefixtures("fewer_steps")
def test_recorded_steps_pass_the_check(tiny_folder: Callable[..., Path]) -> None:
    runner = new_runner(tiny_folder(num_hidden_layers=NUM_LAYERS))
    assert isinstance(runner.model, InvariantTritonModel)
    runner.model.record(48, 48, lambda call: call)
    check_invariance(runner)


def test_a_product_that_depends_on_the_height_is_found(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only products of more rows than the check has in one sequence sum in another order."""

    def uneven(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) <= 64:
            return product(x, weight, bias)
        half = x.shape[1] // 2
        return (x[:, :half].float() @ weight[:, :half].float().T + x[:, half:].float() @ weight[:, half:].float().T).to(
            x.dtype
        )

    product = triton_linear.product
    monkeypatch.setattr(invariance, "_CUTS", ())  # none is high enough
    monkeypatch.setattr(triton_linear, "product", uneven)
    with pytest.raises(ConfigurationError, match="does not hold"):
        check_invariance(new_runner(tiny_folder(num_hidden_layers=NUM_LAYERS)))


def test_a_step_without_logits(tiny_folder: Callable[..., Path]) -> None:
    runner = new_runner(tiny_folder(num_hidden_layers=NUM_LAYERS))
    assert runner.run([Segment([1, 2, 3], 0, [0], 0)]).shape[0] == 0


@pytest.mark.parametrize("quantization", length([Quantization(4, 32)], [Quantization(8, None), Quantization(4, 32)]))
def test_a_model_in_integers(tiny_folder: Callable[..., Path], quantization: Quantization) -> None:
    batch = pack([Segment([5, 6, 7], 0, [3], 3)], BLOCK_SIZE, CPU)
    logits = []
    for form in (TorchModel, InvariantTritonModel):
        loaded = load_model(
            tiny_folder(num_hidden_layers=NUM_LAYERS), torch.float32, CPU, form=form, quantization=quantization
        )
        logits.append(loaded.bind(KVCache(loaded.config, 8, BLOCK_SIZE, torch.float32, CPU)).forward(batch))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


def test_groups_that_are_not_whole_blocks_are_refused(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match="quantization int4 with numerics 'invariant' on a GPU needs groups"):
        load_model(
            tiny_folder(num_hidden_layers=NUM_LAYERS),
            torch.bfloat16,
            CPU,
            form=InvariantTritonModel,
            quantization=Quantization(4, 16),
        )
