"""Steps replayed from graphs give the tokens of steps that are run, whatever happens in between."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_graphs import (
    Operation,
    RecordingCapturer,
    check_freed_pages,
    check_padding,
    model_of_kind,
    played,
    shapes,
    told,
    with_graphs,
    with_segments,
)
from helpers_hybrid import MOE, write_hybrid
from helpers_models import write_checkpoint
from helpers_pairs import pairs
from helpers_speculation import RUBBISH, Guess, make_runner
from helpers_worker import CPU, Output, Ring

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.config.validation import validate
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.actors.scheduler.draft_policy import DraftChoice
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.graph_memory import batch_sizes, graph_shapes
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.step.text_proposer import text_proposers
from actorium.tools.cli import main

pytestmark = pytest.mark.usefixtures("as_on_a_device")
SIZES = [1, 2, 4, 8]
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [100, 1, 50],
           [9, 8, 7, 6, 5, 4, 3], [150, 20] * 5, [33] * 2, [44, 45, 46, 47]]
KINDS: dict[str, list[ResolvedParams]] = {
    "greedy": [ResolvedParams(max_tokens=n, temperature=0.0) for n in (20, 3, 13, 16, 1, 9, 20, 2)],
    "drawn": [ResolvedParams(max_tokens=14, temperature=0.9),
              ResolvedParams(max_tokens=20, temperature=0.0)],
    "truncated": [ResolvedParams(max_tokens=15, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
                  ResolvedParams(max_tokens=20, temperature=0.0), ResolvedParams(max_tokens=6)],
    "ends": [ResolvedParams(max_tokens=22, temperature=1.0, eos_ids=tuple(range(40, 60)),
                            min_tokens=5),
             ResolvedParams(max_tokens=22, temperature=0.0, eos_ids=(9, 12, 44, 101))],
    "all": [ResolvedParams(max_tokens=16, temperature=0.9),
            ResolvedParams(max_tokens=16, temperature=0.8, repetition_penalty=1.4,
                           presence_penalty=0.5),
            ResolvedParams(max_tokens=16, temperature=1.0, logit_bias={5: 6.0, 77: -100.0},
                           logprobs=2),
            ResolvedParams(max_tokens=5, temperature=0.0, logprobs=1),
            ResolvedParams(max_tokens=16, temperature=1.0, top_p=0.7, eos_ids=(3, 9),
                           min_tokens=6)],
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return functools.cache(lambda kind: model_of_kind(tmp_path_factory.mktemp(kind), kind))


def play(runner: ModelRunner, kind: str, number: int = 16,
         **more: Any) -> tuple[Ring, list[Output]]:
    """Requests of one kind, of which the later ones come while the first ones run."""
    return played(runner, PROMPTS, KINDS[kind], number, **more)


# --- the same tokens -----------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "kind"), [
    pytest.param(name, kind, marks=() if (name, kind) in (
        ("attention", "ends"), ("hybrid", "all"), ("latent", "greedy"))
                 else pytest.mark.slow)
    for name in ("attention", "windows", "hybrid", "experts", "latent", "chunks", "scaled-queries")
    for kind in KINDS])
def test_tokens_are_those_of_steps_that_are_run(make: Callable[[str], Any], name: str,
                                                kind: str) -> None:
    """Batches grow and shrink over the sizes of graphs, and beyond them."""
    model = make(name)
    _, want = play(make_runner(model, 0, slots=12, arrays=DeviceArrays), kind, budget=24)
    runner = make_runner(model, 0, slots=12, arrays=DeviceArrays)
    graphs = with_graphs(runner, SIZES)
    _, got = play(runner, kind, budget=24)
    assert told(got) == told(want)
    assert graphs.replays > 10


@pytest.mark.parametrize("name", ["attention", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_preemptions_and_aborts(make: Callable[[str], Any], name: str) -> None:
    model, sizes = make(name), {"slots": 6, "pages": 40, "checkpoints": 4}
    _, want = play(make_runner(model, 0, arrays=DeviceArrays, **sizes), "truncated")
    runner = make_runner(model, 0, arrays=DeviceArrays, **sizes)
    graphs = with_graphs(runner, [1, 3, 5])
    ring, got = play(runner, "truncated", cancel=(4, 9, 17), budget=24, force_preempt_every=4)
    assert ring.preemptions >= 4 and graphs.replays > 10
    assert [out.finish for out in got].count("abort") >= 1
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens[:len(one.tokens)]
        assert one.finish == "abort" or one.tokens == other.tokens


@pytest.mark.parametrize(("drafts", "kind"), [
    (1, "greedy"), *(pytest.param(*rarer, marks=pytest.mark.slow) for rarer in (
        (1, "ends"), (2, "truncated"), (3, "drawn"), (3, "all")))])
def test_own_drafts_from_verifying_to_drafting(make: Callable[[str], Any], drafts: int,
                                               kind: str) -> None:
    """The windows are graphs; drafts are those of steps that are run."""
    model = make("hybrid")
    runs = []
    for captured in (False, True):
        runner = make_runner(model, drafts, slots=6, arrays=DeviceArrays, mtp=True,
                             force=(0.7, 0.4))
        graphs = with_graphs(runner, [2, 5], (1, drafts + 1)) if captured else None
        ring, got = play(runner, kind, 12, budget=40, speculative=f"mtp:{drafts},fixed")
        runs.append((told(got), ring.core.health().gauges["spec_decode_num_accepted_tokens"]))
    assert runs[0] == runs[1] and runs[0][1] > 0
    assert graphs is not None and graphs.replays >= 10


@pytest.mark.parametrize("method", ["suffix", pytest.param("ngram", marks=pytest.mark.slow)])
def test_drafts_of_the_text_behind_graphs(make: Callable[[str], Any], method: str) -> None:
    """What a graph has sampled is taken into the text, and drafts of it are verified in the next
    one."""
    pytest.importorskip("triton")
    runs = []
    for captured in (False, True):
        runner = make_runner(make("attention"), 2, slots=6, arrays=DeviceArrays, force=(0.7, 0.4))
        runner.tables.keep_history()
        runner.proposers = text_proposers(SpeculationConfig(
            speculative=f"{method}:2", prompt_lookup_min=1), runner.tables)
        graphs = with_graphs(runner, [2, 5], (1, 3)) if captured else None
        ring, got = play(runner, "truncated", 12, budget=40, speculative=f"{method}:2,fixed")
        runs.append((told(got), ring.core.health().gauges["spec_decode_num_accepted_tokens"]))
    assert runs[0] == runs[1] and runs[0][1] > 0
    assert graphs is not None and graphs.replays >= 10


@pytest.mark.slow
def test_windows_that_change_from_step_to_step(make: Callable[[str], Any]) -> None:
    """Drafts are accepted whatever was sampled, so that tokens tell of every single one."""
    runs = []
    for captured in (False, True):
        rng = random.Random(1)
        runner = make_runner(make("hybrid"), 2, slots=6, arrays=DeviceArrays, mtp=True,
                             force=(0.8, 0.6))
        graphs = with_graphs(runner, [2, 5], (1, 2, 3)) if captured else None
        ring = Ring(runner, budget=40, speculative="mtp:2,fixed")
        ring.core._planner.drafting.next = lambda batch, rng=rng: DraftChoice(
            "", rng.choice([0, 0, 1, 1, 2, 2, 2]))
        for i in range(12):
            ring.submit(PROMPTS[i % len(PROMPTS)], KINDS["drawn"][i % 2], i + 1)
        runs.append(told(ring.run()))
    assert runs[0] == runs[1]
    assert graphs is not None and graphs.replays > 5


@pytest.mark.slow
def test_right_drafts_and_wrong_ones(make: Callable[[str], Any]) -> None:
    """Of somebody else: the host makes them between two replays."""
    model = make("attention")
    _, want = play(make_runner(model, 0, slots=9, arrays=DeviceArrays), "truncated", 10)
    guess = Guess(lambda seed, at: (seed * 31 + at * 17) % 5 < 3)
    runner = make_runner(model, 2, guess, slots=9, arrays=DeviceArrays)
    guess.tables = runner.tables
    guess.wholes = {i + 1: PROMPTS[i] + out.tokens for i, out in enumerate(want)}
    graphs = with_graphs(runner, SIZES, (1, 2, 3))
    _, got = play(runner, "truncated", 10, speculative="mtp:2,fixed", budget=40)
    assert told(got) == told(want) and graphs.replays > 5


def test_padding_touches_the_sink_alone(make: Callable[[str], Any]) -> None:
    check_padding(make("windows"), PROMPTS[:5], 40, lambda runner: with_graphs(runner, [7]))


def test_padding_is_of_no_sequence_that_was_there_before(make: Callable[[str], Any]) -> None:
    graphs = check_freed_pages(make("windows"), PROMPTS[:3],
                               lambda runner: with_graphs(runner, [4]))
    assert graphs.replays == 17


@pytest.mark.parametrize(("where", "said", "captured"), pairs([
    ("page", "a freed page of layer 1 was written: number 7"),
    ("length", "a released slot's seq_len was written: number 3"),
    ("pages", "a released slot's pages was written: number 3"),
    ("drafts", "a released slot's drafts' accepted was written: number 3"),
    ("state", "a released slot's state was written: number 2")], ["graphs", "segments"]))
def test_a_planted_write_is_seen(make: Callable[[str], Any], captured: str, where: str, said: str
                                 ) -> None:
    """Of one number, by the last operation of what is replayed."""
    runner = make_runner(make("hybrid"), 0, slots=8, arrays=DeviceArrays)
    graphs = (with_graphs(runner, [4]) if captured == "graphs"
              else with_segments(runner, [64]))
    play(runner, "greedy", 2)
    tables, pool = runner.tables, runner.pools[0]
    page = (pool.layers[1] if len(pool.layers) > 1 else pool.layers[0])[7 * pool.page_size:]
    assert runner.states is not None
    target = {"page": page[0, 0], "length": tables.seq_len[3:4], "pages": tables.pages[0][3],
              "drafts": tables.drafts.accepted[3:4],
              "state": runner.states.layers[0].state[2]}[where]
    graphs._capturer.recorded[0].operations.append(
        Operation(torch.ops.aten.add_.Scalar, (target.view(-1)[:1], 1), {}, []))
    with pytest.raises(AssertionError, match=said.replace(
            "layer 1", f"layer {min(1, len(pool.layers) - 1)}")):
        play(runner, "greedy", 2)


def test_padding_has_no_state(make: Callable[[str], Any]) -> None:
    """Two sequences in windows of seven: there is a state for each slot and no other, and those of
    nobody stay as they are."""
    runner = make_runner(make("hybrid"), 2, slots=8, arrays=DeviceArrays, mtp=True,
                         force=(0.8, 0.6))
    graphs = with_graphs(runner, [7], (1, 3))
    play(runner, "greedy", 2, budget=40, speculative="mtp:2,fixed")
    assert graphs.replays > 5 and runner.states is not None
    for layer in runner.states.layers:
        for part in layer:
            assert len(part) == 7 and (part[2:] == RUBBISH).all()
            assert (part[:2] != RUBBISH).any(tuple(range(1, part.dim()))).all()


# --- what a step brings along --------------------------------------------------------------------

def _i4(*values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()


def test_a_step_is_one_copy_to_the_device_or_none(make: Callable[[str], Any]) -> None:
    runner = make_runner(make("attention"), 0, slots=8, arrays=DeviceArrays)
    with_graphs(runner, SIZES)
    arrays: Any = runner.arrays
    sent = []

    def run(**plan: Any) -> None:
        before, begun = arrays.uploads, []
        launched = runner.launch(StepPlan(1, len(sent), **plan),
                                 lambda: begun.append(arrays.uploads))
        assert begun == [before], "the host's part is over, the device's has not begun"
        launched.result()
        sent.append(arrays.uploads - before)

    loaded = ResolvedParams(max_tokens=50, logit_bias={3: 1.0}, frequency_penalty=0.1, logprobs=2,
                            prompt_logprobs=1, eos_ids=(5,), min_tokens=4)
    plain = ResolvedParams(max_tokens=50, temperature=0.0)
    admits = [Admit(s, _i4(5, 6, 7), 3, 0, _i4(s), params, s)
              for s, params in ((1, loaded), (2, plain), (3, plain))]
    run(admit=admits, extend=_i4((1, 3), (2, 2), (3, 3)))
    run(decode=_i4(1, 3), extend=_i4(2, 1), page_appends=_i4((3, 1, 9)))
    run(decode=_i4(1, 2, 3))
    run(decode=_i4(2, 3))
    run(decode=_i4(2, 3))
    run(decode=_i4(2, 3), page_appends=_i4((2, 1, 10)))
    assert sent == [1, 1, 1, 1, 0, 1]


def test_every_size_is_captured_and_steps_use_them(make: Callable[[str], Any]) -> None:
    runner = make_runner(make("attention"), 0, slots=8, arrays=DeviceArrays)
    said: list[tuple[str, str]] = []
    graphs = runner.decode_graphs(RecordingCapturer(), shapes(SIZES))
    before = [t.clone() for t in (runner.tables.seq_len, runner.tables.ended, *runner.tables.pages)]
    graphs.capture(lambda phase, detail: said.append((phase, detail)))
    after = (runner.tables.seq_len, runner.tables.ended, *runner.tables.pages)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [shape.rows for shape in graphs.shapes] == [8, 4, 2, 1], "the largest first"
    assert said == [("warming", f"graphs {i}/4") for i in range(4)]
    assert runner.graphs is None, "nothing is served before all are there"


@pytest.mark.parametrize(("most", "asked", "want"), [
    (1, (), [1]), (5, (), [1, 2, 4, 5]), (40, (), [1, 2, 4, 8, 16, 24, 32, 40]),
    (256, (8, 2, 300, 2), [2, 8]), (3, (4,), [])])
def test_sizes(most: int, asked: tuple[int, ...], want: list[int]) -> None:
    assert batch_sizes(most, asked) == want


def test_default_sizes_pad_little() -> None:
    sizes = batch_sizes(1024)
    assert sizes[-1] == 512 and len(sizes) <= 20
    assert all(b <= 2 * a for a, b in zip(sizes, sizes[1:], strict=False))
    assert all(b <= 1.5 * a for a, b in zip(sizes, sizes[1:], strict=False) if a >= 16)


def test_graphs_of_a_configuration() -> None:
    def shapes_of(drafts: int, why: str = "", speculative: str = "auto",
                  lora: bool = False, **device: Any) -> list[tuple[int, ...]]:
        config = validate(Config(
            scheduler=SchedulerConfig(max_num_seqs=4), device=DeviceConfig(**device),
            adapters=AdapterConfig(enable_lora=lora),
            speculation=SpeculationConfig(speculative=speculative)))
        found = graph_shapes(config, drafts, why)
        assert lora or not any(shape.adapted for shape in found)
        return [shape if lora else shape[:2] for shape in found]

    assert shapes_of(0) == [(4, 1), (2, 1), (1, 1)]
    assert shapes_of(1) == [(4, 2), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)]
    assert shapes_of(2, speculative="mtp:2,fixed", graph_batch_sizes="3, 9,1") == [(3, 3), (1, 3)]
    assert shapes_of(0, lora=True, graph_batch_sizes="4,2") == [
        (4, 1, True), (4, 1, False), (2, 1, True), (2, 1, False)]
    assert shapes_of(0, enforce_eager=True) == shapes_of(0, "for a reason") == []
    assert graph_shapes(Config(device=DeviceConfig(graph_batch_sizes="300")), 0) == []


def test_the_plan_reports_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their bytes grow with the largest one, and come off the caches of a whole device."""
    write_checkpoint(tmp_path)

    def planned(*words: str) -> dict[str, Any]:
        assert main(["plan", str(tmp_path), "--gpu-memory", "4GiB", "--json", *words]) == 0
        told = json.loads(capsys.readouterr().out)
        own = {line["name"]: line for line in told["outside"]}["graphs"]
        return {**own, "budget": told["budget"]}

    few, many = planned("--cuda-graph-bs", "1,8"), planned("--cuda-graph-bs", "1,8,256")
    none = planned("--enforce-eager")
    assert few["detail"] == ("an estimate for 2 of decodes and segments for 17 sizes of "
                             "other steps, on cuda; on a cpu programs of up to 8 rows take "
                             "246,528")
    assert 6 << 20 < few["bytes"] < many["bytes"]
    assert none["bytes"] == 0 and none["detail"] == "none: --enforce-eager"
    assert none["budget"] - many["budget"] == many["bytes"]


