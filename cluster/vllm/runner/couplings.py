"""State that sampling, drafting and steps of a V2 model runner share: couplings by slot, and the mask of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cluster.vllm.coupling import Coupling

if TYPE_CHECKING:
    import torch


class SlotCouplings:
    """Couplings by slot."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Coupling] = {}
        self.num_changes = 0
        self.mask: Callable[[torch.Tensor], None] | None = None  # excludes tokens from the logits that are sampled next

    def get(self, slot: int) -> Coupling | None:
        """Returns the coupling in `slot`; None if the request has none, such as a warm-up request of vLLM."""
        return self._by_slot.get(slot)

    def put(self, slot: int, coupling: Coupling | None) -> None:
        self.num_changes += 1
        if coupling is None:
            self._by_slot.pop(slot, None)
        else:
            self._by_slot[slot] = coupling


_OF_RUNNER: WeakKeyDictionary[object, SlotCouplings] = WeakKeyDictionary()


def couplings_of(all_token_ids: object) -> SlotCouplings:
    """Returns the couplings of the model runner that has the buffer `all_token_ids`.

    The buffer identifies the runner, because it is the only object that both the sampler and the speculator get.
    """
    return _OF_RUNNER.setdefault(all_token_ids, SlotCouplings())


def known_couplings(all_token_ids: object) -> SlotCouplings | None:
    """Returns the couplings of the model runner that has `all_token_ids`; None if its sampling is not coupled."""
    return _OF_RUNNER.get(all_token_ids)
