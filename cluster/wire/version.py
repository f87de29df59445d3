"""Which version of the wire a program speaks."""

from __future__ import annotations

WIRE_VERSION = 8
"""Counted up whenever `protos/` gains something. It only grows: no field changes its number, name, type or meaning, and
a field that is absent means what was so before there was one. So programs of different versions work together, and
nothing is decided by this number: it tells people which programs are behind, at the router's `/health`.

1: everything before workers told their version; on the wire that is 0.
2: descriptions tell of draining, standing still, traits and advertised addresses; `Target.Generate`, which no router
called, is gone.
3: a draft worker tells the fingerprint of its model.
4: a request says which trace it belongs to.
5: requests have constraints, stop tokens, log-probabilities, a salt, a priority and an adapter; openings have the root
of a cache; descriptions tell the adapters, and targets load and unload them.
6: replies tell which of their tokens came of which round; targets can be observed.
7: a draft worker tells how many rows its step had, and whether it was the first of a proposal.
8: a draft worker sends what it drafts ahead in parts, if a sequence's opening says that they are taken.
"""
