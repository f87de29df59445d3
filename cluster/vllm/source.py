"""Reads names, signatures and bodies from vLLM's source without importing it, so that it need not run here."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import tarfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_INDEX = "https://pypi.org/simple/vllm/"
_RELEASE = re.compile(r"vllm-([0-9.]+)\.tar\.gz")  # does not match pre-releases
_LAZY_NAMES = "MODULE_ATTRS"  # dict in vLLM's `__init__`: lazily imported names, with their modules


@dataclass(frozen=True, slots=True)
class Definition:
    """Definition of a name, and the module that contains it."""

    module: str
    node: ast.AST

    @property
    def digest(self) -> str | None:
        """Digest of a function's body or of a class, without docstrings and layout; None for any other definition."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = _canonical(_without_docstring(self.node.body))
        elif isinstance(self.node, ast.ClassDef):
            text = _canonical(self.node)
        else:
            return None
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def fetch_newest(folder: Path) -> Path:
    """Unpacks the source of the newest release into `folder`. Returns the path of the source.

    Raises OSError if PyPI does not answer, or if the archive does not match its hash.
    """
    request = urllib.request.Request(_INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        files = json.load(reply)["files"]
    found = [(_RELEASE.fullmatch(file["filename"]), file) for file in files]
    releases = {tuple(map(int, match[1].split("."))): file for match, file in found if match is not None}
    newest = releases[max(releases)]
    archive = folder / str(newest["filename"])
    urllib.request.urlretrieve(newest["url"], archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != newest["hashes"]["sha256"]:
        raise OSError(f"{newest['url']} does not match the index: its SHA-256 differs")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


class SourceTree:
    """The packages in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._module = functools.cache(self._parse)

    def find(self, module: str, attribute: str) -> Definition | None:
        """Returns the definition of `attribute` in `module`, also if the module imports it; None if there is none.

        `attribute` is a path, as in `InputProcessor.process_inputs`.
        """
        first, *rest = attribute.split(".")
        found = self._in_module(module, first, frozenset())
        for name in rest:
            found = None if found is None else self._member(found, name)
        return found

    def has_module(self, name: str) -> bool:
        return self._module(name) is not None

    def parameters(self, definition: Definition) -> tuple[str, ...]:
        """Returns the parameter names of a function, or of a class's constructor, in order."""
        node = definition.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            starred = [argument for argument in (given.vararg,) if argument is not None]
            doubly = [argument for argument in (given.kwarg,) if argument is not None]
            ordered = [*given.posonlyargs, *given.args, *starred, *given.kwonlyargs, *doubly]
            return tuple(argument.arg for argument in ordered)
        if not isinstance(node, ast.ClassDef):
            return ()
        made = self._member(definition, "__init__")
        return self.parameters(made)[1:] if made is not None else tuple(dict.fromkeys(self._fields(definition)))

    def _fields(self, definition: Definition) -> Iterator[str]:
        assert isinstance(definition.node, ast.ClassDef)
        for base in self._bases(definition):
            yield from self._fields(base)
        for statement in definition.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id

    def _bases(self, definition: Definition) -> Iterator[Definition]:
        assert isinstance(definition.node, ast.ClassDef)
        for base in definition.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                found = self._in_module(definition.module, name.id, frozenset())
                if found is not None and isinstance(found.node, ast.ClassDef):
                    yield found

    def _member(self, definition: Definition, name: str) -> Definition | None:
        if not isinstance(definition.node, ast.ClassDef):
            return None
        for statement in _statements(definition.node.body):
            if name in _names(statement):
                return Definition(definition.module, statement)
        inherited = (self._member(base, name) for base in self._bases(definition))
        return next((found for found in inherited if found is not None), None)

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Definition | None:
        tree = self._module(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        for statement in _statements(tree.body):
            if name in _names(statement):
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):  # another name of it
                    return self._in_module(module, statement.value.id, seen)
                return Definition(module, statement)
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        found = self._in_module(self._imported(module, statement), wanted, seen)
                        if found is not None:
                            return found
            elif _LAZY_NAMES in _names(statement):
                place = _lazy_places(statement).get(name)
                if place is not None:
                    path, _, wanted = place.partition(":")
                    return self._in_module(f"{module}{path}", wanted, seen)
        return None

    def _imported(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        is_package = (self._folder / Path(*module.split(".")) / "__init__.py").is_file()
        package = module.split(".")[: None if is_package else -1]
        package = package[: len(package) - statement.level + 1]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def _parse(self, module: str) -> ast.Module | None:
        path = self._folder / Path(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None


def _canonical(value: object) -> str:
    """Returns a syntax tree as text. Leaves out empty fields, so that the text is the same in all Python versions."""
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = dict(ast.iter_fields(value))
    if isinstance(value, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        fields["body"] = _without_docstring(value.body)
    filled = [f"{name}={_canonical(field)}" for name, field in fields.items() if field not in (None, [])]
    return f"{type(value).__name__}({','.join(filled)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of `body`, including those in branches of `if` and `try`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _statements([*statement.body, *statement.orelse, *statement.finalbody])


def _names(statement: ast.stmt) -> set[str]:
    """Returns the names that `statement` defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _lazy_places(statement: ast.stmt) -> dict[str, str]:
    assigned = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return ast.literal_eval(assigned) if isinstance(assigned, ast.Dict) else {}
