"""Compiles what the warm-up will need ahead of it, as many kernels at a time as there are cores.

Where Triton's cache on disk is cold, the warm-up would wait for some hundred forms of kernels, one
after the other, for a second or more each. So it is walked through without the device first: no
kernel is launched, and what torch would compute is zeros (see `Zeros`), so that nothing is read or
written that should not be. The forms that it asks for are compiled by threads meanwhile: Triton's
compiler holds the GIL for little of its time. What a walk misses is compiled later, as ever.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from actorium.gpu.models.decoder import Decoder
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.warmup import ReportPhase, dummy_run, warm_up_kernels
from actorium.kernels.ops import Ops

LOG = logging.getLogger(__name__)
MOVES = {"copy_", "_to_copy", "_local_scalar_dense", "record_stream", "_pin_memory", "is_pinned"}
"""Operations that are what they are: the host's arrays go to the device and come back."""


def compile_ahead(runner: ModelRunner, budget: int, report: ReportPhase) -> int:
    """Fills Triton's cache for `warm_up_kernels`, where it lacks a kernel of a step of one token.
    Leaves tables and states empty. Returns how many kernels were compiled.

    budget: tokens of the largest step.
    """
    began, model = perf_counter(), runner.model
    assert isinstance(model, Decoder)
    if model.ops.name != "triton":
        return 0
    report("warming", "compiling")
    try:
        with model.group.alone(), one_of_each(model):
            with compiling() as missed, Zeros():
                dummy_run(runner, 1)
            if not missed:
                return 0
            with compiling() as others, Zeros():
                walk(runner, model.ops, budget)
    except Exception as error:  # the warm-up compiles them, and says what is wrong if it is
        LOG.warning("kernels are compiled one after the other: %s", error)
        runner.reset()
        return 0
    missed += others
    LOG.info("%d kernels compiled in %.1f s", len(missed), perf_counter() - began)
    return len(missed)


@torch.inference_mode()
def walk(runner: ModelRunner, ops: Ops, budget: int) -> None:
    """Asks for every kernel that a start launches from here on."""
    warm_up_kernels(runner, budget, lambda *_: None)
    ops.tune(runner.arrays.device, rehearsal=True)


@contextmanager
def one_of_each(model: Decoder) -> Iterator[None]:
    """The model has one layer of each kind meanwhile, and its last one, which ends otherwise."""
    runs = model.runs
    kinds: dict[Any, Any] = {}
    for run, window in zip(runs[:-1], model.shape.windows, strict=False):
        kinds.setdefault((getattr(run.whole, "__func__", run.whole), window), run)
    model.runs = [*kinds.values(), runs[-1]]
    try:
        yield
    finally:
        model.runs = runs


@contextmanager
def compiling(threads: int = 0) -> Iterator[list[str]]:
    """Launches compile meanwhile, and do nothing else; all of them are done at the end. The kernels
    that were not in the cache. threads: 0 = one for each core."""
    from triton import AsyncCompileMode, knobs
    from triton.runtime.jit import JITFunction

    missed: list[str] = []
    launched: Any = JITFunction.run
    known, knobs.compilation.listener = knobs.compilation.listener, lambda *, src, cache_hit, **_: (
        None if cache_hit else missed.append(src.name))

    def run(this: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launched(this, *args, warmup=True, **options)

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        with _Compilers(threads or min(32, len(os.sched_getaffinity(0)))) as pool, \
                AsyncCompileMode(pool, ignore_errors=True):
            yield missed
    finally:
        JITFunction.run, knobs.compilation.listener = launched, known


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, each with what launches it: Triton 3.6 makes that in C."""

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Any:
        """See `Executor.submit`. work: gives a kernel."""
        from triton.runtime import driver

        def made() -> Any:
            kernel = work(*args, **options)
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(made)


class Zeros(TorchDispatchMode):
    """What torch would compute meanwhile is zeros of the same shape, and nothing is changed in
    place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.is_view or name in MOVES or not tensors and not name.startswith("rand"):
            out = func(*args, **kwargs)
            return out.zero_() if name.startswith("empty") else out
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        device = tensors[0].device if tensors else kwargs.get("device", "cpu")
        on_meta = {"device": "meta", "generator": None}
        more = {name: on_meta[name] for name in kwargs if name in on_meta}
        try:
            out = func(*tree_map_only(Tensor, _shape, args),
                       **tree_map_only(Tensor, _shape, kwargs) | more)
        except NotImplementedError:  # the shape follows from the numbers
            return func(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(
            x.shape, dtype=x.dtype, device=device) if x.is_contiguous() else torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=device).zero_(), out)


def _shape(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@cache
def _composite(func: Any) -> bool:
    """Whether an operation is made of others."""
    return bool(func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd))
