"""Chat-shaped training text: a request made from a function's docstring, answered by its source.

A model that never saw the chat markers would treat them as noise and never end a turn.
"""

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterable, Iterator

from bench.factory.corpus import Document

USER_START = "<|im_start|>user\n"
ASSISTANT_START = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>\n"
_MIN_SUMMARY_CHARACTERS = 20
_MAX_ANSWER_LINES = 60


def dialogues(documents: Iterable[Document], limit_bytes: int) -> list[Document]:
    """Make dialogues from documents, taken in a fixed pseudo-random order, up to a total size."""
    python = [document for document in documents if document.path.endswith(".py")]
    python.sort(key=lambda document: hashlib.sha256(document.path.encode()).digest())
    made: list[Document] = []
    for document in python:
        for text in _from_source(document.text):
            limit_bytes -= len(text.encode())
            if limit_bytes < 0:
                return made
            made.append(Document(document.path, text, is_dialogue=True))
    return made


def _from_source(source: str) -> Iterator[str]:
    if "<|" in source:
        return  # it might contain a marker
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources contain invalid escape sequences
            module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        summary = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
        answer = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if len(summary) < _MIN_SUMMARY_CHARACTERS or answer.count("\n") >= _MAX_ANSWER_LINES:
            continue
        request = f"Write a Python function `{node.name}`. {summary}"
        yield f"{USER_START}{request}{TURN_END}{ASSISTANT_START}{answer}{TURN_END}"
