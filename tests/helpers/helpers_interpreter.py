"""Triton's interpreter without what it does again and again.

It replaces the operations of `triton.language` before a kernel begins and puts them back
afterwards. Each call of a function by a kernel does the same, which finds them replaced already
and takes two fifths of all its time. Each operation makes a table of all dtypes to look into, and
each of its results has its type and its shape made anew. And each sum or product of integers is
computed a second time in 64 bits, to see whether it overflows: at the sizes of tests no place in
memory can, and what overflows on purpose, as hashes do, does so on a device, too.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

TENSOR = {"handle", "shape", "numel", "type", "dtype"}
"""What one of the interpreter's tensors holds, in the versions that are known here."""


def spare_repetitions() -> None:
    """Let a process's interpreter prepare once per launch. Where Triton has other insides than
    those known here it stays as it is."""
    from triton import language
    from triton.runtime import interpreter

    _take_single_numbers(interpreter)
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
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    if set(vars(language.core.tensor(None, language.core.int32))) == TENSOR:
        _keep_types(language.core)
        if hasattr(language, "semantic") and hasattr(language.semantic, "TritonSemantic"):
            _leave_equal_shapes(language.semantic.TritonSemantic)


def _take_single_numbers(interpreter: Any) -> None:
    """Triton 3.6 makes bounds of loops of arrays of one number, which numpy no longer allows."""
    own = interpreter._patch_lang_tensor

    @functools.wraps(own)
    def patch(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if not hasattr(own, "__wrapped__"):
        interpreter._patch_lang_tensor = patch


def _by_name(own: Any) -> Any:
    """The numpy dtype of a type, kept by the type's name."""
    known: dict[str, Any] = {}

    @functools.wraps(own)
    def dtype_of(kind: Any) -> Any:
        if (found := known.get(kind.name)) is None:
            found = known[kind.name] = own(kind)
        return found

    return dtype_of


def _keep_types(core: Any) -> None:
    """Make the type of blocks of a shape, and what tensors hold of that shape, once."""
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    begin_type, begin_tensor = core.block_type.__init__, core.tensor.__init__

    def begun_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, getattr(element_ty, "address_space", 0),
               getattr(element_ty, "const", False), *(getattr(n, "value", n) for n in shape))
        if (found := types.get(key)) is None:
            begin_type(self, element_ty, shape)
            found = types[key] = dict(vars(self))
        vars(self).update(found)

    def begun_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if (found := shapes.get(key)) is None:
            begin_tensor(self, handle, type)
            found = shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    core.block_type.__init__ = begun_type
    core.tensor.__init__ = begun_tensor


def _leave_equal_shapes(semantic: Any) -> None:
    """Broadcast nothing where both have one shape, which `_keep_types` has made once."""
    own = semantic.broadcast_impl_value

    @functools.wraps(own)
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else own(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast
