"""Triton's interpreter without what it does again and again.

It replaces the operations of `triton.language` before a kernel begins and puts them back
afterwards. Each call of a function by a kernel does the same, which finds them replaced already
and takes two fifths of all its time. And each operation makes a table of all dtypes to look into.
"""

from __future__ import annotations

import functools
from typing import Any


def spare_repetitions() -> None:
    """Let a process's interpreter prepare once per launch. Where Triton has other insides than
    those known here it stays as it is."""
    from triton import language
    from triton.runtime import interpreter

    own = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if own is None or scope_type is None or hasattr(own, "__wrapped__"):
        return
    done: set[tuple[str, ...]] = set()
    """By this launch: the names under which its functions see `triton.language`."""

    class LaunchScope(scope_type):  # type: ignore[misc, valid-type]
        """That of a launch."""

        def restore(self) -> None:
            done.clear()
            super().restore()

    @functools.cache
    def seen_by(fn: Any) -> tuple[str, ...]:
        return tuple(sorted({value.__name__ for value in fn.__globals__.values()
                             if value is language or value is language.core}))

    @functools.wraps(own)
    def patch_lang(fn: Any) -> Any:
        if (key := seen_by(fn)) in done:
            return scope_type()
        found = own(fn)
        if not done:
            found.__class__ = LaunchScope
        done.add(key)
        return found

    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


def _by_name(own: Any) -> Any:
    """The numpy dtype of a type, kept by the type's name."""
    known: dict[str, Any] = {}

    @functools.wraps(own)
    def dtype_of(kind: Any) -> Any:
        if (found := known.get(kind.name)) is None:
            found = known[kind.name] = own(kind)
        return found

    return dtype_of
