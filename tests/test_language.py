"""Docstrings, comments and messages are plain engineering English: the rules that a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_SENTENCE_WORDS = 35
_WORDS = re.compile(r"\b(anew|nought|reckon\w*|whoever|whom|so many|so long(?! as)|of which|beside)\b", re.IGNORECASE)
_OF_PEOPLE = re.compile(
    r"\b(told|tells?|says?|said|knows|hears|heard|nobody|anybody|everybody|likewise|stands still)\b", re.IGNORECASE
)  # in messages
_SPEAKERS = {"Reading", "Counter", "Gauge", "Histogram", "Field"}
_SPEAKERS |= {"ArgumentParser", "add_argument", "add_argument_group", "add_parser"}
_LOGGERS = ("logger", "audit")
_RIDDLES = re.compile(r"(Of|What|Whether|From|By)\b")  # docstrings that begin so
_BARE_FIGURE = re.compile(r"(?<![\w.\[*/)])\.\d+(?!\w)")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n")
_CODE = re.compile(r"`[^`]*`")
_TABLE_LINE = re.compile(r"^(?: {4,}| *\||[-*] |\d+\. |\w+ {2,}).*$", re.MULTILINE)


def complaints(text: str, *, is_docstring: bool) -> list[str]:
    """Returns the rules that `text` breaks; code, tables and lists count for words only."""
    plain = _CODE.sub("X", text)
    found = [match.group(0) for match in _WORDS.finditer(plain)]
    if _BARE_FIGURE.search(plain):
        found.append("a figure without a leading zero")
    if is_docstring and (match := _RIDDLES.match(text)):
        found.append(f"begins with {match.group(0)!r}")
    for sentence in _SENTENCE_ENDS.split(_TABLE_LINE.sub("\n", plain)):
        if (length := len(sentence.split())) > MAX_SENTENCE_WORDS:
            found.append(f"a sentence of {length} words")
    return found


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a docstring: the docstrings of a module, and its comments, block by block."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield node.body[0].lineno, docstring, True
    lines, block, last = source.splitlines(), "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), text = token.start, token.string.lstrip("# ")
        stands_alone = not lines[line - 1][:column].strip()
        if block and not (stands_alone and line == last + 1):
            yield last, block, False
            block = ""
        if stands_alone:
            block, last = f"{block} {text}".strip(), line
        else:
            yield line, text, False
    if block:
        yield last, block, False


@pytest.mark.parametrize("folder", ["cluster", "services", "bench", "tests"])
def test_docstrings_and_comments_are_plain(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {complaint}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text, is_docstring in texts(path)
        for complaint in complaints(text, is_docstring=is_docstring)
    ]
    assert found == []


def literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the string literals below `node`; `X` stands for the values of f-strings."""
    if isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from literals(child)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of log lines, raised errors, metrics, options and settings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise) or name.startswith(_LOGGERS) or name.rpartition(".")[2] in _SPEAKERS:
            yield from literals(node)


@pytest.mark.parametrize("folder", ["cluster", "services"])
def test_messages_are_plain(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {complaint}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in messages(path)
        for complaint in [*complaints(text, is_docstring=False), *_OF_PEOPLE.findall(text)]
    ]
    assert found == []


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the paragraphs and list items of a page, without code blocks, tables and links' addresses."""
    text = re.sub(
        r"```.*?```", lambda block: "\n" * block.group(0).count("\n"), page.read_text(encoding="utf-8"), flags=re.S
    )
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=[-*] |\d+\. |\|))", text):
        if not part.startswith("|"):
            yield line, re.sub(r"\]\([^)]*\)", "]", part)
        line += part.count("\n")


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page: Path) -> None:
    found = [
        f"{page.name}:{line}: {complaint}"
        for line, text in paragraphs(page)
        for complaint in complaints(text, is_docstring=False)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("What a target says.", "begins with 'What'"),
        ("Returns it anew.", "anew"),
        ("Accepts .78 of them.", "a figure without a leading zero"),
        (" ".join(["word"] * 36), "a sentence of 36 words"),
    ],
)
def test_each_rule_finds_what_it_is_for(text: str, complaint: str) -> None:
    assert complaints(text, is_docstring=True) == [complaint]


def test_messages_are_found_where_they_are(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('logger.info("one %d", 1)\nraise ValueError(f"two {3} four")\nx = "five"\n')
    assert sorted(messages(module)) == [(1, "one %d"), (2, "two X four")]


@pytest.mark.parametrize("text", ["Returns 0.78.", "Returns `.78`.", "As so long as it runs.", "Besides, it ends."])
def test_what_is_plain_passes(text: str) -> None:
    assert complaints(text, is_docstring=True) == []
