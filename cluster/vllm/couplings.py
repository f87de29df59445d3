"""Couplings of the requests in a model runner's slots. The sampler writes them; the speculator reads them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from cluster.vllm.coupling import Coupling


class SlotCouplings:
    """Couplings by slot."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Coupling] = {}
        self.num_changes = 0

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
