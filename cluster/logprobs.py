"""Log-probabilities of tokens, as sent from an engine to a client. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LOGPROBS = 20
"Maximum number of alternatives to a token in a request, as in OpenAI's API and by vLLM's default."


@dataclass(slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities of consecutive tokens, before any shaping.

    `ranks` and `logprobs` have an entry for each token; `top_token_ids` and `top_logprobs` have `width` for each,
    the likeliest first.
    """

    width: int
    ranks: list[int] = field(default_factory=list)  # 1: the most likely token
    logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.logprobs)

    def extend(self, following: TokenLogprobs) -> None:
        """Appends the log-probabilities of the tokens that follow."""
        assert following.width == self.width or not following
        self.ranks += following.ranks
        self.logprobs += following.logprobs
        self.top_token_ids += following.top_token_ids
        self.top_logprobs += following.top_logprobs

    def part(self, start: int, end: int, width: int | None = None) -> TokenLogprobs:
        """Returns those of the tokens from `start` to `end`, with at most `width` of the likeliest."""
        if width is None or width == self.width:
            first, last = start * self.width, end * self.width
            top_token_ids, top_logprobs = self.top_token_ids[first:last], self.top_logprobs[first:last]
            return TokenLogprobs(
                self.width, self.ranks[start:end], self.logprobs[start:end], top_token_ids, top_logprobs
            )
        part = TokenLogprobs(width, self.ranks[start:end], self.logprobs[start:end])
        for index in range(start, min(end, len(self))):
            first = index * self.width
            part.top_token_ids += self.top_token_ids[first : first + width]
            part.top_logprobs += self.top_logprobs[first : first + width]
        return part

    def top(self, index: int) -> list[tuple[int, float]]:
        """Returns the likeliest tokens at the place of token `index`: (token ID, log-probability)."""
        start, end = index * self.width, (index + 1) * self.width
        return list(zip(self.top_token_ids[start:end], self.top_logprobs[start:end], strict=True))


def joined(first: TokenLogprobs | None, second: TokenLogprobs | None) -> TokenLogprobs | None:
    """Returns `first`, extended by `second`; if one is None, the other."""
    if first is None or second is None:
        return first or second
    first.extend(second)
    return first
