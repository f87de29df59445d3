"""Which request is in which slot of a model runner: its sampler is told, its speculator needs to know."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from cluster.vllm.coupling import Coupling

_OF_RUNNER: WeakKeyDictionary[object, dict[int, Coupling]] = WeakKeyDictionary()


def couplings_of(all_token_ids: object) -> dict[int, Coupling]:
    """By slot, of the model runner that has this buffer: the one object that vLLM gives to both of them."""
    return _OF_RUNNER.setdefault(all_token_ids, {})
