"""Compiles the grammars of requests: each once, one at a time, the shortest first. Refusals are kept too."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError, OverloadedError
from cluster.grammars.matcher import CompiledGrammar

if TYPE_CHECKING:
    from cluster.grammars.vocabulary import Vocabulary

_MAX_KEPT = 256  # grammars
_MAX_REFUSED = 1024
_MAX_WAITING = 64


class GrammarCompiler:
    """Compiles in a thread; belongs to one event loop.

    The time that a grammar takes grows with its text, so that many long ones delay a short one by one turn only.
    """

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._folder, self._vocab_size, self._end_token_ids = folder, vocab_size, end_token_ids
        self._vocabulary: Vocabulary | None = None
        self._turns = _Turns()
        self._work: dict[Grammar, asyncio.Task[CompiledGrammar]] = {}
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # least recently used first
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # reasons by the hash of a grammar, oldest first

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar. Raises InvalidRequestError if `grammar` is invalid or too large.

        Raises OverloadedError if too many grammars wait.
        """
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        if (reason := self._refused.get(_hash(grammar))) is not None:
            raise InvalidRequestError(reason)
        work = self._work.get(grammar)
        if work is None:
            if len(self._work) >= _MAX_WAITING:
                raise OverloadedError(f"{_MAX_WAITING} grammars wait to be compiled already; retry later")
            work = self._work[grammar] = asyncio.create_task(self._compile_in_turn(grammar))
            work.add_done_callback(_note_error)
        return await asyncio.shield(work)  # shielded, because other requests may wait for it too

    async def close(self) -> None:
        for work in self._work.values():
            work.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)

    async def _compile_in_turn(self, grammar: Grammar) -> CompiledGrammar:
        async with self._turns.take(len(grammar.text)):
            try:
                compiled = self._kept[grammar] = await asyncio.to_thread(self._compile, grammar)
            except InvalidRequestError as error:
                self._refused[_hash(grammar)] = error.message
                if len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
                raise
            finally:
                del self._work[grammar]
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        # Imported at the first grammar: workers without grammars do not need it.
        from cluster.grammars.matching import compile_grammar
        from cluster.grammars.vocabulary import Vocabulary

        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of_model(self._folder, self._vocab_size, self._end_token_ids)
        return compile_grammar(grammar, self._vocabulary)


class _Turns:
    """Turns of one task at a time."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap of length, arrival and turn
        self._arrivals = count()

    @asynccontextmanager
    async def take(self, length: int) -> AsyncIterator[None]:
        """Waits for a turn; of those that wait, the smallest `length` is next."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (length, next(self._arrivals), turn))
            await turn
        self._is_taken = True
        try:
            yield
        finally:
            waiting = next((turn for turn in self._drain() if not turn.done()), None)
            self._is_taken = waiting is not None
            if waiting is not None:
                waiting.set_result(None)

    def _drain(self) -> Iterator[asyncio.Future[None]]:
        while self._waiting:
            yield heappop(self._waiting)[2]


def _hash(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.form}\n{grammar.text}".encode()).digest()


def _note_error(work: asyncio.Task[CompiledGrammar]) -> None:
    """Marks the error of `work` as retrieved. Otherwise asyncio would log it if no caller waits any more."""
    if not work.cancelled():
        work.exception()
