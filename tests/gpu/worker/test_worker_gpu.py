"""What needs a CUDA device: the same tokens as on the CPU, and a launch path that never waits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_deepseek import add_mtp
from helpers_graphs import shapes
from helpers_hybrid import DENSE, write_hybrid
from helpers_kinds import write_kind
from helpers_models import write_checkpoint
from helpers_speculation import make_runner as speculating_runner
from helpers_worker import Ring, complete, make_runner

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.capture import CudaCapturer
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker.compilations import Compilations
from actorium.gpu.worker.device import open_device
from actorium.gpu.worker.timing import make_timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda", 0)
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [100, 1, 50]]
PARAMS = [
    ResolvedParams(max_tokens=24, temperature=0.0),
    ResolvedParams(max_tokens=24, temperature=0.9),
    ResolvedParams(max_tokens=24, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    ResolvedParams(max_tokens=24, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3),
    ResolvedParams(max_tokens=24, temperature=1.0, logit_bias={5: 6.0, 77: -100.0}),
    ResolvedParams(max_tokens=24, temperature=1.0, top_p=0.7, eos_ids=(3, 9), min_tokens=6),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, seed=5, max_position_embeddings=256)
    return path


def _model(path: Path, device: str, speculative: str = "off") -> Any:
    config = Config(speculation=SpeculationConfig(speculative=speculative))
    return load_model(path, config, torch.device(device), lambda *_: None)


def _runner(model: Any, sizes: Sequence[int] = (), windows: Sequence[int] = (1,), drafts: int = 0,
            tokens: Sequence[int] = (), **options: Any) -> ModelRunner:
    """On the device; sizes: of its graphs, tokens: of its segments, if there are to be any."""
    arrays = DeviceArrays(DEVICE, model.ops.apply_plan)
    if drafts or model.shape.state is not None:
        runner = speculating_runner(model, drafts, arrays=arrays, mtp=drafts > 0, **options)
    else:
        runner = make_runner(model, device=DEVICE, arrays=arrays, **options)
    graphs, segments, capturer = None, None, CudaCapturer(DEVICE)
    if sizes:
        graphs = runner.decode_graphs(capturer, shapes(list(sizes), windows))
        graphs.capture(lambda phase, detail: None)
    if tokens:
        segments = PiecewiseGraphRunner(runner.model, runner.pools, capturer,
                                        sorted(tokens, reverse=True))
        segments.capture(lambda phase, detail: None)
    runner.graphs, runner.segments = graphs, segments
    return runner


def test_tokens_equal_those_of_the_cpu(path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    seeds = list(range(6))
    want = complete(make_runner(_model(path, "cpu")), PROMPTS, PARAMS, seeds)
    model = _model(path, "cuda")
    assert complete(_runner(model), PROMPTS, PARAMS, seeds, budget=24) == want
    replays = 0
    for params in PARAMS:
        kind = [params] * 6
        want = complete(make_runner(_model(path, "cpu")), PROMPTS, kind, seeds)
        runner = _runner(model, (1, 2, 8))
        assert complete(runner, PROMPTS, kind, seeds, budget=24) == want
        assert runner.graphs is not None
        replays += runner.graphs.replays
    assert replays > 60


def test_graphs_take_over_and_give_back(path: Path) -> None:
    """Batches grow and shrink over the sizes of graphs while sequences come, go and are preempted:
    the tokens of steps that are run, to the bit where no size changes the rounding."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, runs = _model(path, "cuda"), []
    for sizes in ((), (1, 2, 4, 8), (8,)):
        runner = _runner(model, sizes, pages=60, slots=9)
        ring = Ring(runner, budget=24, force_preempt_every=5)
        for i in range(24):
            ring.submit(PROMPTS[i % 6], PARAMS[i % 3], i)
            ring.step()
        runs.append([out.tokens for out in ring.run()])
        assert ring.preemptions > 0
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("sizes", [(), (1, 2, 8)], ids=["alone", "beside graphs"])
def test_segments_give_the_tokens_of_steps_that_are_run(path: Path, tmp_path: Path,
                                                        sizes: tuple[int, ...]) -> None:
    """Prompts in chunks beside decodes, of a plain model and of one with recurrent layers."""
    torch.backends.cuda.matmul.allow_tf32 = False
    write_hybrid(tmp_path, DENSE, 5)
    for model in (_model(path, "cuda"), _model(tmp_path, "cuda")):
        runs = []
        for tokens in ((), (4, 12, 40)):
            runner = _runner(model, sizes, tokens=tokens, slots=9)
            ring = Ring(runner, budget=48)
            for i in range(24):
                ring.submit(PROMPTS[i % 6], PARAMS[i % 3], i)
                ring.step()
            runs.append([out.tokens for out in ring.run()])
        assert runs[0] == runs[1]
        assert runner.segments is not None and runner.segments.replays > 5


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_windows_from_verifying_to_drafting(drafts: int, tmp_path: Path) -> None:
    """A hybrid model with an MTP layer: graphs give what steps that are run give."""
    torch.backends.cuda.matmul.allow_tf32 = False
    add_mtp(tmp_path, write_hybrid(tmp_path, DENSE, 5, mtp_num_hidden_layers=1))
    model, runs = _model(tmp_path, "cuda", "auto"), []
    for sizes in ((), (2, 4)):
        runner = _runner(model, sizes, range(1, drafts + 2), drafts, slots=5, force=(0.7, 0.4))
        speculative = f"mtp:{drafts},fixed" if drafts else "off"
        ring = Ring(runner, budget=40, speculative=speculative)
        for i in range(12):
            ring.submit(PROMPTS[i % 6], PARAMS[i % 3], i)
        runs.append([out.tokens for out in ring.run()])
    assert runs[0] == runs[1]
    assert runner.graphs is not None and runner.graphs.replays > 5


