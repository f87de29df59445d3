"""An answer that is sent to the client, whole or as server-sent events."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse

from services.router.api.reply import Reply, Usage
from services.router.http.large_work import run_in_thread_if_large
from services.router.output.piece import Piece, merged
from services.router.output.speculation_stats import SpeculationStats

_VALUE_BYTES = 16  # a formatted log-probability takes as long as this many bytes of a body


@dataclass(frozen=True)
class Answer:
    """The pieces of all choices, and the reply that formats them."""

    reply: Reply
    pieces: AsyncGenerator[tuple[int, Piece], None]
    num_choices: int
    prompt_lens: Sequence[int]  # tokens of each prompt, which its choices share

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_lens)

    def prompt_len(self, index: int) -> int:
        """Returns the number of tokens of the prompt of choice `index`."""
        return self.prompt_lens[index * len(self.prompt_lens) // self.num_choices]

    def num_cached_tokens(self, index: int, choice: Piece) -> int:
        """Returns the number of cached prompt tokens that `choice` reports.

        Of the choices that share a prompt only the first reports them; the others return 0.
        """
        return choice.num_cached_tokens if index * len(self.prompt_lens) % self.num_choices == 0 else 0

    async def whole(self, headers: Mapping[str, str]) -> JSONResponse:
        """Returns an answer that is not streamed. Raises OutriderError."""
        pieces_of: list[list[Piece]] = [[] for _ in range(self.num_choices)]
        async with contextlib.aclosing(self.pieces) as pieces:
            async for index, piece in pieces:
                pieces_of[index].append(piece)
        choices = [merged(pieces) for pieces in pieces_of]
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        num_cached_tokens = sum(self.num_cached_tokens(index, choice) for index, choice in enumerate(choices))
        num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
        usage = Usage(self.num_prompt_tokens, num_tokens, num_cached_tokens, num_reasoning_tokens)
        return await run_in_thread_if_large(
            sum(map(_cost_of, choices)), lambda: JSONResponse(self.reply.whole(choices, usage), headers=headers)
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer. Raises OutriderError if the answer fails."""
        reply = self.reply
        num_tokens, num_cached_tokens, num_reasoning_tokens = ([0] * self.num_choices for _ in range(3))
        speculation: SpeculationStats | None = None  # statistics of the only choice
        started: set[int] = set()  # indices of the choices that have had a piece
        async with contextlib.aclosing(self.pieces) as pieces:
            async for index, piece in pieces:
                num_tokens[index] += len(piece.token_ids)
                num_cached_tokens[index] += self.num_cached_tokens(index, piece)
                num_reasoning_tokens[index] += piece.num_reasoning_tokens
                if self.num_choices == 1:
                    speculation = piece.speculation
                usage = None
                if reply.continuous_usage:
                    counts = num_tokens[index], num_cached_tokens[index], num_reasoning_tokens[index]
                    usage = Usage(self.prompt_len(index), *counts)
                chunks = reply.chunks(index, piece, usage, is_first=index not in started)
                format_all = functools.partial(list[bytes], map(reply.event, chunks))
                for event in await run_in_thread_if_large(_cost_of(piece), format_all):
                    yield event
                started.add(index)
        counts = sum(num_tokens), sum(num_cached_tokens), sum(num_reasoning_tokens)
        for last in reply.ending(Usage(self.num_prompt_tokens, *counts), speculation):
            yield last


def _cost_of(piece: Piece) -> int:
    """Returns the cost of formatting `piece`, as a size of a body."""
    scores = [piece.logprobs, None if piece.prompt is None else piece.prompt.logprobs]
    return _VALUE_BYTES * sum(len(each) * (1 + each.width) for each in scores if each is not None)
