"""Decode steps replayed by one call in C leave the bits of steps that are run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import played, told
from helpers_kinds import write_kind
from helpers_models import write_checkpoint
from helpers_pairs import pairs
from helpers_speculation import make_runner
from helpers_toys import write_toy
from helpers_worker import CPU, Output

from actorium.actors.config.sources import from_kwargs
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SpeculationConfig,
)
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import ARCHITECTURES
from actorium.gpu.graphs.capture import Arena, KernelCapturer
from actorium.gpu.graphs.decode_programs import DecodePrograms
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.graph_memory import program_sizes
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import open_device
from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.cpu.program import NotRecordable

PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [100, 1, 50]]
PARAMS = [ResolvedParams(max_tokens=30, temperature=0.0, logprobs=2), ResolvedParams(max_tokens=9),
          ResolvedParams(max_tokens=22, temperature=1.3, top_k=20, top_p=0.9),
          ResolvedParams(max_tokens=70, temperature=0.0)]
LIB = library()
ORDER, COUNTS = torch.tensor([1, 0]), torch.zeros(256, dtype=torch.int64)
pytestmark = pytest.mark.skipif(LIB is None, reason="no compiler")


def native_model(path: Path, kind: str, quantization: str, pages: str) -> Any:
    """kind: of `helpers_kinds`, or a class."""
    if kind in ARCHITECTURES:
        write_toy(path, kind, torch.bfloat16)
    else:
        write_kind(path, kind)
    config = Config(model=ModelConfig(max_model_len=128, dtype="bfloat16",
                                      quantization=quantization),
                    memory=MemoryConfig(kv_cache_dtype=pages),
                    speculation=SpeculationConfig(
                        speculative="auto" if kind == "hybrid" else "off"))
    return load_model(path, config, CPU, lambda *_: None)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    return functools.cache(lambda kind, quantization="auto", pages="auto": native_model(
        tmp_path_factory.mktemp(kind), kind, quantization, pages))


def with_programs(runner: ModelRunner, rows: int = 8) -> DecodePrograms:
    t = runner.tables
    demand = Demand(rows, t.page_size, 64, t.drafts.max_drafts)
    programs = DecodePrograms(runner.model, runner.pools, runner.states,
                              program_sizes(
                                  runner.model.shape, demand, rows * (demand.drafts + 1)))
    runner.segments = programs
    return programs


def kept(runner: ModelRunner) -> list[torch.Tensor]:
    """All that steps leave: pages and states, as bytes."""
    found = [own for pool in runner.all_pools for own in pool.tensors]
    if runner.states is not None:
        found += [part for layer in runner.states.layers for part in layer]
    return [own.view(torch.uint8) for own in found]


def compare(model: Any, number: int = 10, drafts: int = 0,
            **more: Any) -> tuple[ModelRunner, list[Output]]:
    """Requests that come while others run: the same, and the same bits in every page but the sink,
    and in every state, with programs as without."""
    sizes = {"slots": 7, "mtp": drafts > 0, **more.pop("sizes", {})}
    runs = []
    for captured in (False, True):
        runner = make_runner(model, drafts, **sizes)
        programs = with_programs(runner) if captured else None
        ring, out = played(runner, PROMPTS, PARAMS, number, budget=24, **more)
        runs.append((runner, told(out), kept(runner)))
    assert programs is not None
    assert runs[0][1] == runs[1][1]
    size = runner.tables.page_size
    pages = len([own for pool in runner.all_pools for own in pool.tensors])
    for i, (one, other) in enumerate(zip(runs[0][2], runs[1][2], strict=True)):
        sink = size if i < pages else 0
        assert torch.equal(one[sink:], other[sink:])
    return runner, out


@pytest.mark.parametrize(("kind", "quantization"), [
    *pairs(["llama", "attention", "windows", "norms-after", "layer-norms", "positions"],
           ["auto", "int4", "int8"]),
    ("scaled-queries", "auto"), ("norm-behind-rope", "auto"), ("capped", "auto"),
    ("shared-pages", "auto"), ("MptForCausalLM", "auto"), ("Lfm2ForCausalLM", "auto"),
    ("FalconH1ForCausalLM", "auto"), ("FalconMambaForCausalLM", "auto")])
def test_the_same_bits(make: Callable[..., Any], kind: str, quantization: str) -> None:
    runner, _ = compare(make(kind, quantization))
    assert runner.segments is not None and runner.segments.replays > 20
    assert runner.served["program"] == runner.segments.replays
    assert runner.served["eager"] > 0, "prompts"


@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_pages_in_int8(make: Callable[..., Any], kind: str) -> None:
    runner, _ = compare(make(kind, "auto", "int8"), sizes={"kv_dtype": torch.int8})
    assert all(pool.scales for pool in runner.all_pools)
    assert runner.segments is not None and runner.segments.replays > 20


@pytest.mark.parametrize(("drafts", "pages"), pairs([2, 0], ["auto", "int8"]))
def test_recurrent_layers_and_windows(make: Callable[..., Any], drafts: int, pages: str) -> None:
    speculative = f"mtp:{drafts},fixed" if drafts else "auto"
    sizes = {"kv_dtype": torch.int8} if pages == "int8" else {}
    runner, _ = compare(make("hybrid", "auto", pages), drafts=drafts, speculative=speculative,
                        sizes=sizes)
    assert runner.segments is not None and runner.segments.replays > 10


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_preemptions_and_aborts(make: Callable[..., Any], kind: str) -> None:
    runner, _ = compare(make(kind), 16, force_preempt_every=4, cancel=(4, 9),
                        sizes={"pages": 40, "checkpoints": 4})
    assert runner.segments is not None and runner.segments.replays > 10


@pytest.mark.parametrize("kind", ["experts", "latent"])
def test_what_is_not_all_in_c_runs_as_before(make: Callable[..., Any], kind: str,
                                             caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        runner, _ = compare(make(kind), 4)
    assert runner.segments is not None and runner.segments.replays == 0
    assert runner.served["program"] == 0
    assert "has no kernel in C" in caplog.text


@pytest.mark.parametrize(("level", "passes", "graphs", "tuned"), [
    (0, "none", "none (-O0)", 0), (1, "all", "none (-O1)", 1),
    (2, "all", "decodes of up to 64 rows, captured as they come", 1)])
def test_a_worker_of_each_level(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                monkeypatch: pytest.MonkeyPatch, level: int, passes: str,
                                graphs: str, tuned: int) -> None:
    """What was chosen stands in one line of its log, and in the report at the start."""
    write_checkpoint(tmp_path, "LlamaForCausalLM", seed=5)
    tunes: list[object] = []
    monkeypatch.setattr(NativeOps, "tune", lambda _, device: tunes.append(device))
    config = from_kwargs(str(tmp_path), optimization_level=level, dtype="bfloat16",
                         max_model_len=128, kv_cache_bytes=1 << 22)
    with caplog.at_level(logging.INFO):
        opened = open_device(config, 1, lambda *_: None, {})
    assert f"-O{level}: passes {passes}; graphs: {graphs}" in caplog.text.splitlines()[-1]
    assert (opened.info.level, opened.info.passes) == (level, passes)
    assert f"none ({opened.info.no_graphs})" == graphs or opened.info.graphs == graphs
    assert len(tunes) == tuned
    assert (opened.runner.segments is not None) == (level == 2)


def test_sizes_that_were_asked_for_alone(tmp_path: Path) -> None:
    """They are captured at the start, and no other when its step comes; what served is counted by
    size."""
    write_checkpoint(tmp_path, "LlamaForCausalLM", seed=5)
    config = Config(model=ModelConfig(model=str(tmp_path), max_model_len=128, dtype="bfloat16"),
                    device=DeviceConfig(graph_batch_sizes="1,3"),
                    memory=MemoryConfig(kv_cache_bytes=1 << 22))
    said: list[tuple[str, str]] = []
    opened = open_device(config, 1, lambda *told: said.append(told), {})
    runner, programs = opened.runner, opened.runner.segments
    assert isinstance(programs, DecodePrograms) and programs.count == 2
    assert [own for own in said if own[1].startswith("programs")] == [
        ("warming", f"programs {i}/2") for i in range(2)]
    assert opened.info.graphs == "decodes of 1, 3 requests, programs in C"
    assert opened.footprint.gauges()["graph_capture_seconds"] > 0
    played(runner, PROMPTS, PARAMS, 5, budget=24)
    assert programs.count == 2
    sizes = {key: n for key, n in runner.served.items() if key.startswith("program_of_")}
    assert set(sizes) == {"program_of_1", "program_of_3"}
    assert sum(sizes.values()) == runner.served["program"] == programs.replays > 0
    assert runner.served["eager"] == sum(n for key, n in runner.served.items()
                                         if key.startswith("eager_of_")) > 0


def test_steps_of_other_sizes_run_as_before(make: Callable[..., Any]) -> None:
    runner = make_runner(make("llama"), 0, slots=7)
    programs = with_programs(runner, rows=3)
    played(runner, PROMPTS, PARAMS[:1], 6, budget=24)
    assert 0 < programs.replays < runner.served["eager"]
    assert not programs.fault


# --- what can be captured ------------------------------------------------------------------------

def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def capturer(size: int = 1 << 16) -> KernelCapturer:
    return KernelCapturer(LIB, 2, Arena(size), Arena(size))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_operations_of_torch_that_have_kernels(rows: int) -> None:
    """A replay finds new numbers where the old ones were."""
    ops = NativeOps(LIB, 2)
    a, b, weight, order = bf16(rows, 96), bf16(rows, 96), bf16(96), torch.randperm(96)
    by, each = bf16(16), bf16(rows, 1, 1)

    def run() -> torch.Tensor:
        normed = ops.rms_norm(a + b, weight, 1e-6).view(rows, 3, 32).reshape(rows, 96)
        both = torch.cat([normed, b], -1)
        both = torch.cat([ops.rms_norm(both[:, 96:], weight, 1e-6), both[:, :96]], -1)
        gated = ops.silu_mul(both) + ops.gelu_mul(both)
        gated = ((gated.view(rows, 6, 16)[:, :3] * by * each).flatten(1).contiguous()
                 + gated[:, :48].contiguous())
        gated = torch.cat([gated, gated], -1)
        return ops.sigmoid_mul(gated.index_select(1, order).contiguous(), a)

    program, out = capturer().capture(run)
    assert torch.equal(out, run())
    for own in (a, b):
        own.copy_(bf16(rows, 96))
    program.replay()
    assert torch.equal(out, run())


ORDERED = torch.tensor([2, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("run", [
    lambda x, y: x * y, lambda x, y: x + 1.7, lambda x, y: x * 0.3, lambda x, y: x - y,
    lambda x, y: x / y, lambda x, y: x / 3.3, lambda x, y: x.unsqueeze(1) * y[:, None, :1],
    lambda x, y: x.float() * y, lambda x, y: (x.float() - y.float()).to(torch.bfloat16),
    lambda x, y: torch.cat([x, y]), lambda x, y: torch.stack((x, y), 1).flatten(1),
    lambda x, y: x[:, ::2].contiguous(), lambda x, y: x.t().reshape(5, -1) + y.view(5, -1),
    lambda x, y: x.clamp(-0.3, 0.7), lambda x, y: x.clone().clamp_(min=0.1),
    lambda x, y: x.clone().clamp_max(0.2), lambda x, y: x.clone().add_(y).mul_(2.0),
    lambda x, y: x.index_select(0, ORDERED),
    lambda x, y: x.clone().index_copy_(0, ORDERED[:2], y[:2]),
    lambda x, y: torch.nn.functional.pad(x, (0, 3)), lambda x, y: (x * x).sqrt(),
    lambda x, y: x.clone()[:, 2:5].copy_(y[:, 3:6])])
def test_torchs_numbers_to_the_bit(run: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Also where rows have more numbers than are taken at once, and with NaN and infinities."""
    x, y = (torch.randn(5, 300).to(dtype) for _ in range(2))
    program, out = capturer(1 << 18).capture(lambda: run(x, y))
    for own in (x, y):
        own.copy_(torch.randn(5, 300))
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    program.replay()
    want = run(x, y)
    assert out.dtype is want.dtype
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("what", "run"), [
    ("exp", lambda x: x.exp()), ("sigmoid_", lambda x: x.sigmoid_()),
    ("item", lambda x: x[0, 0].item()),
    ("tolist", lambda x: x[0].tolist()), ("numpy", lambda x: x.view(torch.int16).numpy()),
    ("__setitem__", lambda x: x.__setitem__(0, x[1])), ("zeros_like", torch.zeros_like),
    ("__getitem__", lambda x: x[ORDER]), ("add", lambda x: x.add(x, alpha=2)),
    ("int64", lambda x: x + ORDER[0]), ("number and a tensor", lambda x: torch.mul(2.0, x)),
    ("rsub", lambda x: 1 - x), ("cat", lambda x: torch.cat([x, x.float()])),
    ("index_select", lambda x: x.float().index_select(1, ORDER)),
    ("mkldnn", lambda x: x.to_mkldnn()),
    ("kernel linear_histogram", lambda x: LIB.linear_histogram(
        x.data_ptr(), 4, 1, COUNTS.data_ptr()))])
