"""The warm-up leaves no trace, and says how far it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_graphs import model_of_kind, with_graphs, with_segments
from helpers_speculation import make_runner
from helpers_worker import complete

from actorium.actors.config.tree import Config, SchedulerConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.parallel.rank_group import LoneRank
from actorium.gpu.plan.graph_memory import EagerReasons, Graphs, GraphShape
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.tables import SAMPLES, TRUNCATES, SlotTables
from actorium.gpu.worker import allocation, device, graph_setup
from actorium.gpu.worker.measure import Footprint
from actorium.gpu.worker.warmup import WarmupCase, run_case, warm_up_kernels, warmup_cases

BUDGET = 24
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75))]
PARAMS = [ResolvedParams(max_tokens=8, temperature=0.0),
          ResolvedParams(max_tokens=8, temperature=0.9, top_p=0.8, logit_bias={5: 3.0}),
          ResolvedParams(max_tokens=8, temperature=0.9, frequency_penalty=0.4)]


def runner_of(path: Path, kind: str, arrays: type[Any]) -> ModelRunner:
    """With two drafts, and checkpoints, where the layers have them; all memory is as new."""
    drafts = 2 if kind == "hybrid" else 0
    runner = make_runner(model_of_kind(path, kind), drafts, pages=40, arrays=arrays,
                         checkpoints=3 * (kind == "hybrid"), mtp=drafts > 0)
    for pool in runner.all_pools:
        for layer in pool.layers:
            layer.zero_()
    if runner.states is not None:
        runner.states.clear()
    return runner


def numbers(t: SlotTables) -> list[Any]:
    """All that a table holds."""
    arrays = [t.last_token, t.seq_len, t.ended, t.record, t.eos[:, :1], t.drafts.tokens, *t.pages,
              t.drafts.accepted, t.drafts.held, t.host_len, t.host_low, t.host_min, t.flags]
    return [own.clone().numpy() if isinstance(own, torch.Tensor) else own.copy() for own in arrays]


@pytest.mark.parametrize(("kind", "arrays"), [("plain", DeviceArrays), ("windows", DeviceArrays),
                                             ("hybrid", DeviceArrays), ("hybrid", HostArrays)])
def test_nothing_is_left_but_rubbish_in_the_sink(kind: str, arrays: type[Any], tmp_path: Path
                                                 ) -> None:
    runner = runner_of(tmp_path, kind, arrays)
    before, said = numbers(runner.tables), []
    warm_up_kernels(runner, BUDGET, lambda phase, detail: said.append((phase, detail)))
    for own, was in zip(numbers(runner.tables), before, strict=True):
        np.testing.assert_array_equal(own, was)
    t = runner.tables
    assert (t.eos == -1).all() and not t.sequences and t.counts is None and t.bias_ids is None
    assert not any(runner.served.values())
    for pool in runner.all_pools:
        size = runner.tables.page_size
        assert all(layer[:size].any() and not layer[size:].any() for layer in pool.layers)
    if runner.states is not None:
        assert not any(part.any() for layer in runner.states.layers for part in layer)
    assert said[0] == ("warming", f"kernels 0/{len(said)}") and len(said) > 20


def test_requests_have_the_tokens_they_would_have_had(tmp_path: Path) -> None:
    """With what was allocated for rare parameters given up, and graphs beside."""
    runner = runner_of(tmp_path, "plain", DeviceArrays)
    want = complete(runner, PROMPTS, PARAMS)
    warm_up_kernels(runner, BUDGET, lambda *_: None)
    with_graphs(runner, [1, 4])
    with_segments(runner, [8])
    warm_up_kernels(runner, 8, lambda *_: None)
    assert complete(runner, PROMPTS, PARAMS) == want


def test_every_way_through_the_sampler_and_every_window_is_played(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "hybrid", HostArrays)
    met: set[tuple[int, int, bool, int]] = set()
    inner = runner._sample

    def spy(step: Any, logits: Any, up: Any, out: Any) -> Any:
        met.add((step.needs, step.q_len, step.extends is not None, out.plan.drafts))
        return inner(step, logits, up, out)

    runner._sample = spy  # type: ignore[method-assign]
    warm_up_kernels(runner, BUDGET, lambda *_: None)
    needs = {each[0] for each in met}
    assert {0, SAMPLES, SAMPLES | TRUNCATES} < needs
    assert {bit for bit in range(8) if any(need >> bit & 1 for need in needs)} == set(range(8))
    for mixed in (False, True):
        assert {q_len for _, q_len, own, drafts in met if own is mixed and drafts} == {1, 2, 3}


def test_plans_fit_the_smallest_engine(tmp_path: Path) -> None:
    model = model_of_kind(tmp_path, "plain")
    runner = make_runner(model, 0, slots=2, pages=2)
    for budget in (1, 2, 5):
        assert all(count <= budget and cached + count + each.left < model.shape.max_model_len
                   for each in warmup_cases(runner.tables, budget) for cached, count in each.rows)
        warm_up_kernels(runner, budget, lambda *_: None)
        assert not runner.tables.sequences


def test_cached_tokens_of_a_case_are_not_recomputed(tmp_path: Path) -> None:
    """The host takes the tokens before it for computed: the question's alone are."""
    runner, seen = runner_of(tmp_path, "plain", HostArrays), []
    inner = runner.model.forward

    def spy(batches: Any, *rest: Any) -> torch.Tensor:
        seen.append([(row.start, row.count) for row in batches[0].extends])
        return inner(batches, *rest)

    runner.model.forward = spy  # type: ignore[method-assign]
    run_case(runner, WarmupCase([(60, 5), (0, 3)], [0], beside=2))
    assert seen == [[(60, 5), (0, 3)], [(0, 2)]]
    assert not runner.tables.sequences


