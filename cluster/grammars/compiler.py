"""Compiles the grammars of requests one at a time, short ones first."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError, OverloadedError
from cluster.grammars.matcher import CompiledGrammar

if TYPE_CHECKING:
    from cluster.grammars.matching import Rulebook
    from cluster.grammars.vocabulary import Vocabulary

_MAX_KEPT_CHARACTERS = 64 * 2**20  # of rules
_MAX_REFUSED = 1024
_MAX_WAITING = 64
_PATIENCE = 2048  # characters


class GrammarCompiler:
    """Compiles in a thread; belongs to one event loop.

    The time that a grammar takes grows with its text, so short grammars go first. Each later arrival adds `_PATIENCE`
    characters to its place, so that long ones are not starved. Rules and refusals are cached. Rules are compiled for
    each call; calls that wait for the same grammar share the result.
    """

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._folder, self._vocab_size, self._end_token_ids = folder, vocab_size, end_token_ids
        self._vocabulary: Vocabulary | None = None
        self._waiting: list[tuple[int, int, Grammar]] = []  # a heap of place, arrival and grammar
        self._num_arrived = 0
        self._running: asyncio.Task[None] | None = None
        self._work: dict[Grammar, asyncio.Future[CompiledGrammar]] = {}
        self._kept: OrderedDict[Grammar, Rulebook] = OrderedDict()  # least recently used first
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # reasons by the hash of a grammar, oldest first

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar. Raises InvalidRequestError if `grammar` is invalid or too large.

        Raises OverloadedError if too many grammars wait.
        """
        if (reason := self._refused.get(_hash(grammar))) is not None:
            raise InvalidRequestError(reason)
        work = self._work.get(grammar)
        if work is None:
            if len(self._work) >= _MAX_WAITING:
                raise OverloadedError(f"{_MAX_WAITING} grammars wait to be compiled already; retry later")
            work = self._work[grammar] = asyncio.get_running_loop().create_future()
            place = len(grammar.text) + _PATIENCE * self._num_arrived
            heappush(self._waiting, (place, self._num_arrived, grammar))
            self._num_arrived += 1
            if self._running is None:
                self._running = asyncio.create_task(self._run())
        return await asyncio.shield(work)  # shielded, because other requests may wait for it too

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for work in self._work.values():
            work.cancel()

    async def _run(self) -> None:
        """Compiles all that wait."""
        while self._waiting:
            _, _, grammar = heappop(self._waiting)
            try:
                result = await asyncio.to_thread(self._compile, grammar)
            except Exception as error:
                if isinstance(error, InvalidRequestError):
                    self._refused[_hash(grammar)] = error.message
                    if len(self._refused) > _MAX_REFUSED:
                        self._refused.popitem(last=False)
                work = self._work.pop(grammar)
                work.set_exception(error)
                work.exception()  # retrieved: otherwise asyncio would log it if no caller waits any more
            else:
                self._work.pop(grammar).set_result(result)
        self._running = None

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        # Imported at the first grammar: workers without grammars do not need it.
        from cluster.grammars.matching import compile_rulebook, write_rulebook
        from cluster.grammars.vocabulary import Vocabulary

        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of_model(self._folder, self._vocab_size, self._end_token_ids)
        rulebook = self._kept.pop(grammar, None) or write_rulebook(grammar, self._vocabulary)
        self._kept[grammar] = rulebook
        while len(self._kept) > 1 and sum(len(kept.rules) for kept in self._kept.values()) > _MAX_KEPT_CHARACTERS:
            self._kept.popitem(last=False)
        return compile_rulebook(rulebook, self._vocabulary)


def _hash(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.form}\n{grammar.text}".encode()).digest()
