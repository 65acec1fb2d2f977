"""Steps with prompts replayed in segments give the tokens of steps that are run operation by
operation, whatever the segments leave in their memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import (
    RecordingCapturer,
    check_freed_pages,
    check_padding,
    model_of_kind,
    played,
    told,
    with_graphs,
    with_segments,
)
from helpers_models import write_checkpoint
from helpers_speculation import make_runner
from helpers_worker import Output

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig, SchedulerConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.messages import StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.plan.graph_memory import (
    EagerReasons,
    Graphs,
    planned_graphs,
    segment_sizes,
    why_eager,
)
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker import allocation, device, graph_setup
from actorium.gpu.worker.graph_setup import trial_graph_bytes

pytestmark = pytest.mark.usefixtures("as_on_a_device")
COMMON = [5, 99, 23, 61, 7, 7, 12, 30] * 5
PROMPTS = [[3, 14, 15, 92], COMMON + [1, 2], [65], list(range(40, 75)), COMMON + [9] * 21,
           [8, 97, 9, 3, 2], [7] * 17, COMMON[:33] + [100, 1, 50], [150, 20] * 5, [33] * 2]
KINDS: dict[str, list[ResolvedParams]] = {
    "greedy": [ResolvedParams(max_tokens=n, temperature=0.0) for n in (20, 3, 11, 1, 9, 2)],
    "all": [ResolvedParams(max_tokens=14, temperature=0.9, prompt_logprobs=1),
            ResolvedParams(max_tokens=12, temperature=0.8, repetition_penalty=1.4),
            ResolvedParams(max_tokens=14, temperature=1.0, logit_bias={5: 6.0}, logprobs=2),
            ResolvedParams(max_tokens=5, temperature=0.0, logprobs=1, prompt_logprobs=2),
            ResolvedParams(max_tokens=14, temperature=1.0, top_p=0.7, eos_ids=(3, 9),
                           min_tokens=6)],
}
SIZES = [3, 8, 20, 41]
"""Below the budget of a step, so that some steps are too large."""
BUDGET = 50


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return functools.cache(lambda kind: model_of_kind(tmp_path_factory.mktemp(kind), kind))


def play(runner: ModelRunner, kind: str, number: int = 14, **more: Any) -> list[Output]:
    """Requests of one kind, of which the later ones come while the first ones run."""
    return played(runner, PROMPTS, KINDS[kind], number, budget=BUDGET, **more)[1]


def sizes_of(runner: ModelRunner) -> list[int]:
    """Tokens of each step from now on."""
    sizes: list[int] = []
    plain = runner.launch

    def launch(plan: StepPlan, *rest: Any) -> Any:
        extend = [int.from_bytes(plan.extend[at + 4:at + 8], "little")
                  for at in range(0, len(plan.extend), 8)]
        sizes.append(sum(extend) + len(plan.decode) // 4)
        return plain(plan, *rest)

    runner.launch = launch  # type: ignore[method-assign]
    return sizes


LIKE_OTHERS = ("chunks", "scaled-queries", "attention", "mamba", "sparse")
"""Kinds whose steps are cut as those of another one, or of `test_beside_graphs_of_decodes`."""


# --- the same tokens -----------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "kind"), [
    pytest.param(name, kind, marks=[pytest.mark.slow] * (
        name in LIKE_OTHERS or (kind == "greedy") != (name == "windows")))
    for name in ("windows", "hybrid", "latent", *LIKE_OTHERS)
    for kind in KINDS])
def test_tokens_are_those_of_steps_that_are_run(make: Callable[[str], Any], name: str,
                                                kind: str) -> None:
    """Prompts and decodes mixed, chunks, cached prefixes, odd numbers of tokens."""
    model, most = make(name), {"slots": 8, "checkpoints": 9}
    want = play(make_runner(model, 0, arrays=DeviceArrays, **most), kind)
    runner = make_runner(model, 0, arrays=DeviceArrays, **most)
    segments, sizes = with_segments(runner, SIZES), sizes_of(runner)
    got = play(runner, kind)
    assert told(got) == told(want)
    assert segments.replays == sum(0 < size <= SIZES[-1] for size in sizes) > 10
    assert any(size > SIZES[-1] for size in sizes) and any(o.cached for o in got)


def test_beside_graphs_of_decodes(make: Callable[[str], Any]) -> None:
    """Both in one memory: what one leaves there the other overwrites."""
    model = make("attention")
    want = play(make_runner(model, 0, slots=8, arrays=DeviceArrays), "all")
    runner = make_runner(model, 0, slots=8, arrays=DeviceArrays)
    graphs = with_graphs(runner, [1, 3, 5])
    segments, sizes = with_segments(runner, SIZES), sizes_of(runner)
    got = play(runner, "all")
    assert told(got) == told(want)
    assert graphs.replays > 5 and segments.replays > 5
    assert graphs.replays + segments.replays <= len(sizes)


@pytest.mark.parametrize("kind", [pytest.param("greedy", marks=pytest.mark.slow), "all"])
def test_windows_and_drafts(make: Callable[[str], Any], kind: str) -> None:
    """Drafts are made of every row of a step, and written behind the rows that are certain."""
    model, runs = make("hybrid"), []
    for captured in (False, True):
        runner = make_runner(model, 2, slots=6, arrays=DeviceArrays, mtp=True, force=(0.7, 0.4))
        segments = with_segments(runner, SIZES) if captured else None
        runs.append(told(play(runner, kind, 10, speculative="mtp:2,fixed")))
    assert runs[0] == runs[1]
    assert segments is not None and segments.replays > 10


def test_padding_touches_the_sink_alone(make: Callable[[str], Any]) -> None:
    segments = check_padding(make("windows"), PROMPTS[:5], 20,
                             lambda runner: with_segments(runner, [64]))
    assert segments.replays > 10


def test_padding_is_of_no_sequence_that_was_there_before(make: Callable[[str], Any]) -> None:
    segments = check_freed_pages(make("windows"), PROMPTS[:1] + PROMPTS[2:4],
                                 lambda runner: with_segments(runner, [64]))
    assert segments.replays == 18


def test_a_middle_that_reads_too_late_is_seen(make: Callable[[str], Any]) -> None:
    """What a segment leaves for the next middle is gone with the next replay."""
    runner = make_runner(make("attention"), 0, slots=8, arrays=DeviceArrays)
    segments = with_segments(runner, [8])
    chain = segments._chains[8]
    with torch.inference_mode():
        chain.segments[0].work.replay()
        assert not chain.segments[0].p.isnan().any()
        chain.segments[1].work.replay()
    assert chain.segments[0].p.isnan().all() and not chain.segments[1].p.isnan().any()


# --- which, and how many -------------------------------------------------------------------------

def test_the_largest_first_and_nothing_but_the_sink(make: Callable[[str], Any]) -> None:
    runner = make_runner(make("attention"), 0, slots=8, arrays=DeviceArrays)
    for layer in runner.pools[0].layers:
        layer.fill_(math.nan)
    said: list[tuple[str, str]] = []
    segments = PiecewiseGraphRunner(runner.model, runner.pools, RecordingCapturer(), [20, 8, 3])
    segments.capture(lambda phase, detail: said.append((phase, detail)))
    assert said == [("warming", f"segments {i}/3") for i in range(3)]
    assert runner.segments is None, "nothing is served before all are there"
    size = runner.tables.page_size
    assert all(layer[size:].isnan().all() for layer in runner.pools[0].layers)


def test_sizes_of_a_configuration() -> None:
    def sizes(why: str = "", tokens: int = 2048, **own: Any) -> list[int]:
        return segment_sizes(validate(Config(
            scheduler=SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=4),
            device=DeviceConfig(**own))), why)

    assert sizes() == [*range(512, 63, -32), 32, 16] and sizes(tokens=100) == [100, 96, 64, 32, 16]
    assert sizes(tokens=512) == sizes() and sizes(tokens=520) == sizes()
    assert sizes(tokens=2) == [2], "no step has more, of whichever number of sequences"
    assert sizes(graph_token_counts="24, 8,8") == [24, 8]
    assert sizes(graph_token_counts="24,8,101", tokens=100) == [24, 8]
    assert sizes(graph_token_counts="off") == sizes(enforce_eager=True) == sizes("why") == []
    for wrong in ("some", "0", "8,0", "8193", "16,8193"):
        with pytest.raises(BadConfig, match="graph_token_counts: must be auto, all, off, or numb"
                                            "ers between 1 and 8192"):
            sizes(graph_token_counts=wrong)
    for most in (-1, 8193):
        with pytest.raises(BadConfig, match="graph_max_tokens: must be between 0 and 8192"):
            sizes(graph_max_tokens=most)


def test_padding_of_the_default_sizes() -> None:
    """From 257 tokens on at most an eighth is added, below always fewer than 32 tokens."""
    falling = segment_sizes(Config())
    worst = [(small + 1, big - small - 1) for big, small in pairwise(falling)]
    assert all(more < 32 for _, more in worst)
    assert all(more <= tokens / 8 for tokens, more in worst if tokens > 256)


def test_reasons_for_running_eagerly() -> None:
    assert why_eager(False, True) == EagerReasons()
    assert why_eager(True, True) == EagerReasons(*["experts are grouped by the host"] * 2)
    told = why_eager(False, False)
    assert told.decodes and not told.segments
    graphs = planned_graphs(Config(), 0, told)
    assert not graphs.decodes and graphs.tokens


def test_a_worker_opens_with_graphs_and_segments(tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: what they take is measured before pages are shared out, and again at the end."""
    write_checkpoint(tmp_path, seed=5)
    free = iter(range(1 << 30, 0, -100))
    monkeypatch.setattr(allocation, "device_arrays", lambda own, *_: DeviceArrays(own))
    monkeypatch.setattr(graph_setup, "why_eager", lambda *_: EagerReasons())
    monkeypatch.setattr(graph_setup, "CudaCapturer", lambda _: RecordingCapturer())
    monkeypatch.setattr(graph_setup, "free_bytes", lambda _: next(free))
    config = Config(model=ModelConfig(model=str(tmp_path), max_model_len=64),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40),
                    device=DeviceConfig(device="cpu", kernels="torch", threads=1,
                                        graph_token_counts="8,16"))
    said: list[tuple[str, str]] = []
    opened = device.open_device(config, 1, lambda *told: said.append(told), {})
    runner, told = opened.runner, opened.footprint
    assert runner.graphs is not None and runner.segments is not None
    assert [shape.rows for shape in runner.graphs.shapes] == [4, 2, 1]
    assert runner.segments.shapes == [16, 8]
    # The double's memory goes with each reading: before each segment, and at the end.
    assert told.measured["graphs"] == 300 and told.planned["graphs"] > 0
    assert [("warming", f"graphs {i}/3") for i in range(3)] == [
        own for own in said if own[1].startswith("graphs")]
    # Of each kind 100 bytes for the first, and 100 for each of the others.
    graphs = planned_graphs(config, 0, EagerReasons())
    assert trial_graph_bytes(runner, graphs) == 300 + 200
    assert trial_graph_bytes(runner, graphs._replace(decodes=[])) == 200
    assert trial_graph_bytes(runner, Graphs([], [])) == 0
