"""Each thread that asks a device for something has chosen it first: CUDA begins a thread on device
0, and the first call there that waits would make a context on it, half a gigabyte for each rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.messages import StepPlan
from actorium.gpu.weights import safetensors_reader
from actorium.gpu.weights.safetensors_reader import DeviceReader
from actorium.gpu.worker import timing
from actorium.gpu.worker.compute import ComputeThread

SECOND = torch.device("cuda", 1)


class Devices(threading.local):
    """As CUDA has it: one for each thread."""

    current: Any = torch.device("cuda", 0)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    own = Devices()

    def set_device(device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got:{device}")
        own.current = device

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return own


def test_results_are_waited_for_on_the_ranks_device(
        devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def result() -> Any:
        asked.append((threading.current_thread().name, devices.current))
        return SimpleNamespace()

    timer = SimpleNamespace(waits=True, launch=lambda runner, plan: SimpleNamespace(
        result=result, copies=False))
    monkeypatch.setattr(timing, "make_timer", lambda *_: timer)
    runner = SimpleNamespace(arrays=SimpleNamespace(device=SECOND), served={})
    ahead = SimpleNamespace(some=lambda: False, note_pages=lambda plan: None)
    compute = ComputeThread(Context(Config(), Path("/nowhere"), "worker", 1, 1))

    def load(kept: Any) -> Any:
        torch.cuda.set_device(SECOND)  # as `pick_device` does
        return runner, None, ahead

    monkeypatch.setattr(compute, "_load", load)
    compute._ready = SimpleNamespace(rank=0)  # type: ignore[assignment]
    compute._gate = SimpleNamespace(opens=lambda *_: True)  # type: ignore[assignment]
    compute._adopted = True
    compute.start(lambda: None)
    compute.submit(StepPlan(0, 1))
    until = time.monotonic() + 30
    while not compute.results and compute.failure is None and time.monotonic() < until:
        time.sleep(0.005)
    assert compute.failure is None
    assert asked == [("harvest", SECOND)]


@pytest.mark.parametrize("device", [SECOND, torch.device("cuda")], ids=str)
def test_weights_are_read_on_the_ranks_device(device: torch.device, devices: Devices,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number it is the thread's that opens the reader."""
    empty = torch.empty
    number = device if device.index is not None else devices.current
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(device=number))
    monkeypatch.setattr(safetensors_reader.torch, "empty",
                        lambda *size, pin_memory=False, **more: empty(*size, **more))
    met = threading.Barrier(3)  # each of the threads

    def current() -> Any:
        met.wait(30)
        return devices.current

    with DeviceReader(device, 3, 1024) as reader:
        found = [reader._pool.submit(current) for _ in range(3)]
        assert [each.result() for each in found] == [number] * 3
    assert devices.current == torch.device("cuda", 0), "that of no other thread"
