"""Products are measured before memory is shared out, on one stream: what cuBLAS keeps for a stream
is then counted, and kept once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_benchmarks import benchmark
from helpers_models import write_checkpoint

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.gpu.worker import allocation, device
from actorium.kernels.backends import triton_fault

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(bool(triton_fault(torch.device("cpu"))),
                                 reason="Triton compiles for CUDA here")


@interpreted
@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_products_are_measured_before_pages_are_there(
        level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds that decodes have, those that add among them."""
    from actorium.kernels.triton.triton_ops import TritonOps

    write_checkpoint(tmp_path, "LlamaForCausalLM", dtype=torch.bfloat16, head_dim=64,
                     hidden_size=64, intermediate_size=128)
    happened: list[Any] = []
    make_pools = allocation.make_pools

    def making(shape: Any, pages: list[int], *rest: Any) -> Any:
        happened.append("the sink page" if pages == [1] else "pages")
        return make_pools(shape, pages, *rest)

    def tuning(self: Any, where: torch.device) -> None:
        happened.append(sorted({kind.what for kind in self.products._met}))

    monkeypatch.setattr(allocation, "make_pools", making)
    monkeypatch.setattr(TritonOps, "tune", tuning)
    # as no CUDA weight can be packed
    monkeypatch.setattr("actorium.kernels.triton.triton_ops.can_pack", lambda weight: False)
    config = Config(model=ModelConfig(model=str(tmp_path), max_model_len=32),
                    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8),
                    device=DeviceConfig(device="cpu", kernels="triton", threads=1,
                                        optimization_level=level),
                    memory=MemoryConfig(kv_cache_bytes=1 << 20))
    opened = device.open_device(config, 1, lambda *_: None, {})
    assert not opened.runner.tables.sequences
    measured = [["added", "normed", "silu"]] if level else []
    assert happened == ["the sink page", *measured, "pages"]


class Streams:
    """Stands for CUDA: what is made, and what graphs are captured on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.captured: list[Any] = []
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None,
                                elapsed_time=lambda end: 1.0)
        for name, stands in {
                "Stream": self._stream, "stream": lambda stream: nullcontext(),
                "current_stream": lambda *_: SimpleNamespace(wait_stream=lambda other: None),
                "current_device": lambda: 0, "synchronize": lambda *_: None,
                "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
                "graph": self._graph, "Event": lambda **_: event}.items():
            monkeypatch.setattr(torch.cuda, name, stands)

    def _stream(self, *_: Any) -> Any:
        self.made.append(SimpleNamespace(wait_stream=lambda other: None))
        return self.made[-1]

    def _graph(self, graph: Any, stream: Any = None) -> Any:
        self.captured.append(stream)
        return nullcontext()


def _replayed(times: int) -> Callable[[], object]:
    from actorium.kernels.triton import skinny_linear

    skinny_linear._side_stream.cache_clear()
    return lambda: [skinny_linear.replayed_seconds(int) for _ in range(times)]


def _bench(times: int) -> Callable[[], object]:
    machine = benchmark("gpucheck.machine")
    return lambda: [own.captured(int) for own in [machine.Cuda()] for _ in range(times)]


@pytest.mark.parametrize("measure", [_replayed, _bench])
def test_all_is_measured_on_one_stream(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And captured there: a graph has a stream of its own where it is told of none."""
    streams = Streams(monkeypatch)
    measure(5)()
    assert len(streams.made) == 1 and streams.captured == streams.made * 5
    if measure is _replayed:
        from actorium.kernels.triton import skinny_linear
        skinny_linear._side_stream.cache_clear()
