"""What needs a CUDA device: the same tokens as on the CPU, and a launch path that never waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import write_checkpoint
from helpers_worker import complete, make_runner

from actorium.actors.config import Config, MemoryConfig, ModelConfig, SchedulerConfig
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import Resolved
from actorium.gpu.device import open_device
from actorium.gpu.models.registry import load_model
from actorium.gpu.timing import clock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [100, 1, 50]]
PARAMS = [
    Resolved(max_tokens=24, temperature=0.0),
    Resolved(max_tokens=24, temperature=0.9),
    Resolved(max_tokens=24, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    Resolved(max_tokens=24, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3),
    Resolved(max_tokens=24, temperature=1.0, logit_bias={5: 6.0, 77: -100.0}),
    Resolved(max_tokens=24, temperature=1.0, top_p=0.7, eos_ids=(3, 9), min_tokens=6),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, seed=5, max_position_embeddings=256)
    return path


def _model(path: Path, device: str) -> Any:
    return load_model(path, Config(), torch.device(device), lambda *_: None)


def test_tokens_equal_those_of_the_cpu(path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    seeds = list(range(6))
    want = complete(make_runner(_model(path, "cpu")), PROMPTS, PARAMS, seeds)
    runner = make_runner(_model(path, "cuda"), device=torch.device("cuda", 0))
    assert complete(runner, PROMPTS, PARAMS, seeds, budget=24) == want


@pytest.mark.parametrize("params", PARAMS)
def test_the_launch_path_does_not_wait_for_the_device(path: Path, params: Resolved) -> None:
    runner = make_runner(_model(path, "cuda"), device=torch.device("cuda", 0))
    timer = clock(runner.moves.device)
    slots = np.arange(1, 9, dtype=np.int32)
    params = Resolved(**{f: getattr(params, f) for f in params.__struct_fields__
                         if f != "max_tokens"}, max_tokens=200)
    tokens = np.arange(9, dtype=np.int32).tobytes()
    admits = [Admit(int(s), tokens, 9, 0, np.arange(4 * s, 4 * s + 4, dtype=np.int32).tobytes(),
                    params, int(s)) for s in slots]
    extend = np.stack((slots, np.full(8, 9, np.int32)), axis=1).tobytes()
    timer.launch(runner, StepPlan(1, 1, admit=admits, extend=extend)).result()
    timer.launch(runner, StepPlan(1, 2, decode=slots.tobytes())).result()
    waiting = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 20):
            waiting.append(timer.launch(runner, StepPlan(1, step, decode=slots.tobytes())))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [w.result() for w in waiting]
    assert [r.step for r in results] == list(range(3, 20))
    assert all(r.busy_us > 0 for r in results)


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
