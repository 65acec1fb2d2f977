"""Delayed commit in the worker: what is allocated, and what a rehearsal may leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_configs import DELTA, SMALL
from torch import Tensor

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
from actorium.gpu.plan.memory_plan import demand_of, make_plan
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import OpenedDevice, open_device
from actorium.gpu.worker.warmup import dummy_run

BUDGET, SLOT, PROMPT = 300_000, 2, [5, 9, 17, 4, 88, 3, 21]


def opened(path: Path, drafts: int) -> tuple[OpenedDevice, Config]:
    """A hybrid model with an MTP layer, random weights; every draft is accepted."""
    raw = {**SMALL, **DELTA, "architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(raw))
    config = Config(
        model=ModelConfig(model=str(path), load_format="dummy"),
        memory=MemoryConfig(kv_cache_bytes=BUDGET, page_size=4, checkpoints=2),
        scheduler=SchedulerConfig(max_num_seqs=3), device=DeviceConfig(device="cpu", threads=1),
        speculation=SpeculationConfig(speculative=f"mtp:{drafts}", force_acceptance="1,1,1"))
    return open_device(config, 1, lambda phase, detail: None, {}), config


@pytest.mark.parametrize("drafts", [1, 3])
def test_the_worker_allocates_what_is_planned(drafts: int, tmp_path: Path) -> None:
    worker, config = opened(tmp_path, drafts)
    plan, runner = make_plan(worker.runner.model.shape, demand_of(config), BUDGET), worker.runner
    states, (own,) = runner.states, runner.draft_pools
    assert states is not None
    assert states.drafts == drafts and plan.state.window > 0
    assert states.bytes == 3 * sum(plan.state) + 2 * plan.state.checkpoint
    assert sum(pool.bytes for pool in runner.pools) + own.bytes + states.bytes == plan.used


def play(runner: ModelRunner, left: int = 0) -> list[Tensor]:
    """A sequence of which drafts are accepted, and its states after a step without drafts; then
    drafts are accepted again, and the slot is given up as it is. left: the count that whoever was
    there before leaves to it, where that is wrong."""
    pages = np.arange(1, 13, dtype=np.int32)
    params = ResolvedParams(max_tokens=40, temperature=0.0)
    slot = np.array([SLOT], np.int32).tobytes()
    runner.run(StepPlan(1, 1, admit=[Admit(
        SLOT, np.array(PROMPT, np.int32).tobytes(), len(PROMPT), 0, pages.tobytes(), params, 7)],
        extend=np.array([SLOT, len(PROMPT)], np.int32).tobytes(), drafts=2))
    runner.tables.drafts.accepted[SLOT] += left
    counts = []
    for drafts in (2, 2, 0, 0):
        counts += runner.run(StepPlan(1, 2, decode=slot, drafts=drafts)).counts
    assert counts == [3, 3, 3, 1]
    assert runner.states is not None
    found = [part[SLOT - 1].clone() for layer in runner.states.layers for part in layer.committed]
    for drafts in (2, 2):
        runner.run(StepPlan(1, 3, decode=slot, drafts=drafts))
    assert runner.tables.drafts.accepted[SLOT] == 2
    runner.run(StepPlan(1, 4, release=slot))
    return found


def test_rehearsals_and_those_before_leave_nothing_behind(tmp_path: Path) -> None:
    runner = opened(tmp_path, 2)[0].runner
    first = play(runner)
    dummy_run(runner, 8)
    assert all(torch.equal(a, b) for a, b in zip(first, play(runner), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, play(runner, 2), strict=True))