@pytest.mark.parametrize("kind", ["plain", "latent"])
def test_the_largest_chunk_is_measured_behind_the_longest_prefix(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, on CUDA; with log-probabilities of a prompt's tokens."""
    runner, seen = runner_of(tmp_path, kind, HostArrays), []
    inner, prompts = runner.model.forward, runner._prompts

    def spy(batches: Any, *rest: Any) -> torch.Tensor:
        seen.append([(row.start, row.count) for row in batches[0].extends])
        return inner(batches, *rest)

    runner.model.forward = spy  # type: ignore[method-assign]
    monkeypatch.setattr(runner, "_prompts", lambda *own: (seen.append("logits"), prompts(*own))[1])
    for name in ("synchronize", "memory_allocated", "max_memory_allocated",
                 "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: (seen.append(name), 7)[1])
    config = Config(scheduler=SchedulerConfig(max_num_batched_tokens=BUDGET))
    allocation._cuda_workspace(config, runner, torch.device("cuda"))
    measured = seen[seen.index("reset_peak_memory_stats"):seen.index("max_memory_allocated")]
    longest = runner.tables.max_len - 1
    assert [(0, BUDGET)] in measured and [(longest - BUDGET, BUDGET)] in measured
    assert [(longest - 2, 1)] * (runner.tables.slots - 1) in measured
    assert measured.count("logits") >= 2 and not runner.tables.sequences


def test_a_device_is_warm_before_its_graphs_are_captured_and_again_with_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which a CUDA device is opened, whose work is made up here."""
    done: list[Any] = []
    runner = SimpleNamespace(arrays=SimpleNamespace(device=torch.device("cuda")), graphs=None,
                             segments=None, model=None)
    kinds = [SimpleNamespace(capture=lambda say, name=name, **_: done.append(name) or {},
                             shapes=[64, 16]) for name in ("decodes", "segments")]
    monkeypatch.setattr(graph_setup, "why_eager", lambda *_: EagerReasons("", ""))
    monkeypatch.setattr(graph_setup, "segment_bounds", lambda *_: None)
    monkeypatch.setattr(device, "check_numbers", lambda *_: done.append("numbers"))
    monkeypatch.setattr(device, "measure_key_means", lambda *_: None)
    for module in (device, graph_setup):
        monkeypatch.setattr(module, "warm_up_kernels", lambda own, budget, say: done.append(
            (budget, own.graphs is kinds[0], own.segments is kinds[1])))
    monkeypatch.setattr(graph_setup, "wanted_graphs",
                        lambda *_: Graphs([GraphShape(4, 1)], [64, 16]))
    monkeypatch.setattr(graph_setup, "graph_runners", lambda *_: kinds)
    monkeypatch.setattr(graph_setup, "CudaCapturer", lambda _: None)
    memory = iter([graph_setup.DeviceMemory(900, 100), graph_setup.DeviceMemory(700, 250)])
    monkeypatch.setattr(graph_setup, "read_memory", lambda _: next(memory))
    config = Config(scheduler=SchedulerConfig(max_num_batched_tokens=256))
    footprint, seconds = Footprint({}, {}), {"warm up": 0.0}
    assert device._warm_up(config, runner, footprint,  # type: ignore[arg-type]
                           lambda *_: None, LoneRank()) is None
    graph_setup.capture_graphs(config, runner, footprint, lambda *_: None,  # type: ignore[arg-type]
                               seconds)
    assert done == ["numbers", (256, False, False), "decodes", "segments", (64, True, True)]
    assert footprint.measured["graphs"] == 200 and set(seconds) == {"warm up", "graphs"}