# --- the capturer's own teeth --------------------------------------------------------------------

def test_experts_grouped_by_the_host_cannot_be_captured(tmp_path: Path) -> None:
    write_hybrid(tmp_path, MOE, 5)
    model = load_model(tmp_path, Config(model=ModelConfig(max_model_len=96)), CPU, lambda *_: None)
    assert model.waits
    with pytest.raises(AssertionError, match="waits for the device"):
        with_graphs(make_runner(model, 0, slots=4, arrays=DeviceArrays), [2])


def test_a_host_read_cannot_be_captured() -> None:
    x = torch.arange(4.0)
    capturer = RecordingCapturer()
    for run in (lambda: int(x.sum()), lambda: x[x > 1], lambda: torch.tensor([1, 2]) + x[:2],
                lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="waits for the device|host data"):
            capturer.capture(run)


def test_a_replay_runs_no_python() -> None:
    """A number of the host's is what it was; what nobody keeps is rubbish."""
    x, out, scale = torch.ones(3), torch.zeros(3), [2.0]
    capturer = RecordingCapturer()

    def run() -> torch.Tensor:
        doubled = x * scale[0]
        out.copy_(doubled)
        return doubled

    work, doubled = capturer.capture(run)
    scale[0] = 5.0
    x.fill_(7.0)
    work.replay()
    assert out.tolist() == doubled.tolist() == [14.0] * 3
    other, _ = capturer.capture(lambda: x + 1)
    other.replay()
    assert doubled.isnan().all(), "another step has begun"
