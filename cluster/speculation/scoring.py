"""Log-probabilities of tokens under raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.logprobs import TokenLogprobs

_VALUES_AT_ONCE = 2**24  # float32 values to process at once: 64 MiB for each copy


def token_logprobs(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], width: int) -> TokenLogprobs:
    """Returns the float32 log-probabilities of `token_ids` and of the `width` likeliest tokens, for each of `rows`.

    `rows` index `logits` [num_rows, vocab_size]; `token_ids` has one token for each of them. Among equals the lowest ID
    comes first. A token's rank counts the tokens that are likelier than it.
    """
    scores = TokenLogprobs(width)
    num_at_once = max(1, _VALUES_AT_ONCE // logits.shape[-1])
    for start in range(0, len(rows), num_at_once):
        part = slice(start, start + num_at_once)
        scores.extend(_score(logits[rows[part]].to(torch.float32), token_ids[part], width))
    return scores


def _score(logits: torch.Tensor, token_ids: Sequence[int], width: int) -> TokenLogprobs:
    logprobs = _log_softmax(logits)
    if logprobs[:, 0].isnan().any():  # a row has logits of +inf, which share the whole probability
        infinite = logits == torch.inf
        shares = torch.where(infinite, 0.0, -torch.inf)
        logprobs = _log_softmax(torch.where(infinite.any(dim=-1, keepdim=True), shares, logits))
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    scores = TokenLogprobs(width, ranks.tolist(), chosen[:, 0].tolist())
    if width:
        # topk does not define which of equal values it returns: one more than requested reveals ties.
        values, order = logprobs.topk(min(width + 1, logprobs.shape[-1]), dim=-1)
        if (values[:, 1:] == values[:, :-1]).any():
            values, order = logprobs.sort(dim=-1, descending=True, stable=True)
        scores.top_token_ids = order[:, :width].flatten().tolist()
        scores.top_logprobs = values[:, :width].flatten().tolist()
    return scores


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities; on a CPU from double precision, as those of float32 differ between processors."""
    if logits.device.type != "cpu":
        return logits.log_softmax(dim=-1)
    return logits.double().log_softmax(dim=-1).float()
