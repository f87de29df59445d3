"""Extension of a vLLM worker for LoRA adapters, including fixes of vLLM's own support for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


class LoraWorker:
    """Extension of vLLM's worker for LoRA adapters. Its methods run on every rank."""

    model_runner: Any

    def prepare_adapters(self) -> None:
        """Prepares vLLM for adapters. Called once, before the first request."""
        spare_the_base_on_cpus()
        self._leave_the_head_alone()

    def _leave_the_head_alone(self) -> None:
        """Removes the adapters from the computation of logits.

        vLLM's adapters of the head expect one row for each sampled token. Log-probabilities of a prompt have other
        rows: vLLM applies the wrong adapters to them, or the whole engine fails. So this project refuses adapters of
        the head, which are rare.
        """
        manager, model = self.model_runner.lora_manager._adapter_manager, self.model_runner.model
        heads = {name: layer for name, layer in manager.modules.items() if isinstance(layer, LogitsProcessorWithLoRA)}
        places = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LogitsProcessorWithLoRA)]
        for place, layer in places:
            parent, _, attribute = place.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer.base_layer)
        for name in heads:
            del manager.modules[name]

    def unapplied_modules(self, number: int) -> list[str]:
        """Returns the modules of a loaded adapter that the model does not use and vLLM would ignore."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(number)
        # vLLM splits or merges the modules of experts when it loads an adapter, so their names differ.
        return sorted(name for name in adapter.loras.keys() - manager.modules.keys() if ".experts" not in name)


def spare_the_base_on_cpus() -> None:
    """Makes the LoRA operators of vLLM 0.32 for CPUs add nothing to rows without an adapter. 0.33 needs no change.

    The operators index the adapters by slot number. A row without an adapter has the number -1, which PyTorch takes as
    the last slot. So in a batch with adapters, requests for the base model would use the adapter in that slot. The
    wrapped operators get zeros as the input of these rows, so they add zeros.
    """
    added = torch.zeros(1, 1)
    lora_ops.bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), added, torch.tensor([-1]))
    if not added.any():
        return

    def sparing(operator: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(operator)
        def apply(
            inputs: torch.Tensor, weights: torch.Tensor, outputs: torch.Tensor, slots: torch.Tensor, *more: Any
        ) -> None:
            operator(inputs.masked_fill((slots < 0)[:, None], 0), weights, outputs, slots, *more)

        return apply

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        wrapped = sparing(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, wrapped)
