"""What only a device has (events, graphs, a profiler, its memory), and doubles of it on a CPU, so
that a toy run walks the same code."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from time import perf_counter, sleep
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .record import BROKEN

T = TypeVar("T")
Run = Callable[[], Any]
LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


class CaptureFailed(BaseException):
    """What was to be timed cannot be captured. After that torch's allocator and stream are in no
    state to go on: the process ends, and another one goes on behind this row."""


class Rounds(NamedTuple):
    warm: int
    first: int
    least: int
    most: int


class Profile(NamedTuple):
    kernels: list[tuple[str, float, float]]
    """(name, from, to) of what ran on the device, microseconds."""
    launches: dict[str, int]
    """Calls of the host that queue something, by name."""


class Cuda:
    toy = False
    rounds = Rounds(2, 3, 5, 100)

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._stream = torch.cuda.Stream(self.device)
        """The stream of all captures: cuBLAS keeps a workspace for every stream it has seen."""
        # Graphs and a profiler that leaves and comes back do not go together (torch.profiler).
        os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}

    def facts(self) -> dict[str, Any]:
        own = torch.cuda.get_device_properties(self.device)
        return {"device": own.name, "capability": f"{own.major}.{own.minor}",
                "multiprocessors": own.multi_processor_count, "gib": own.total_memory / 2**30}

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_gib(self) -> float:
        """Free memory of the device, once a killed process's memory has been returned."""
        for _ in range(10):
            free, total = torch.cuda.mem_get_info()
            if free > 0.9 * total:
                break
            sleep(0.5)
        return free / 2**30

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def captured(self, run: Run) -> Run:
        """`run` as a graph: its replay. Raises `CaptureFailed`."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.rounds.warm):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                run()
        except RuntimeError as error:
            raise CaptureFailed(f"it cannot be captured: {error}") from error
        return graph.replay

    def profiled(self, run: Run) -> Profile:
        """One run, with all that it asked of the device."""
        from torch.autograd import DeviceType

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        kernels, launches = [], dict[str, int]()
        for event in seen.events():
            if event.device_type == DeviceType.CUDA:
                if not getattr(event, "is_user_annotation", False):
                    kernels.append((event.name, event.time_range.start, event.time_range.end))
            elif event.name.startswith(LAUNCHING):
                launches[event.name] = launches.get(event.name, 0) + 1
        return Profile(kernels, launches)

    @contextmanager
    def opening(self) -> Iterator[None]:
        yield


class _HostEvent:
    def record(self) -> None:
        self._at = perf_counter()

    def elapsed_time(self, other: Any) -> float:
        return max(1e-3, (other._at - self._at) * 1e3)


class Double(Cuda):
    """A CPU that answers as a device."""

    toy = True
    rounds = Rounds(0, 1, 1, 1)

    def __init__(self, gib: float = 1e9) -> None:
        """gib: the memory it pretends to have."""
        self.device, self._gib = torch.device("cpu"), gib

    def facts(self) -> dict[str, Any]:
        return {"device": "none: a double on a CPU", "capability": "9.0", "multiprocessors": 132,
                "gib": self._gib}

    def event(self) -> Any:
        return _HostEvent()

    def synchronize(self) -> None:
        pass

    def free_gib(self) -> float:
        return self._gib

    def release(self) -> None:
        pass

    def captured(self, run: Run) -> Run:
        return run

    def profiled(self, run: Run) -> Profile:
        """Operations of torch that call no others stand for kernels."""
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run()
        events = [event for event in seen.events() if event.name.startswith("aten::")]
        return Profile([(event.name, event.time_range.start, event.time_range.end)
                        for event in events if not event.cpu_children],
                       {"operations": len(events)})

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Steps are captured as on a device: with tables as a device has them, and by running
        again what was captured."""
        from actorium.gpu.plan.graph_memory import EagerReasons
        from actorium.gpu.step.staging import DeviceArrays
        from actorium.gpu.worker import allocation, graph_setup

        # No memory is there to be measured, so the plan counts none for graphs; but they are made.
        with (patch.object(allocation, "device_arrays",
                           lambda own, apply, _: DeviceArrays(own, apply)),
              patch.object(graph_setup, "why_eager", lambda *_: EagerReasons("", "")),
              patch.object(allocation, "trial_graph_bytes", lambda *_: 0),
              patch.object(graph_setup, "free_bytes", lambda _: 1 << 40),
              patch.object(graph_setup, "CudaCapturer", lambda _: Rerun())):
            yield


class _Again(NamedTuple):
    run: Run
    out: list[Tensor]

    def replay(self) -> None:
        for was, now in zip(self.out, tensors(self.run()), strict=True):
            if was is not now:
                was.copy_(now)


class Rerun:
    """Stands for `gpu.graphs.capture.CudaCapturer`: a replay runs everything anew, into the
    tensors of the first time."""

    def capture(self, run: Callable[[], T]) -> tuple[_Again, T]:
        out = run()
        return _Again(run, tensors(out)), out

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor


def tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dataclasses, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    return [found for each in tree for found in tensors(each)] if isinstance(
        tree, tuple | list) else []


def broken(error: BaseException) -> bool:
    """Whether this process can do nothing more on its device."""
    text = str(error)
    return any(sign in text for sign in BROKEN)