def test_what_cannot_be_captured(what: str, run: Callable[[torch.Tensor], Any]) -> None:
    x = bf16(2, 32)
    with pytest.raises(NotRecordable, match=what):
        capturer().capture(lambda: run(x))


def test_memory_is_used_again_and_bounded() -> None:
    ops, x, weight = NativeOps(LIB, 1), bf16(4, 32), bf16(32)

    def chain(length: int, kept: list[torch.Tensor] | None = None) -> torch.Tensor:
        y = x
        for _ in range(length):
            y = ops.rms_norm(y, weight, 1e-6)
            if kept is not None:
                kept.append(y)
        return y

    program, out = capturer(1 << 15).capture(lambda: chain(100))
    program.replay()
    assert program.count == 100 and torch.equal(out, chain(100))
    with pytest.raises(NotRecordable, match="temporaries"):
        capturer(1 << 12).capture(lambda: chain(100, []))
    assert torch.equal(chain(3), chain(3)), "nothing is recorded any longer"


# --- a worker's ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("dtype", "device", "why"), [
    ("bfloat16", DeviceConfig(), ""), ("bfloat16", DeviceConfig(enforce_eager=True), ""),
    ("float32", DeviceConfig(), "decode steps are no program: the kernels are not C's")])
def test_a_worker_on_a_cpu_has_programs(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                        dtype: str, device: DeviceConfig, why: str) -> None:
    write_checkpoint(tmp_path, "LlamaForCausalLM", seed=5)
    config = Config(model=ModelConfig(model=str(tmp_path), max_model_len=128, dtype=dtype),
                    device=device, memory=MemoryConfig(kv_cache_bytes=1 << 22))
    with caplog.at_level(logging.DEBUG):
        opened = open_device(config, 1, lambda *_: None, {})
    captures = dtype == "bfloat16" and not device.enforce_eager
    assert (opened.runner.segments is not None) == captures
    assert bool(opened.info.graphs) == captures == (not opened.info.no_graphs)
    footprint = opened.footprint
    assert footprint.measured.get("graphs", 0) == footprint.planned.get("graphs", 0)
    assert ("graphs" in footprint.planned) == captures
    assert why in caplog.text and opened.info.no_graphs.endswith(why)
