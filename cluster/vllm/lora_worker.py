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
    """Extension for LoRA adapters; it runs on every rank."""

    model_runner: Any

    def prepare_adapters(self) -> None:
        """Prepares vLLM for adapters. Called once, before the first request."""
        spare_the_base_on_cpus()
        self._leave_the_head_alone()

    def _leave_the_head_alone(self) -> None:
        """Removes the adapters from the computation of logits.

        vLLM's adapters of the head expect one row for each token that it samples. Log-probabilities of a prompt have
        other rows: for them vLLM uses the wrong adapters, or the whole engine fails. Adapters of the head are rare, and
        are refused because of this.
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
        # Modules of experts have been split or merged by then.
        return sorted(name for name in adapter.loras.keys() - manager.modules.keys() if ".experts" not in name)


def spare_the_base_on_cpus() -> None:
    """Makes vLLM's LoRA operators for CPUs add nothing to rows without an adapter.

    The operators index the adapters by slot number. The number for no adapter is -1, which PyTorch takes as the last
    slot. In a batch with adapters, requests of the base would then be computed with that adapter. Rows of zeros add
    zeros.
    """

    def sparing(operator: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(operator)
        def apply(
            inputs: torch.Tensor, weights: torch.Tensor, outputs: torch.Tensor, slots: torch.Tensor, *more: Any
        ) -> None:
            operator(inputs.masked_fill((slots < 0)[:, None], 0), weights, outputs, slots, *more)

        return apply

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        operator = getattr(lora_ops, name)
        if not hasattr(operator, "__wrapped__"):
            wrapped = sparing(operator)
            for module in (lora_ops, punica_cpu):
                setattr(module, name, wrapped)
