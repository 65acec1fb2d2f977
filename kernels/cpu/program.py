"""Records the calls of C kernels, to repeat them all in one call (`program.c`).

A call is recorded as it is made, with its numbers and addresses. So whatever lies behind an address
may change from run to run; numbers may not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int64
from typing import Any

from actorium.kernels.cpu.native_library import SIGNATURES

SLOTS = 21
"""Arguments that a call can have."""


class NotRecordable(Exception):
    """What was run is nothing that a program can repeat; its words say what."""


class _Slot(ctypes.Union):
    _fields_ = (("i", c_int64), ("f", c_double))


class KernelCall(ctypes.Structure):
    """`struct op` of `program.c`."""

    _fields_ = (("kind", c_int64), ("arguments", _Slot * SLOTS))


CALL_BYTES = ctypes.sizeof(KernelCall)


class Program:
    """Calls that were recorded."""

    def __init__(self, lib: ctypes.CDLL, address: int, calls: list[KernelCall],
                 threads: int, held: object = None) -> None:
        """address: of memory for the operations, `CALL_BYTES` each, that stays theirs; held:
        kept alive with the program."""
        self._held = held
        (KernelCall * len(calls)).from_address(address)[:] = calls
        self._run, self.count = lib.run_program, len(calls)
        self._arguments = (address, len(calls), threads)

    def replay(self) -> None:
        """Make them all again, in order."""
        self._run(*self._arguments)


class CallRecorder:
    """Records what is called of a library."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self._calls: list[KernelCall] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Meanwhile every call that returns is recorded. Raises `NotRecordable` from within where a
        kernel is called that programs do not know."""
        functions = {name: getattr(self._lib, name) for name in SIGNATURES}
        for name, function in functions.items():
            function.errcheck = self._hook(name)
        try:
            yield
        finally:
            for function in functions.values():
                del function.errcheck

    @property
    def bytes(self) -> int:
        """What the program's operations take."""
        return len(self._calls) * CALL_BYTES

    def program(self, threads: int, address: int, held: object = None) -> Program:
        """What was recorded; threads: that share its work; address: of `bytes` for it; held: kept
        alive with it."""
        return Program(self._lib, address, self._calls, threads, held)

    def _hook(self, name: str) -> Any:
        kind = self._lib.program_kind(name.encode())
        types: list[Any] = SIGNATURES[name]  # type: ignore[assignment]

        def record(result: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
            if kind < 0:
                raise NotRecordable(f"the kernel {name}")
            self._calls.append(_operation(kind, types, arguments))
            return result

        return record


def _operation(kind: int, types: list[Any], arguments: tuple[Any, ...]) -> KernelCall:
    made = KernelCall(kind)
    for slot, kind_of, value in zip(made.arguments, types, arguments, strict=False):
        if kind_of is c_float:
            slot.f = float(value)
        else:
            slot.i = int(value or 0)
    return made