def _no_waiting(runner: ModelRunner, params: ResolvedParams) -> None:
    """Steps are queued one behind the other, none is waited for: decodes, with pages appended, and
    beside them a sequence that is admitted, extended, decoded and released."""
    timer = make_timer(runner.arrays.device)
    slots = np.arange(1, 9, dtype=np.int32)
    tokens = np.arange(9, dtype=np.int32).tobytes()

    def admit(slot: int) -> Admit:
        pages = [4 * slot] * runner.tables.groups
        return Admit(slot, tokens, 9, 0, np.array(pages, np.int32).tobytes(), params, slot)

    def i4(*values: Any) -> bytes:
        return np.array(values, np.int32).tobytes()

    def rounds(step: int) -> list[StepPlan]:
        """The first round of all kinds of steps warms up, the next ones must not wait."""
        more = [(int(s), 1, *[4 * int(s) + 1] * runner.tables.groups) for s in slots]
        return [StepPlan(1, step, decode=i4(*slots), page_appends=i4(more)),
                StepPlan(1, step + 1, decode=i4(*slots)),
                StepPlan(1, step + 2, decode=i4(*slots), admit=[admit(9)], extend=i4((9, 5))),
                StepPlan(1, step + 3, decode=i4(*slots[::2]), extend=i4((9, 4))),
                StepPlan(1, step + 4, decode=i4(*slots, 9)),
                StepPlan(1, step + 5, decode=i4(*slots), release=i4(9)),
                StepPlan(1, step + 6, decode=i4(*slots))]

    timer.launch(runner, StepPlan(1, 1, admit=[admit(int(s)) for s in slots],
                                  extend=i4([(s, 9) for s in slots]))).result()
    for plan in rounds(2):
        timer.launch(runner, plan).result()
    waiting = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for at in (9, 16, 23):
            waiting += [timer.launch(runner, plan) for plan in rounds(at)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [w.result() for w in waiting]
    assert [r.step for r in results] == list(range(9, 30))
    assert all(r.busy_us > 0 for r in results)


@pytest.mark.parametrize(("sizes", "tokens"), [((), ()), ((1, 4, 8), ()), ((1, 4, 8), (8, 16))],
                         ids=["eager", "graphs", "segments"])
@pytest.mark.parametrize("params", PARAMS)
def test_the_launch_path_does_not_wait_for_the_device(
        path: Path, params: ResolvedParams, sizes: tuple[int, ...],
        tokens: tuple[int, ...]) -> None:
    """Nine sequences are more than the largest graph serves."""
    params = ResolvedParams(**{f: getattr(params, f) for f in params.__struct_fields__
                               if f != "max_tokens"}, max_tokens=200)
    _no_waiting(_runner(_model(path, "cuda"), sizes, tokens=tokens), params)


@pytest.mark.parametrize(("sizes", "tokens"), [((), ()), ((8, 16), ()), ((8, 16), (8, 16))],
                         ids=["eager", "graphs", "segments"])
def test_recurrent_layers_do_not_wait_either(tmp_path: Path, sizes: tuple[int, ...],
                                             tokens: tuple[int, ...]) -> None:
    write_hybrid(tmp_path, DENSE, 5)
    _no_waiting(_runner(_model(tmp_path, "cuda"), sizes, tokens=tokens, slots=16, page_size=16),
                ResolvedParams(max_tokens=200, temperature=0.0))


def test_capturing_leaves_live_tables_alone(path: Path) -> None:
    """All that is run for it is run over the sink: a sequence that is there goes on as before."""
    model = _model(path, "cuda")
    plain, other = _runner(model), _runner(model)
    for runner in (plain, other):
        tokens = np.arange(9, dtype=np.int32).tobytes()
        admit = Admit(3, tokens, 9, 0, np.array([5, 6], np.int32).tobytes(), PARAMS[0], 3)
        runner.run(StepPlan(1, 1, admit=[admit], extend=np.array([3, 9], np.int32).tobytes()))
    graphs = other.decode_graphs(CudaCapturer(DEVICE), shapes([1, 4]))
    graphs.capture(lambda phase, detail: None)
    other.graphs = graphs
    plan = StepPlan(1, 2, decode=np.array([3], np.int32).tobytes())
    assert [plain.run(plan).tokens for _ in range(10)] == [other.run(plan).tokens
                                                           for _ in range(10)]
    assert graphs.replays == 10


def test_pages_fill_the_share_of_memory_that_was_asked_for(path: Path) -> None:
    config = Config(model=ModelConfig(model=str(path)),
                    memory=MemoryConfig(memory_fraction=0.5),
                    scheduler=SchedulerConfig(max_num_seqs=8))
    opened = open_device(config, 1, lambda *_: None, {})
    assert opened.ready.device.startswith("cuda")
    # Every slot's longest sequence: less than half.
    assert opened.ready.groups[0].pages == 1 + 8 * 17


def test_the_largest_step_is_measured_before_pages_are_shared_out(path: Path) -> None:
    config = Config(model=ModelConfig(model=str(path)),
                    memory=MemoryConfig(memory_fraction=0.5),
                    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256))
    opened = open_device(config, 1, lambda *_: None, {})
    told = opened.footprint
    assert opened.meter is None and told.step == (256, 8)
    assert told.measured["workspace"] > 0
    for name in ("tables", "states", "pages"):
        assert told.measured[name] == told.planned[name]
    # torch rounds each tensor up to 512 bytes.
    assert told.planned["weights"] <= told.measured["weights"] < 1.2 * told.planned["weights"]
    assert opened.runner.graphs is not None and len(opened.runner.graphs.shapes) == 4
    assert opened.runner.segments is not None
    assert opened.runner.segments.shapes == [256, 128, 64, 32, 16]
    assert told.measured["graphs"] > 0 and told.planned["graphs"] > 0


