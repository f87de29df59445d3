"""A draft that is made of its target has no second copy of what both have, told by the addresses of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import Config
from cluster.engine import loader
from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.cpu_model import CpuModel
from cluster.engine.linear import Linear
from cluster.engine.loader import LoadedModel
from cluster.engine.model import Model, TorchModel
from cluster.engine.runner import ModelRunner, load_weights
from cluster.errors import ConfigurationError
from cluster.factories.drafters import load_draft_weights

FORMS = [
    pytest.param(CpuModel, marks=pytest.mark.skipif(not has_kernels(), reason="the kernels do not run here")),
    TorchModel,
]
DTYPES = ["float32", "bfloat16"]
SEGMENT = Segment(list(range(20)), 0, list(range(5)), num_logits=20)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Model]:
    form: type[Model] = request.param
    monkeypatch.setattr(loader, "form_on", lambda *_: form)
    return form


@pytest.fixture
def new_config(tiny_llama: Callable[..., Path]) -> Callable[..., Config]:
    """new_config(drafter, target settings, draft settings)."""

    def make(drafter: str, target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None) -> Config:
        target = {"model": str(tiny_llama(num_hidden_layers=4)), "device": "cpu"} | (target or {})
        draft = {"drafter": drafter, "placement": "in-process"} | (draft or {})
        return Config.model_validate({"target": target, "draft": draft})

    return make


def both(config: Config) -> tuple[LoadedModel, LoadedModel]:
    target = load_weights(config.target)
    return target, load_draft_weights(config, target=target)


def addresses(linear: Linear) -> tuple[int, ...]:
    """Returns the addresses of the tensors that `linear` reads, whatever their layout."""
    if isinstance(linear, KernelLinear):
        return tuple(linear.weight[:3])
    return (id(linear),)  # oneDNN's tensors have no address that can be asked for


def ends(model: LoadedModel) -> list[object]:
    weights = model.weights
    return [weights.embedding.data_ptr(), weights.norm.data_ptr(), addresses(weights.head)]


def layer_addresses(model: LoadedModel) -> list[object]:
    return [
        (layer.input_norm.data_ptr(), layer.post_attention_norm.data_ptr(), *map(addresses, layer.linears))
        for layer in model.weights.layers
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_int4_has_the_targets_embedding_and_head(
    form: type[Model], dtype: str, new_config: Callable[..., Config]
) -> None:
    target, draft = both(new_config("self-int4", {"dtype": dtype}))
    assert ends(draft) == ends(target)
    assert set(layer_addresses(draft)).isdisjoint(layer_addresses(target))


def test_self_int4_of_a_target_in_int4_is_the_target(new_config: Callable[..., Config]) -> None:
    target, draft = both(new_config("self-int4", {"quantization": "int4"}))
    assert draft is target


def test_what_is_shared_computes_what_a_copy_does(new_config: Callable[..., Config]) -> None:
    config = new_config("self-int4", {"dtype": "float32"}, {"dtype": "float32"})
    copied = ModelRunner(load_draft_weights(config), 4, 8)
    target, shared = (ModelRunner(loaded, 4, 8) for loaded in both(config))
    assert torch.equal(shared.run([SEGMENT]), copied.run([SEGMENT]))
    assert not torch.equal(shared.run([SEGMENT]), target.run([SEGMENT]))  # it has 4 bits


@pytest.mark.parametrize(
    ("drafter", "draft", "why"),
    [
        ("self-int4", {"dtype": "float32"}, "draft.dtype float32.*which are bfloat16"),
        ("self-int4", {"device": "cuda"}, "draft.device cuda.*which are cpu"),
    ],
)
def test_settings_that_would_need_a_copy_are_refused(
    drafter: str, draft: dict[str, Any], why: str, new_config: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        both(new_config(drafter, {"dtype": "bfloat16"}, draft))
