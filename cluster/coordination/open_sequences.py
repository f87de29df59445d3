"""The sequences that are open on a link's stream, which bound what its worker may send."""

from __future__ import annotations

from cluster.coordination.sequence import MAX_WIDTH
from cluster.wire.messages import Open, SpeculateReply, SpeculateRequest

_SPARE_BYTES = 2**16  # of a reply: step times, credit, and proposals for sequences that are closed already
_SEQUENCE_BYTES = 64  # maximum size of a sequence's entries in all columns
_TOKEN_BYTES = 10  # maximum size of a token ID and its parent


class OpenSequences:
    """Follows the messages of one stream."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # maximum bytes of a reply's part for each open sequence, by wire ID
        self.max_reply_bytes = _SPARE_BYTES  # based on the largest number of sequences that were open at once

    def sent(self, request: SpeculateRequest) -> None:
        if request.opens:
            self._sizes.update((wire_id, _max_bytes(entry)) for wire_id, entry in request.opens.items())
            self.max_reply_bytes = max(self.max_reply_bytes, _SPARE_BYTES + sum(self._sizes.values()))
        for wire_id in request.closes:
            self._sizes.pop(wire_id, None)

    def received(self, reply: SpeculateReply) -> None:
        """Removes from `reply` the entries for sequences that are not open."""
        is_open = self._sizes.keys()
        if not reply.proposals.keys() <= is_open:
            reply.proposals = {wire_id: one for wire_id, one in reply.proposals.items() if wire_id in is_open}
        if reply.lost or reply.refused:
            reply.lost &= is_open
            reply.refused &= is_open
            for wire_id in reply.lost | reply.refused:
                del self._sizes[wire_id]


def _max_bytes(entry: Open) -> int:
    # A worker may propose k tokens with any window. Later requests may have another k, which MAX_WIDTH covers.
    num_tokens = MAX_WIDTH * max(1, entry.window, entry.num_owed)
    return _SEQUENCE_BYTES + _TOKEN_BYTES * num_tokens
