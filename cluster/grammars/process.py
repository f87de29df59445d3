"""The process in which grammars are compiled, so that a bad grammar harms no other process.

    python -m cluster.grammars.process FOLDER VOCAB_SIZE [END_TOKEN_ID ...]

The process first writes a frame with the vocabulary in xgrammar's format. It answers each request `{"form": ...,
"text": ...}` with `{"error": ...}` or `{}`. After `{}` it writes the grammar in a separate frame, because the grammar
may have many megabytes: a line with its form, then xgrammar's format.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xgrammar

from cluster.constraints import MAX_WHITESPACE, GrammarForm
from cluster.errors import InvalidRequestError
from cluster.grammars.frames import LENGTH, frame
from cluster.grammars.matching import ReadGrammar, Vocabulary, probe
from cluster.grammars.vocabulary import read_vocabulary

_MAX_COMPILED_BYTES = 16 * 2**20
_MAX_MEMORY_BYTES = 2 * 2**30  # in addition to the memory that the process has at the start
_PR_SET_PDEATHSIG = 1


# xgrammar 0.2.8 allows control characters in strings with a length; JSON does not. DEL is excluded too.
_UNSAFE, _SAFE = r"[^\"\\\r\n]", r"[^\x00-\x1f\"\\\x7f]"


def _compile(compiler: xgrammar.GrammarCompiler, grammar: xgrammar.Grammar) -> xgrammar.CompiledGrammar:
    written = str(grammar)
    if _UNSAFE in written:
        grammar = xgrammar.Grammar.from_ebnf(written.replace(_UNSAFE, _SAFE))
    return compiler.compile_grammar(grammar)


def _json_schema(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    return _compile(compiler, xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE))


COMPILE: dict[GrammarForm, Callable[[xgrammar.GrammarCompiler, str], xgrammar.CompiledGrammar]] = {
    "json_schema": _json_schema,
    "regex": lambda compiler, text: compiler.compile_regex(text),
    "ebnf": lambda compiler, text: compiler.compile_grammar(text),
    "structural_tag": lambda compiler, text: _compile(compiler, xgrammar.Grammar.from_structural_tag(text)),
}


def _answer(
    compiler: xgrammar.GrammarCompiler, vocabulary: Vocabulary, form: GrammarForm, text: str
) -> tuple[dict[str, Any], str]:
    try:
        compiled = COMPILE[form](compiler, text)
        if compiled.memory_size_bytes > _MAX_COMPILED_BYTES:
            size = compiled.memory_size_bytes // 2**20
            return {"error": f"the grammar takes {size} MiB, and may take {_MAX_COMPILED_BYTES // 2**20}"}, ""
        grammar = ReadGrammar(compiled, vocabulary, form)
        probe(grammar)
        return {}, grammar.write()
    except InvalidRequestError as error:
        return {"error": error.message}, ""
    except MemoryError:
        return {"error": "the grammar needs too much memory"}, ""
    except Exception as error:  # xgrammar raises several types, with a location in its own source before the reason
        return {"error": str(error).strip().rpartition(".cc:")[2].partition(": ")[2] or str(error).strip()}, ""


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(text: str) -> None:
    sys.stdout.buffer.write(frame(text))
    sys.stdout.buffer.flush()


def _end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends.

    A killed worker closes the pipe, but this process would only detect that after it has compiled the current grammar.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(folder: str, vocab_size: str, *end_token_ids: str) -> None:
    _end_with_parent()
    vocabulary = Vocabulary(read_vocabulary(Path(folder), int(vocab_size), [int(token) for token in end_token_ids]))
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    _limit_memory()
    _write(vocabulary.info.serialize_json())
    while header := sys.stdin.buffer.read(LENGTH.size):
        asked = json.loads(sys.stdin.buffer.read(*LENGTH.unpack(header)))
        answer, grammar = _answer(compiler, vocabulary, asked["form"], asked["text"])
        _write(json.dumps(answer))
        if "error" not in answer:
            _write(grammar)


if __name__ == "__main__":
    main(*sys.argv[1:])
