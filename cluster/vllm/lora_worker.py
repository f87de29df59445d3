"""What a vLLM worker is extended with for LoRA adapters; what of vLLM is put right for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


class LoraWorker:
    """On every rank."""

    model_runner: Any

    def prepare_adapters(self) -> None:
        """Called once, before the first request."""
        spare_the_base_on_cpus()
        self._leave_the_head_alone()

    def _leave_the_head_alone(self) -> None:
        """Takes the adapters' part out of the logits.

        vLLM has there one row for each token that it samples. Log-probabilities of a prompt have other rows, for which
        it fails with the whole engine, or takes the wrong ones. Adapters of the head are few, and refused by this.
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
        """Modules of an adapter that is loaded which nothing of the model takes up: vLLM would pass over them."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(number)
        # Those of experts have been taken apart or put together by then.
        return sorted(name for name in adapter.loras.keys() - manager.modules.keys() if ".experts" not in name)


def spare_the_base_on_cpus() -> None:
    """Has vLLM's operators for CPUs add nothing to rows without an adapter.

    They index the adapters by the slots' numbers, and no adapter is -1: to PyTorch that is the last slot. So the base's
    own requests would be answered with that adapter wherever others run beside them. Rows of zeros add zeros.
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
