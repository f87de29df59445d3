"""Couplings of the requests in a model runner's slots. Its sampler writes them and its speculator reads them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from cluster.vllm.coupling import Coupling

_OF_RUNNER: WeakKeyDictionary[object, dict[int, Coupling]] = WeakKeyDictionary()


def couplings_of(all_token_ids: object) -> dict[int, Coupling]:
    """Returns the couplings by slot of the model runner that has the buffer `all_token_ids`.

    This buffer is the one object that vLLM gives to both the sampler and the speculator.
    """
    return _OF_RUNNER.setdefault(all_token_ids, {})
