"""Has Triton's interpreter do less of what takes most of its time, which is not numbers but types."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yields faster replacements in the interpreter and in Triton's language: object, attribute, new value.

    They avoid repeated work. At every call from a kernel the interpreter searches all of Triton's language for
    functions to patch, though they are patched already. It looks up NumPy's type for each of Triton's types, and
    builds the Triton type of every block again. It broadcasts blocks that already have the same shape.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, broadcast = interpreter._patch_lang, interpreter.TritonSemantic.broadcast_impl_value
    look_up, numpy_types = interpreter._get_np_dtype, dict[str, Any]()

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [v for v in function.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)]

    def patch_if_needed(function: Any) -> Any:
        is_needed = any(tl.core.is_builtin(language.load) for language in languages(function))
        return patch(function) if is_needed else interpreter._LangPatchScope()

    def numpy_type(of: Any) -> Any:
        if of.scalar.name not in numpy_types:
            numpy_types[of.scalar.name] = look_up(of)
        return numpy_types[of.scalar.name]

    def broadcast_if_needed(semantic: Any, left: Any, right: Any) -> Any:
        is_needed = left.type.is_block() != right.type.is_block() or left.handle.data.shape != right.handle.data.shape
        return broadcast(semantic, left, right) if is_needed else (left, right)

    yield interpreter, "_patch_lang", patch_if_needed
    yield interpreter, "_get_np_dtype", numpy_type
    yield interpreter.TritonSemantic, "broadcast_impl_value", broadcast_if_needed
    yield tl.block_type, "to_ir", lambda block, builder: block
