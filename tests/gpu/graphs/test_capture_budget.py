"""What is captured: how many, in which order, in one memory, and in how many bytes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import Recorded, RecordingCapturer, model_of_kind, tensors_of
from helpers_models import write_checkpoint
from helpers_speculation import make_runner

from actorium.actors.config.graph_settings import TOKEN_LADDER
from actorium.actors.config.sources import from_kwargs
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig, SchedulerConfig
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner, StaticInputs
from actorium.gpu.plan.graph_memory import (
    GRAPH_BYTES,
    EagerReasons,
    Graphs,
    GraphShape,
    graph_shapes,
    graphs_estimate,
    planned_graphs,
    program_rows,
    program_shapes,
    segment_input_bytes,
    segment_sizes,
)
from actorium.gpu.plan.memory_plan import demand_of
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker import allocation, device, graph_setup
from actorium.gpu.worker.device import OpenedDevice
from actorium.gpu.worker.warmup import dummy_run

KINDS = ("attention", "windows", "hybrid", "mamba", "latent", "sparse")


class OrderedCapturer(RecordingCapturer):
    """Also knows how many rows each capture gave, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def capture(self, run: Callable[[], Any]) -> tuple[Recorded, Any]:
        done, out = super().capture(run)
        made = tensors_of(out)
        self.rows.append(len(made[-1]) if made else 0)
        return done, out


def test_the_ladder_of_all_sizes() -> None:
    """As many as SGLang makes by default, up to what it makes."""
    assert len(TOKEN_LADDER) == 58 and (TOKEN_LADDER[0], TOKEN_LADDER[-1]) == (4, 8192)
    assert list(TOKEN_LADDER) == sorted(set(TOKEN_LADDER))
    assert all(big - small <= max(16, small / (8 if small < 1024 or small >= 2048 else 4))
               for small, big in pairwise(TOKEN_LADDER))


@pytest.mark.parametrize(("settings", "first", "number"), [
    ({"graph_token_counts": "all", "max_num_batched_tokens": 8192}, 8192, 58),
    ({"graph_token_counts": "all"}, 2048, 42),
    ({"piecewise_cuda_graph_max_tokens": 512}, 512, 30),
    ({"graph_max_tokens": 8192, "chunked_prefill_size": 4096}, 4096, 50),
    ({"graph_max_tokens": 8192, "chunked_prefill_size": 16384}, 8192, 58),
    ({"graph_max_tokens": 8192, "chunked_prefill_size": 500}, 500, 30),
    ({"graph_token_counts": "8,64,4096", "graph_max_tokens": 100}, 64, 2),
    ({"graph_max_tokens": 3}, 3, 1), ({"graph_max_tokens": 0}, None, 0),
    ({"optimization_level": 1, "graph_token_counts": "8"}, 8, 1),
    ({"optimization_level": 1}, None, 0), ({}, 512, 17),
    ({"max_num_batched_tokens": 12, "max_num_seqs": 300}, 12, 1)])
def test_sizes_up_to_the_budget_of_a_step(settings: dict[str, Any], first: int | None,
                                          number: int) -> None:
    sizes = segment_sizes(from_kwargs(**settings))
    assert len(sizes) == number and sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] == first


@pytest.mark.parametrize(("settings", "rows"), [
    ({"cuda_graph_max_bs": 4}, [4, 2, 1]), ({"cuda_graph_max_bs": 5}, [5, 4, 2, 1]),
    ({"cuda_graph_max_bs": 1000, "max_num_seqs": 700}, [700]), ({"cuda_graph_max_bs": 0}, []),
    ({"cuda_graph_bs": "1,6,9", "cuda_graph_max_bs": 8}, [6, 1]),
    ({"graph_batch_sizes": "off"}, []), ({"optimization_level": 0}, []),
    ({"optimization_level": 1, "cuda_graph_bs": "3"}, [3]),
    ({"optimization_level": 3, "enforce_eager": True}, [])])
def test_sequences_of_graphs(settings: dict[str, Any], rows: list[int]) -> None:
    found = [shape.rows for shape in graph_shapes(from_kwargs(**settings), 0)]
    assert found[:1] == rows[:1] and (len(rows) == 1 or found == rows)


@pytest.mark.parametrize(("settings", "rows", "first"), [
    ({}, 64, []), ({"cuda_graph_max_bs": 8}, 8, []), ({"cuda_graph_max_bs": 0}, 0, []),
    ({"cuda_graph_bs": "1,4,100"}, 100, [100, 4, 1]), ({"optimization_level": 1}, 0, []),
    ({"cuda_graph_bs": "500"}, 0, []), ({"disable_cuda_graph": True}, 0, []),
    ({"cuda_graph_bs": "2", "speculative": "mtp:1,fixed"}, 4, [2])])