@pytest.mark.parametrize("kind", ["plain", "windows", "hybrid", "latent", "sparse"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_nothing_is_compiled_for_requests(kind: str, eager: bool, tmp_path: Path) -> None:
    """By what Triton's own hooks tell once the device is open."""
    write_kind(tmp_path, kind)
    drafts = kind == "hybrid"
    config = Config(model=ModelConfig(model=str(tmp_path)),
                    memory=MemoryConfig(memory_fraction=0.3),
                    device=DeviceConfig(enforce_eager=eager),
                    speculation=SpeculationConfig(speculative="mtp:2" if drafts else "off"),
                    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256))
    said: list[tuple[str, str]] = []
    runner = open_device(config, 1, lambda *own: said.append(own), {}).runner
    assert ("warming", "kernels 0/") in [(a, b[:10]) for a, b in said]
    compilations, draw = Compilations(), random.Random(7)
    compilations.watch()
    vocab, most = runner.tables.vocab, runner.tables.max_len - 60
    text = [draw.randrange(vocab) for _ in range(most)]
    ring = Ring(runner, budget=256, force_preempt_every=9)
    for i in range(60):
        start = text[:draw.choice([0, 16, most // 2, most])]
        ring.submit(start + [draw.randrange(vocab) for _ in range(draw.choice([1, 3, 17, 60]))],
                    PARAMS[i % len(PARAMS)], i)
        for _ in range(draw.randint(0, 3)):
            ring.step()
    assert all(out.finish for out in ring.run())
    assert compilations.count == 0


def test_without_graphs_every_step_is_launched(path: Path) -> None:
    config = Config(model=ModelConfig(model=str(path)), device=DeviceConfig(enforce_eager=True),
                    memory=MemoryConfig(memory_fraction=0.5),
                    scheduler=SchedulerConfig(max_num_seqs=8))
    opened = open_device(config, 1, lambda *_: None, {})
    assert opened.runner.graphs is None and opened.runner.segments is None
    assert "graphs" not in opened.footprint.planned
