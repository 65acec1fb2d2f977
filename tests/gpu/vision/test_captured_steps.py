"""Segments and decode programs of steps whose rope positions are not the tokens' numbers; and steps
that they leave to the model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import played, told, with_segments
from helpers_models import load
from helpers_speculation import make_runner
from helpers_vision import write_vl
from helpers_worker import Output
from torch import Tensor

from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.decode_programs import DecodePrograms
from actorium.gpu.plan.graph_memory import program_sizes
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.states import RecurrentBatch
from actorium.kernels.cpu.native_library import library

PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [7] * 17]
PARAMS = [ResolvedParams(max_tokens=12, temperature=0.0, logprobs=2)]
RUN = ModelRunner.wanted_rows


def placed_at(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step from now on has rope positions that are `turns` of its positions."""

    def wanted(own: ModelRunner, step: InputBatch, recurrent: RecurrentBatch | None) -> Tensor:
        for batch in step.batches:
            batch.rope_positions = turns(batch.positions)
        return RUN(own, step, recurrent)

    monkeypatch.setattr(ModelRunner, "wanted_rows", wanted)


def play(runner: ModelRunner) -> tuple[Any, Counter[str]]:
    out: list[Output] = played(runner, PROMPTS, PARAMS, 4, budget=24)[1]
    return told(out), Counter({kind: runner.served.get(kind, 0) for kind in (
        "eager", "piecewise_graph", "program", "eager_for_images", "eager_for_prompts")})


def captured(model: Any, kind: str) -> ModelRunner:
    runner = make_runner(model, 0, slots=7)
    if kind == "piecewise_graph":
        with_segments(runner, [4, 8, 24, 32])
        return runner
    demand = Demand(8, runner.tables.page_size, 64, 0)
    runner.segments = DecodePrograms(runner.model, runner.pools, runner.states,
                                     program_sizes(runner.model.shape, demand, 8))
    return runner


@pytest.mark.parametrize("kind", ["piecewise_graph", "program"])
def test_they_turn_rows_as_the_model_does(kind: str, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "program" and library() is None:
        pytest.skip("no compiler")
    write_vl(tmp_path, "2.5")
    model = load(tmp_path, max_model_len=128,
                 dtype="bfloat16" if kind == "program" else "float32")
    as_text, _ = play(make_runner(model, 0, slots=7))
    placed_at(lambda positions: positions // 2, monkeypatch)
    want, _ = play(make_runner(model, 0, slots=7))
    got, served = play(captured(model, kind))
    assert got == want != as_text and served[kind] > 8
    assert served["eager"] == served["eager_for_prompts"]
    placed_at(lambda positions: torch.stack((positions, positions // 2, positions // 3)),
              monkeypatch)
    apart, _ = play(make_runner(model, 0, slots=7))
    got, served = play(captured(model, kind))
    assert got == apart != want and served[kind] == 0
    assert served["eager"] == served["eager_for_images"] > 8
