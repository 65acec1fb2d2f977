"""What the parts of `gpu.py` share: time left, rows written as they come, and timing of kernels."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

FLUSH = 128 << 20
"""Bytes written before each timed run, more than twice an H200's L2, so that no run finds there
what the one before has left. It also keeps the device busy while the run is being launched."""
TIMED_S = 0.03
"""Of one kernel, over all its runs."""


class Part:
    """The figures of a part, in a file that is whole after every row: who is stopped in the middle
    has lost nothing."""

    def __init__(self, path: Path, seconds: float, toy: bool) -> None:
        """seconds: it has."""
        self._path, self._until = path, monotonic() + seconds
        self.toy = toy
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.device = torch.device("cpu" if toy else "cuda")
        self.save()

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - monotonic()

    def save(self) -> None:
        """Write all that there is."""
        whole = {"facts": self.facts, "rows": self.rows, "skipped": self.skipped}
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(whole))
        scratch.replace(self._path)

    def add(self, **row: Any) -> None:
        """A row."""
        self.rows.append(row)
        self.save()
        print("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)

    def skip(self, what: str, why: str) -> None:
        """Say what was left out."""
        self.skipped.append(f"{what}: {why}")
        self.save()
        print(f"  left out: {what}: {why}", flush=True)

    @contextmanager
    def trying(self, what: str, needs: float = 0.0) -> Iterator[bool]:
        """A piece that may fail without the others; needs: seconds that it takes. False: there is
        no time for it, and it has been said."""
        if self.left < needs:
            self.skip(what, f"{max(0, self.left):.0f} s are left, it takes {needs:.0f}")
            yield False
            return
        try:
            yield True
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.skip(what, f"{type(error).__name__}: {lines[0][:300]}")
        finally:
            gc.collect()
            if not self.toy:
                torch.cuda.empty_cache()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class CaptureFailed(BaseException):
    """What was to be timed cannot be captured. After that torch's allocator and stream are in no
    state to go on: the part ends, which is a process of its own."""


class Timer:
    """Microseconds of a kernel: the median of runs with cold caches. On a CPU one run."""

    def __init__(self, toy: bool) -> None:
        self._toy = toy
        self._flush = None if toy else torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def us(self, run: Callable[[], Any]) -> float:
        """Of one run, replayed from a CUDA graph, so that launching is not in it: it must not wait
        for the device. Raises `CaptureFailed`."""
        return self._host_us(run) if self._flush is None else self._median_us(self._captured(run))

    def launched_us(self, run: Callable[[], Any]) -> float:
        """Of one run as the host launches it, waiting and all."""
        return self._host_us(run) if self._flush is None else self._median_us(run)

    def _median_us(self, run: Callable[[], Any]) -> float:
        first = self._device_us(run, 3)
        return self._device_us(run, max(5, min(100, round(TIMED_S * 1e6 / max(first, 1.0)))))

    def _host_us(self, run: Callable[[], Any]) -> float:
        start = perf_counter()
        run()
        return (perf_counter() - start) * 1e6

    def _captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError as error:
            raise CaptureFailed(f"it cannot be captured: {error}") from error
        return graph.replay

    def _device_us(self, run: Callable[[], Any], times: int) -> float:
        assert self._flush is not None
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                 for _ in range(times)]
        for start, end in marks:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e3


def ceilings(part: Part) -> None:
    """What the device can do at best, as the facts `copy_gbs` and `matmul_tflops`: a copy, bytes
    read and written, and a product of bf16 matrices of random numbers."""
    size, side = (1 << 20, 128) if part.toy else (4 << 30, 8192)
    timer, device = Timer(part.toy), part.device
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = timer.us(lambda: target.copy_(source))
    part.facts["copy_gbs"] = 2 * size / us / 1e3
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    us = timer.us(lambda: a @ b)
    part.facts["matmul_tflops"] = 2 * side**3 / us / 1e6
    part.facts["device"] = "cpu" if part.toy else torch.cuda.get_device_name()
    part.facts["torch"] = torch.__version__
    part.save()
    print(f"  {part.facts}", flush=True)
