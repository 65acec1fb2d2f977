"""What the tables of kernels are made of: cases, whether a kernel's result is right, held against
its reference in torch before it is timed, and how it is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention

from .machine import Cuda, tensors

BF16 = torch.bfloat16
Run = Callable[[], Any]


class Truth(NamedTuple):
    kernel: str
    dtype: str
    """Both as in `TOLERANCES`."""
    reference: Run
    """Gives as many tensors as the case's first run does, which comes behind it: what a run changes
    in place it leaves alone."""


class Case(NamedTuple):
    run: Run
    """Gives its results, those that it changes in place among them."""
    truth: Truth
    bytes: float = 0.0
    """Bytes that must be moved at least."""
    flops: float = 0.0
    """Where arithmetic is the limit."""
    peers: Mapping[str, Callable[[], Run]] = {}
    """Each is made when its turn comes: it may fail at that."""
    fp8: bool = False
    """Its arithmetic is FP8's."""


class Setting(NamedTuple):
    device: torch.device
    toy: bool
    ops: Any
    attention: type[TorchAttention | TritonAttention]

    def size(self, full: int, toy: int) -> int:
        return toy if self.toy else full

    def randn(self, *size: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(size, device=self.device, dtype=torch.float32).to(dtype)

    def arange(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.arange(count, device=self.device, dtype=dtype)


Named = Iterator[tuple[str, Callable[[], Case]]]
"""(name of the row, what makes the case): nothing is allocated for a row that is left out."""


def ready(run: Run) -> Callable[[], Run]:
    """Wraps a peer that needs no setup."""
    return lambda: run


SMALL = 0.1
"""Vectors shorter than so much of the usual one are held to that length: what cancels out has no
digits of its own."""
TOLERANCES: Mapping[tuple[str, str], float] = {
    # Results are rounded to bf16 (2**-9); probabilities and what is between two products, too.
    ("product", "bf16"): 0.01, ("attention", "bf16"): 0.02, ("experts", "bf16"): 0.02,
    ("elementwise", "bf16"): 0.01, ("sum of ranks", "bf16"): 0.01,
    # References quantise inputs as kernels do; a number between two codes may become either.
    ("product", "fp8"): 0.02, ("product", "int8"): 0.02, ("product", "int4"): 0.02,
    ("attention", "fp8"): 0.02,
    # Products in tf32 or bf16 within a chunk, sums over all of it.
    ("recurrent", "fp32"): 0.02, ("recurrent", "bf16"): 0.03, ("convolution", "fp32"): 0.01,
    # Share of the tokens: a draw at the edge of two tokens falls as sums are ordered.
    ("draw", "i64"): 0.02, ("likeliest", "i64"): 0.0}
"""The largest allowed `error` by kernel and dtype."""
CUT_OFF = {"fp8": 0.1}
"""The same by dtype for Triton's interpreter, which truncates where hardware rounds."""


def compared(case: Case, interpreted: bool, spoiled: bool = False
             ) -> tuple[float, float]:
    """(error, what is allowed) of the first run of a case beside its reference, which sees what the
    case begins with. spoiled: its last vector is lost on the way, to see that this is noticed."""
    kernel, dtype, reference = case.truth
    allowed = TOLERANCES[kernel, dtype]
    want = tensors(reference())
    got = [own.clone(memory_format=torch.contiguous_format) for own in tensors(case.run())]
    if spoiled:
        floats = got[0].is_floating_point()
        (got[0].view(-1, got[0].shape[-1]) if floats else got[0])[-1] = 0 if floats else -1
    if len(got) != len(want):
        raise AssertionError(f"{len(got)} results, {len(want)} references")
    most = max(error(own, its) for own, its in zip(got, want, strict=True))
    return most, max(allowed, CUT_OFF.get(dtype, 0.0)) if interpreted else allowed


def error(got: Tensor, want: Tensor) -> float:
    """Returns, for floats, the largest distance between two vectors (the last dimension) relative
    to the expected one's norm, infinite where a value is not finite; for integers, the share that
    differs."""
    if got.shape != want.shape:
        raise AssertionError(f"{list(got.shape)} numbers, {list(want.shape)} in the reference")
    if not got.is_floating_point():
        return float((got != want.to(got.dtype)).double().mean())
    got, want = (own.float().reshape(-1, own.shape[-1]) for own in (got, want))
    lengths = torch.linalg.vector_norm(want, dim=-1)
    usual = torch.linalg.vector_norm(lengths) / len(lengths)**0.5
    apart = torch.linalg.vector_norm(got - want, dim=-1)
    most = float((apart / lengths.clamp(min=SMALL * float(usual))).nan_to_num(nan=inf).max()
                 if float(usual) else apart.max())
    return most if bool(got.isfinite().all()) else inf


FLUSH = 128 << 20
"""Bytes written before each timed run, more than twice an H200's L2, so that no run finds there
what the one before has left. It also keeps the device busy while the run is being launched."""
TIMED_S = 0.03
"""Seconds one kernel is timed for, over all its runs."""


class Timer:
    def __init__(self, machine: Cuda) -> None:
        self._machine = machine
        self._flush = torch.empty(1 << 10 if machine.toy else FLUSH, dtype=torch.uint8,
                                  device=machine.device)

    def us(self, *runs: Callable[[], Any]) -> float:
        """Microseconds of these runs in sequence, each replayed from a graph of its own, so that
        launching is not in it: they must not wait for the device. Raises `CaptureFailed`."""
        graphs = [self._machine.captured(run) for run in runs]
        return self._median_us(lambda: [replay() for replay in graphs])

    def launched_us(self, run: Callable[[], Any]) -> float:
        """Microseconds of a run launched by the host, including the wait."""
        return self._median_us(run)

    def _median_us(self, run: Callable[[], Any]) -> float:
        rounds = self._machine.rounds
        first = self._device_us(run, rounds.first)
        if self._machine.toy:
            return first
        times = round(TIMED_S * 1e6 / max(first, 1.0))
        return self._device_us(run, max(rounds.least, min(rounds.most, times)))

    def _device_us(self, run: Callable[[], Any], times: int) -> float:
        event = self._machine.event
        marks = [(event(), event()) for _ in range(times)]
        for start, end in marks:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        self._machine.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e3
