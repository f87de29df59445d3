"""Compiles the grammars of requests for matchers: each once, in bounded time. Refusals are kept too."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.constraints import Grammar
from cluster.errors import InternalError, InvalidRequestError, OverloadedError
from cluster.grammars.frames import LENGTH, frame
from cluster.grammars.matcher import CompiledGrammar

if TYPE_CHECKING:
    from cluster.grammars.matching import Vocabulary

logger = logging.getLogger(__name__)

# Maximum processor time for up to 50,000 tokens; grows in proportion to larger vocabularies.
_COMPILE_SECONDS = 5.0
_VOCAB_SIZE = 50_000
_WAIT_SECONDS = 60.0  # maximum time for the answer to one grammar
_LOOK_SECONDS = 0.1  # interval between two checks of a grammar's compile time
_START_SECONDS = 60.0  # mostly imports
_MAX_KEPT_BYTES = 128 * 2**20  # size of the kept grammars in serialized form; in memory they take about as much again
_MAX_WAITING = 64
_MAX_REFUSED = 1024
_MAX_REASON_CHARACTERS = 500  # xgrammar quotes texts of clients


@dataclass
class _Work:
    """A grammar that is being compiled, or waits to be compiled."""

    result: asyncio.Task[CompiledGrammar]
    num_waiting: int = 0  # requests
    has_begun: bool = False


class GrammarCompiler:
    """Compiles in a separate process, one grammar at a time; belongs to one event loop.

    The process starts with the first grammar. It is killed if a grammar takes too much time or memory.
    """

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._compile_seconds = _COMPILE_SECONDS * max(1.0, vocab_size / _VOCAB_SIZE)
        self._arguments = [str(folder), str(vocab_size), *map(str, end_token_ids)]
        self._process: asyncio.subprocess.Process | None = None
        self._matching: Any = None  # the module
        self._written = ""  # the vocabulary
        self._vocabulary: Vocabulary | None = None
        self._turn = asyncio.Lock()
        self._work: dict[Grammar, _Work] = {}
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
            work = self._work[grammar] = _Work(asyncio.create_task(self._compile_in_turn(grammar)))
            work.result.add_done_callback(_note_error)
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.result)  # shielded, because other requests may wait for it too
        finally:
            work.num_waiting -= 1
            # A compilation that has begun continues even if no request waits for it. Only killing the process can stop
            # it, and restarting the process takes longer than almost every compilation.
            if not work.num_waiting and not work.has_begun:
                work.result.cancel()
                del self._work[grammar]  # the task ends later, but the next request must start a new one

    async def _compile_in_turn(self, grammar: Grammar) -> CompiledGrammar:
        async with self._turn:
            self._work[grammar].has_begun = True
            try:
                compiled = await self._compile(grammar)
            finally:
                del self._work[grammar]
        self._keep(grammar, compiled)
        return compiled

    def _refusal(self, grammar: Grammar, reason: str) -> InvalidRequestError:
        """Returns the error for a grammar that is at fault, not the machine, and keeps it."""
        self._refused[_hash(grammar)] = reason[:_MAX_REASON_CHARACTERS]
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return InvalidRequestError(self._refused[_hash(grammar)])

    async def close(self) -> None:
        results = [work.result for work in self._work.values()]
        for result in results:
            result.cancel()
        await asyncio.gather(*results, return_exceptions=True)
        if self._process is not None:
            await self._end(self._process)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._kept[grammar] = compiled
        while len(self._kept) > 1 and sum(len(kept.written) for kept in self._kept.values()) > _MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        process = await self._started()
        asked = frame(json.dumps({"form": grammar.form, "text": grammar.text}))
        has_answered = False
        try:
            answer, written = await self._ask_in_time(process, asked)
            has_answered = True
        except TimeoutError:
            raise self._refusal(
                grammar, f"the grammar takes longer than {self._compile_seconds:g} s to compile: make it simpler"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise InvalidRequestError(
                "the grammar cannot be compiled: it is too deep, or needs too much memory"
            ) from None
        finally:
            if not has_answered:  # after any exception: a late answer must not be taken for that of the next grammar
                await self._end(process)
        if "error" in answer:
            reason = f"the grammar cannot be used: {answer['error'] or 'xgrammar reports no reason'}"
            raise self._refusal(grammar, reason)
        assert self._vocabulary is not None
        # In a thread, because reading an answer of many megabytes takes seconds and would block the event loop.
        compiled = await asyncio.to_thread(self._matching.read_compiled, written, self._vocabulary)
        return CompiledGrammar(partial(self._matching.make_matcher, compiled), written, self._written)

    async def _ask_in_time(self, process: asyncio.subprocess.Process, asked: bytes) -> tuple[dict[str, Any], str]:
        """Returns the result of `_ask`.

        Raises TimeoutError if `process` uses too much time, and OverloadedError if it does not answer.
        """
        asking = asyncio.create_task(self._ask(process, asked))
        started_at, loop = _processor_seconds(process), asyncio.get_running_loop()
        until = loop.time() + _WAIT_SECONDS
        try:
            while not (await asyncio.wait((asking,), timeout=_LOOK_SECONDS))[0]:
                if _processor_seconds(process) > started_at + self._compile_seconds:
                    raise TimeoutError
                if loop.time() > until:
                    raise OverloadedError(f"the grammar was not compiled within {_WAIT_SECONDS:g} s; retry later")
            return asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, process: asyncio.subprocess.Process, asked: bytes) -> tuple[dict[str, Any], str]:
        """Returns the child's report, and the compiled grammar if there is one."""
        assert process.stdin is not None
        process.stdin.write(asked)
        await process.stdin.drain()
        answer = json.loads(await _read(process))
        return answer, "" if "error" in answer else (await _read(process)).decode()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cluster.grammars.process",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # discards xgrammar's warnings, which quote text of clients
        )
        try:
            written = (await asyncio.wait_for(_read(process), _START_SECONDS)).decode()
        except BaseException as error:
            await self._end(process)
            if isinstance(error, Exception):
                logger.exception("the process that compiles grammars cannot start")
                raise InternalError("grammars cannot be compiled here") from error
            raise
        if self._vocabulary is None:
            # Imported at the first grammar: the import of xgrammar and transformers takes a second, and workers without
            # grammars do not need them.
            self._matching = await asyncio.to_thread(importlib.import_module, "cluster.grammars.matching")
            self._written = written
            self._vocabulary = self._matching.read_vocabulary(self._written)
        self._process = process
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdout is not None
        # Read the rest of the output: otherwise asyncio does not detect that the process has ended, and waits forever.
        await process.stdout.read()
        await process.wait()


def _hash(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.form}\n{grammar.text}".encode()).digest()


def _note_error(result: asyncio.Task[CompiledGrammar]) -> None:
    """Marks the error of `result` as retrieved. Otherwise asyncio would log it if no caller waits any more."""
    if not result.cancelled():
        result.exception()


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(length)


def _processor_seconds(process: asyncio.subprocess.Process) -> float:
    """Returns the processor time that `process` has used; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
