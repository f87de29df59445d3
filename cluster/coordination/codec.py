"""Messages to and from the wire's protobufs (protos/speculation/v1/draft.proto)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.coordination.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest
from cluster.speculation.drafts import Drafts, chain, is_chain
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from protos.speculation.v1 import draft_pb2, types_pb2


def encode_sampling(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias_token_ids=[token for token, _ in params.logit_bias],
        logit_bias_values=[bias for _, bias in params.logit_bias],
    )


def decode_sampling(params: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(zip(params.logit_bias_token_ids, params.logit_bias_values, strict=True)),
    )


def encode_request(request: SpeculateRequest) -> draft_pb2.SpeculateRequest:
    message = draft_pb2.SpeculateRequest(
        open=[_encode_open(entry) for entry in request.opens.values()], close=request.closes
    )
    if request.advances:
        advances = request.advances.values()
        message.advance.CopyFrom(
            draft_pb2.Advance(
                sequences=request.advances.keys(),
                bases=[entry.base for entry in advances],
                lengths=[len(entry.token_ids) for entry in advances],
                token_ids=[token for entry in advances for token in entry.token_ids],
                num_speculative_tokens=[entry.num_speculative_tokens for entry in advances],
            )
        )
    return message


def decode_request(message: draft_pb2.SpeculateRequest) -> SpeculateRequest:
    """Raises ValueError when the columns of the message do not fit together."""
    columns = message.advance
    entries = zip(
        columns.sequences,
        columns.bases,
        _split(columns.token_ids, columns.lengths),
        columns.num_speculative_tokens,
        strict=True,
    )
    return SpeculateRequest(
        opens={entry.sequence: _decode_open(entry) for entry in message.open},
        advances={sequence: Advance(sequence, base, token_ids, k) for sequence, base, token_ids, k in entries},
        closes=set(message.close),
    )


def encode_reply(reply: SpeculateReply) -> draft_pb2.SpeculateReply:
    message = draft_pb2.SpeculateReply(lost=reply.lost, refused=reply.refused)
    if reply.proposals:
        proposals = reply.proposals.values()
        message.proposals.CopyFrom(
            draft_pb2.Proposals(
                sequences=reply.proposals.keys(),
                bases=[entry.base for entry in proposals],
                lengths=[len(entry.token_ids) for entry in proposals],
                token_ids=[token for entry in proposals for token in entry.token_ids],
                parents=_encode_parents([entry.drafts for entry in proposals]),
            )
        )
    return message


def decode_reply(message: draft_pb2.SpeculateReply) -> SpeculateReply:
    """Raises ValueError when the columns of the message do not fit together."""
    columns = message.proposals
    entries = zip(
        columns.sequences,
        columns.bases,
        _split(columns.token_ids, columns.lengths),
        _decode_parents(columns.parents, columns.lengths),
        strict=True,
    )
    return SpeculateReply(
        proposals={
            sequence: Proposal(sequence, base, token_ids, parents) for sequence, base, token_ids, parents in entries
        },
        lost=set(message.lost),
        refused=set(message.refused),
    )


def _encode_open(entry: Open) -> draft_pb2.Open:
    return draft_pb2.Open(
        sequence=entry.sequence,
        token_ids=entry.token_ids,
        num_prompt_tokens=entry.num_prompt_tokens,
        sampling=encode_sampling(entry.params),
        noise_key=types_pb2.NoiseKey(low=entry.noise_key.low, high=entry.noise_key.high),
        num_speculative_tokens=entry.num_speculative_tokens,
        window=entry.window,
    )


def _decode_open(entry: draft_pb2.Open) -> Open:
    return Open(
        sequence=entry.sequence,
        token_ids=list(entry.token_ids),
        num_prompt_tokens=entry.num_prompt_tokens,
        params=decode_sampling(entry.sampling),
        noise_key=NoiseKey(low=entry.noise_key.low, high=entry.noise_key.high),
        num_speculative_tokens=entry.num_speculative_tokens,
        window=entry.window,
    )


def _encode_parents(proposals: Sequence[Drafts]) -> list[int]:
    """The column of parents: none when all proposals are chains."""
    if all(drafts.parents is None for drafts in proposals):
        return []
    return [
        parent + 1
        for drafts in proposals
        for parent in (chain(len(drafts)) if drafts.parents is None else drafts.parents)
    ]


def _decode_parents(column: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int] | None]:
    if not column:
        yield from (None for _ in lengths)
        return
    for entry in _split(column, lengths):
        if any(number > node for node, number in enumerate(entry)):
            raise ValueError("a draft token comes before the one it follows")
        parents = [number - 1 for number in entry]
        yield None if is_chain(parents) else parents


def _split(token_ids: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Cuts a flattened column back into its entries."""
    if sum(lengths) != len(token_ids):
        raise ValueError(f"lengths add up to {sum(lengths)} but there are {len(token_ids)} values")
    start = 0
    for length in lengths:
        yield list(token_ids[start : start + length])
        start += length