def test_programs_by_the_same_flags(settings: dict[str, Any], rows: int, first: list[int]) -> None:
    config = from_kwargs(**settings)
    drafts = 1 if "speculative" in settings else 0
    assert program_rows(config, drafts) == rows
    assert [shape.rows for shape in program_shapes(config, drafts)] == first


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_captured_from_the_largest_on(tmp_path: Path, kind: str) -> None:
    """Each size is a capture a layer, all of one capturer; nothing that is kept of a size holds
    memory: what the largest needed is free for the others, to the last byte. What they take in is
    what the plan counts."""
    runner = make_runner(model_of_kind(tmp_path, kind), 0, slots=4, arrays=DeviceArrays)
    capturer, sizes = OrderedCapturer(), [96, 48, 16, 8, 4]
    runner.graphs = None
    segments = PiecewiseGraphRunner(runner.model, runner.pools, capturer, sizes)
    segments.capture(lambda phase, detail: None)
    layers = len(runner.model.layers)
    assert capturer.rows == [size for size in sizes for _ in range(layers)]
    kept = [t for chain in segments._chains.values() for t in tensors_of(
        [[own.p for own in chain.segments], chain.ropes, list(chain.carried)])]
    assert len(kept) >= len(sizes) * (layers + 1)
    assert not any(capturer.holds(t) for t in kept)
    assert _bytes_of(segments._inputs) == segment_input_bytes(runner.model.shape, sizes[0])


def _bytes_of(inputs: StaticInputs) -> int:
    return inputs._numbers.nbytes + sum(own.nbytes for own in inputs._middles.values())


def test_a_result_that_is_kept_is_seen() -> None:
    """What the test above asks for is not granted by the double: who keeps a result holds it."""
    capturer = RecordingCapturer()
    _, out = capturer.capture(lambda: torch.ones(4, 8) + 1)
    assert capturer.holds(out)
    capturer.borrow(out)
    assert not capturer.holds(out)


NEED = GRAPH_BYTES + 100_000
"""Bytes, more than a tiny model's temporaries of 12 tokens."""


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(("free", "late", "captured", "why"), [
    (NEED, 0, [12, 8, 4], ""),
    (GRAPH_BYTES, 0, [], f"12, 8, 4 tokens: only {GRAPH_BYTES:,} bytes are left"),
    (NEED, 1, [12], "8, 4 tokens: 60 seconds are over"),
    (0, 0, [], "12, 8, 4 tokens: only 0 bytes are left")])
def test_what_does_not_fit_is_left_out_and_logged(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        free: int, late: int, captured: list[int], why: str) -> None:
    """Memory beside the temporaries of the largest step; seconds. A step of a size that is left
    out is padded up to one that is there."""
    now = iter([0.0, 0.0, 0.0, *[61.0 * late] * 3, 0.0, 0.0])
    opened, caught = _opened(tmp_path, monkeypatch, caplog, free, "4,8,12,13,90", now)
    runner = opened.runner
    assert ("no segments for steps of 13, 90 tokens: --max-num-batched-tokens is 12" in caught)
    assert why in caught and ("left" in caught or "over" in caught) == bool(why)
    assert (runner.segments.shapes if runner.segments else []) == captured
    told = ", ".join(str(size) for size in reversed(captured))
    assert f"steps with prompts of {told} tokens" in opened.info.graphs or not captured
    assert "steps with prompts" not in opened.info.graphs or captured
    dummy_run(runner, 3)
    if captured:
        assert runner.served[f"piecewise_graph_of_{captured[-1]}"] > 0
    else:
        assert runner.served["piecewise_graph"] == 0 < runner.served["eager_for_off"]


