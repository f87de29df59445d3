"""Version of the wire protocol."""

from __future__ import annotations

WIRE_VERSION = 11
"""Incremented when `protos/` gains something. It only grows; no field changes its number, name, type or meaning, and
an absent field has the meaning from before it existed. So programs of different versions work together, and
no decision depends on this number: it shows people which programs are behind, at the router's `/health`.

1: everything before workers reported their version; on the wire that is 0.
2: descriptions report draining, stalls, traits and advertised addresses; `Target.Generate`, which no router
called, is gone.
3: a draft worker reports the fingerprint of its model.
4: a request names its trace.
5: requests have constraints, stop tokens, log-probabilities, a salt, a priority and an adapter; openings have the root
of a cache; descriptions report the adapters, and targets load and unload them.
6: replies report which of their tokens came from which round; targets can be observed.
7: a draft worker reports how many rows its step had, and whether it was the first of a proposal.
8: a draft worker sends early drafts in parts, if a sequence's opening allows it.
9: a request names its owner.
10: a request has a limit of the time per output token.
11: a draft worker loads another version of its draft.
"""
