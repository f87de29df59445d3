"""A draft worker that means harm: `python -m tests.system.vllm.wrong_draft HOST:PORT FINGERPRINT KIND`.

KIND is `garbage` (too many tokens, some outside the vocabulary, for sequences that are not there, too) or `silent`
(takes everything and never answers).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.wire.codec import decode_request, encode_reply
from cluster.wire.messages import Proposal, SpeculateReply
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2

GARBAGE = [5, 2**31, 7, 4_000_000_000, *range(300)]


class WrongDraft(draft_pb2_grpc.DraftServicer):
    def __init__(self, fingerprint: str, kind: str) -> None:
        self._fingerprint = fingerprint
        self._kind = kind

    async def Describe(self, request: types_pb2.DescribeRequest, context: Any) -> draft_pb2.DraftDescription:
        model = types_pb2.ModelDescription(name=self._kind, tokenizer_fingerprint=self._fingerprint)
        return draft_pb2.DraftDescription(model=model)

    async def Speculate(
        self, requests: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateReply]:
        lengths: dict[int, int] = {}
        async for message in requests:
            request = decode_request(message)
            lengths |= {wire_id: len(opened.token_ids) for wire_id, opened in request.opens.items()}
            lengths |= {wire_id: a.base + len(a.token_ids) for wire_id, a in request.advances.items()}
            if self._kind == "garbage":
                proposals = {wire_id: Proposal(wire_id, length, GARBAGE) for wire_id, length in lengths.items()}
                proposals[2**40] = Proposal(2**40, 3, GARBAGE)
                yield encode_reply(SpeculateReply(proposals=proposals))


async def main(address: str, fingerprint: str, kind: str) -> None:
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServicer_to_server(WrongDraft(fingerprint, kind), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
