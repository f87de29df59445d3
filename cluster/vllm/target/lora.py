"""Settings of vLLM for targets with LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.workers import TargetConfig
from cluster.errors import ConfigurationError, InvalidRequestError
from cluster.vllm.target.adapter_folder import AdapterFiles

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM supports
_LATER_RANK = 16  # minimum of `max_rank` if adapters may be loaded later; vLLM's default
_NUM_SLOTS = 8
_NUM_LATER = 64


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Maximum rank and numbers of adapters, for which vLLM reserves memory."""

    max_rank: int
    num_slots: int  # adapters per step
    num_adapters: int  # adapters in memory

    @classmethod
    def of(cls, target: TargetConfig) -> LoraLimits:
        """Returns limits with room for the configured adapters, and for later ones if `lora_root` is set.

        Values in `engine_args` take precedence. Raises ConfigurationError if they are too small or vLLM refuses them.
        """
        engine_args, ranks = target.engine_args, listed_ranks(target)
        has_later = target.lora_root is not None
        rank = max((*ranks, _LATER_RANK) if has_later else ranks)
        max_rank = engine_args.get("max_lora_rank", next((known for known in _RANKS if known >= rank), rank))
        if max_rank not in _RANKS:
            raise ConfigurationError(f"vLLM supports max_lora_rank {', '.join(map(str, _RANKS))}, not {max_rank!r}")
        num_adapters = _positive_number(engine_args, "max_cpu_loras", len(ranks) + (_NUM_LATER if has_later else 0))
        num_slots = _positive_number(engine_args, "max_loras", min(num_adapters, _NUM_SLOTS))
        if "max_cpu_loras" not in engine_args:
            num_adapters = max(num_adapters, num_slots)
        if num_adapters < max(len(ranks), num_slots):
            raise ConfigurationError(
                f"target.engine_args.max_cpu_loras {num_adapters} is less than the {len(ranks)} adapters of "
                f"target.lora, or than max_loras {num_slots}"
            )
        return cls(max_rank, num_slots, num_adapters)

    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_lora_rank": self.max_rank,
            "max_loras": self.num_slots,
            "max_cpu_loras": self.num_adapters,
        }


def listed_ranks(target: TargetConfig) -> Sequence[int]:
    """Returns the ranks of the configured adapters. Raises ConfigurationError if one cannot be read."""
    ranks = []
    for name, folder in target.lora.items():
        try:
            ranks.append(AdapterFiles.read(Path(folder).expanduser()).rank)
        except InvalidRequestError as error:
            raise ConfigurationError(f"target.lora {name!r}: {error}") from error
    return ranks


def _positive_number(engine_args: dict[str, Any], name: str, default: int) -> int:
    value = engine_args.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigurationError(f"target.engine_args.{name} has to be 1 or more, not {value!r}")
    return value