def _opened(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
            free: int, counts: str, now: Iterator[float]) -> tuple[OpenedDevice, str]:
    """A worker of steps of up to 12 tokens, and its warnings. free: bytes beside the temporaries
    of a step; now: what the clock says while graphs are captured."""
    write_checkpoint(path, seed=5)
    monkeypatch.setattr(allocation, "device_arrays", lambda own, *_: DeviceArrays(own))
    monkeypatch.setattr(graph_setup, "why_eager", lambda *_: EagerReasons())
    monkeypatch.setattr(graph_setup, "CudaCapturer", lambda _: RecordingCapturer())
    monkeypatch.setattr(graph_setup, "free_bytes", lambda _: free)
    monkeypatch.setattr(graph_setup, "perf_counter", lambda: next(now))
    plain = graph_setup.segment_bounds
    monkeypatch.setattr(graph_setup, "segment_bounds", lambda runner, workspace: plain(runner, 0))
    config = Config(model=ModelConfig(model=str(path), max_model_len=64),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12),
                    device=DeviceConfig(device="cpu", kernels="torch", threads=1,
                                        graph_batch_sizes="off", graph_token_counts=counts))
    with caplog.at_level(logging.WARNING, "actorium.gpu.worker.graph_setup"):
        opened = device.open_device(config, 1, lambda *_: None, {})
    return opened, "\n".join(own.getMessage() for own in caplog.records)


def test_temporaries_of_the_largest_step_are_left_free(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """And all ranks leave out the same: what the one with the least memory does."""
    runner = make_runner(model_of_kind(tmp_path, "attention"), 0, slots=4, arrays=DeviceArrays)
    monkeypatch.setattr(graph_setup, "free_bytes", lambda _: 5000 + NEED)
    assert not graph_setup.segment_bounds(runner, 5000)(4, True)
    assert graph_setup.segment_bounds(runner, 5000 + NEED)(4, True)
    assert graph_setup.segment_bounds(runner, 5000 + NEED - GRAPH_BYTES)(4, True)
    assert not graph_setup.segment_bounds(runner, 5000 + NEED - GRAPH_BYTES)(4, False)
    monkeypatch.setattr(runner.model.group, "agreed", lambda number: min(number, 7), False)
    assert "7 bytes are left" in graph_setup.segment_bounds(runner, 0)(4, False)


@pytest.mark.usefixtures("as_on_a_device")
def test_a_worker_captures_in_one_pool_and_tells_of_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Decodes first, since the logits of the largest take most; segments of every size that a
    step's tokens allow; seconds and bytes in one line and in the gauges."""
    write_checkpoint(tmp_path, seed=5)
    free = iter(range(100 << 20, 0, -(1 << 20)))
    capturers: list[OrderedCapturer] = []

    def capturer(_: object) -> OrderedCapturer:
        capturers.append(OrderedCapturer())
        return capturers[-1]

    monkeypatch.setattr(allocation, "device_arrays", lambda own, *_: DeviceArrays(own))
    monkeypatch.setattr(graph_setup, "why_eager", lambda *_: EagerReasons())
    monkeypatch.setattr(graph_setup, "CudaCapturer", capturer)
    monkeypatch.setattr(graph_setup, "free_bytes", lambda _: next(free))
    config = Config(model=ModelConfig(model=str(tmp_path), max_model_len=64),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12),
                    device=DeviceConfig(device="cpu", kernels="torch", threads=1,
                                        graph_token_counts="all"))
    with caplog.at_level(logging.INFO):
        opened = device.open_device(config, 1, lambda *_: None, {})
    assert len(capturers) == 1, "one pool"
    runner = opened.runner
    assert runner.segments is not None and runner.graphs is not None
    assert runner.segments.shapes == [12, 8, 4]
    layers, stages = len(runner.model.layers), 4  # forward, and three classes of sampling
    assert len(capturers[0].recorded) == 3 * stages + 3 * layers
    assert capturers[0].rows[-3 * layers:] == [n for n in runner.segments.shapes
                                               for _ in range(layers)]
    planned = graphs_estimate(runner.model.shape, demand_of(config),
                              planned_graphs(config, 0, EagerReasons()))
    assert opened.footprint.planned["graphs"] == planned > (3 + 3) * GRAPH_BYTES
    assert opened.footprint.gauges()["graph_capture_seconds"] > 0
    assert "segments for 3 sizes" in caplog.text and "captured in" in caplog.text
    assert "-O3: passes auto; graphs: decodes of 1, 2, 4 requests" in caplog.text


def test_more_sizes_cost_the_plan_what_the_driver_keeps() -> None:
    """The pool is as large as the largest size needs, whatever else is captured."""
    file = Path(__file__).parents[2] / "data" / "qwen3.5-27b" / "config.json"
    shape, demand = shape_from_config(json.loads(file.read_text()), file), demand_of(Config())
    few = graphs_estimate(shape, demand, Graphs([GraphShape(4, 1)], [2048]))
    many = graphs_estimate(shape, demand, Graphs([GraphShape(4, 1)], [2048, 1024, 512, 256]))
    assert many - few == 3 * GRAPH_BYTES
