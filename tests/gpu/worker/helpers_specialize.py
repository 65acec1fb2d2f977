"""Which forms of Triton's kernels launches ask for, without a device.

Triton compiles a kernel once for each form: the constants, the options of the launch, the dtypes,
and what it assumes of the other arguments (an integer is 1, or a multiple of 16; an address is a
multiple of 16). The form of every launch is asked of Triton's own functions, as its launcher does
on a CUDA device. No kernel is run: the interpreter takes milliseconds for each call in it. What
the host and the tables must know of a step is made up by `DOUBLES`, where a kernel needs an entry
that writes what indices or the tables are made of; all else is zeros.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from helpers_graphs import tensors_of
from torch import Tensor

from actorium.gpu.graphs.capture import Replayable
from actorium.kernels.sampling_tables import LIMIT

T = TypeVar("T")

H100 = SimpleNamespace(capability=90, processors=132, shared=227 * 1024)
"""How work is shared out: the interpreter has one processor."""


class Forms:
    """The forms that were asked for: by (kernel, key), how its arguments were specialised."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], str] = {}
        self.launches = 0
        self.paused = False
        """What is launched is not seen by a launcher."""
        self._binders: dict[str, Any] = {}

    @contextmanager
    def recording(self, doubles: bool = True) -> Iterator[Forms]:
        """Take down what is launched meanwhile, as if on an H100. doubles: make up what kernels
        would have done."""
        from triton.runtime.interpreter import InterpretedFunction

        def launcher(this: Any, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                name = _name(this) if self.paused else self.take(this, args, options)
                if doubles and name in DOUBLES:
                    DOUBLES[name](**dict(zip(this.arg_names, args, strict=False)), grid=grid)

            return launch

        with ExitStack() as stack:
            stack.enter_context(patch.object(InterpretedFunction, "__getitem__", launcher))
            for module in [own for name, own in sys.modules.items()
                           if name.startswith("actorium.kernels.triton.")]:
                if hasattr(module, "device_limits"):
                    stack.enter_context(patch.object(module, "device_limits", lambda device: H100))
            if doubles:
                stack.enter_context(patch.object(torch, "empty", torch.zeros))
                stack.enter_context(patch.object(Tensor, "new_empty", Tensor.new_zeros))
            # On a CUDA device the last layer has no other way for the few rows that are wanted.
            stack.enter_context(patch("actorium.gpu.models.forward_context._few",
                                      lambda *_: None))
            yield self

    def take(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """Take down a launch, and name its kernel."""
        from triton.runtime.jit import compute_cache_key

        self.launches += 1
        name = _name(kernel)
        if name not in self._binders:
            self._binders[name] = _binder(kernel)
        function, binder = self._binders[name]
        _, specialised, rest = binder(*args, debug=False, **options)
        key = name, compute_cache_key({}, specialised, rest)
        if key not in self.found:
            named = zip((p.name for p in function.params), specialised, strict=True)
            self.found[key] = ", ".join(f"{own}={_short(form)}" for own, form in named) \
                + f" {rest}"
        return name

    def names(self) -> set[str]:
        """Of the kernels."""
        return {name for name, _ in self.found}

    def beyond(self, known: Forms) -> list[str]:
        """Forms that the other has not, and in what each is unlike the nearest that it has."""
        out = []
        for (name, key), form in self.found.items():
            if (name, key) not in known.found:
                others = [own for (of, _), own in known.found.items() if of == name]
                out.append(f"{name}: {_unlike(form, others)}")
        return out


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def _binder(kernel: Any) -> tuple[Any, Any]:
    """The function that JITFunction.run computes a launch's form with."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    given = getattr(kernel, "kwargs", None)
    function = kernel if given is None else JITFunction(kernel.fn, **given)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return function, create_function_from_signature(function.signature, function.params, backend)


def _short(form: Any) -> str:
    kind, of = form
    return str(of) if kind == "constexpr" else f"{kind}{'' if of is None else ':' + str(of)}"


def _unlike(form: str, others: list[str]) -> str:
    mine = form.split(", ")
    least = min(([part for part in mine if part not in other.split(", ")] for other in others),
                key=len, default=["no other form of it is known"])
    return ", ".join(least)


class Rerun:
    """See `graphs.capture.Capturer`: a replay runs the work again, unseen by the launcher."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms

    def capture(self, run: Callable[[], T]) -> tuple[Replayable, T]:
        """See `graphs.capture.Capturer`."""
        out = run()
        return _Work(run, tensors_of(out), self._forms), out

    def borrow(self, tensor: Tensor) -> Tensor:
        """See `graphs.capture.Capturer`."""
        return tensor


class _Work:
    def __init__(self, run: Callable[[], Any], out: list[Tensor], forms: Forms) -> None:
        self._run, self._out, self._forms = run, out, forms

    @torch.inference_mode()
    def replay(self) -> None:
        self._forms.paused = True
        for own, new in zip(self._out, tensors_of(self._run()), strict=True):
            if own.data_ptr() != new.data_ptr():
                own.copy_(new)
        self._forms.paused = False


# --- what kernels would have done ----------------------------------------------------------------

def _apply(addresses: Any, entries: Any, count: int, **_: Any) -> None:
    """See `kernels.reference.apply_plan`."""
    start = addresses.tolist()
    for table, place, value in entries.numpy()[:, :count].T.tolist():
        ctypes.c_int32.from_address(start[table] + 4 * place).value = value


def _choose(positions: Any, out: Any, vocab: int, **_: Any) -> None:
    """Some token, another one for each place."""
    out.copy_((positions.long() * 7 + 3) % vocab)


def _commit(slots: Any, positions: Any, tokens: Any, record: Any, last_token: Any, seq_len: Any,
            ended: Any, accepted: Any, packed: Any, single: int, q_len: int, **_: Any) -> None:
    """See `triton.commit.commit`; every other draft is accepted, and no token ends anything."""
    for i, slot in enumerate(slots.tolist()):
        first, rows = (i, 1) if i < single else (single + (i - single) * q_len, q_len)
        at, limit = int(positions[first]), int(record[slot, LIMIT])
        more = min((at + slot) % rows, max(0, limit - 1 - at))
        gone, full = bool(ended[slot]), at + more + 1 >= limit
        packed[:, i] = 0
        packed[2:2 + rows, i] = tokens[first:first + rows]
        last_token[slot] = tokens[first + more]
        if gone:
            continue
        packed[0, i], packed[1, i] = more + 1, 2 * full
        seq_len[slot], ended[slot] = at + more + 1, full
        if accepted.numel():
            accepted[slot] = more


def _fill(slots: Any, last_token: Any, seq_len: Any, ended: Any, tokens: Any, positions: Any,
          pages: Any, lens: Any, sampled: Any, row_slots: Any, q_len: int, max_len: int,
          tables: Any, width: int, **_: Any) -> None:
    """See `record.WindowRows`; drafts are token 0, and all keys and values go to the sink."""
    own, place = slots.long(), torch.arange(q_len)
    at = (seq_len[own] - 1)[:, None] + place
    tokens.copy_(torch.where(place > 0, 0, last_token[own][:, None]).view(-1))
    positions.copy_(at.clamp(max=max_len - 1).view(-1))
    sampled.copy_(at.view(-1) + 1)
    row_slots.copy_(slots.repeat_interleave(q_len))
    lens.copy_(torch.where(ended[own], q_len, seq_len[own] + q_len - 1))
    pages.copy_(tables[:, own, :width])


DOUBLES = {"fill._fill": _fill, "apply_plan._apply": _apply, "draw._choose": _choose,
           "commit._commit": _commit}
