"""An engine that was started as it is by default, to which exactness costs what the test says: what
it answers through a worker's death, and what it refuses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from helpers_models import write_checkpoint
from helpers_runtime import short_dir

from actorium.actors.errors import InvalidRequest
from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import WORKER
from actorium.actors.runtime.rundir import engine_dir
from actorium.actors.runtime.worker_info import read_info

SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, logprobs=2,
                         deterministic=True)
PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (3, 40, 131)]


@contextmanager
def engine(path: Path, costs: str, **more: Any) -> Iterator[tuple[Engine, Path]]:
    """The first worker finds the first cost, the second the second."""
    with short_dir() as base, Engine(
            str(path), device="cpu", run_dir=str(base), skip_tokenizer=True, threads=1,
            max_total_tokens=1024, crash_reports=False, exact_costs=costs, **more) as running:
        yield running, engine_dir(running.name, str(base))


def killed(running: Engine) -> None:
    """A worker is killed; returns once its successor serves."""
    def worker() -> tuple[int, int]:
        return next((own.pid, own.epoch) for own in running.client.status().actors
                    if own.role == WORKER)

    pid, epoch = worker()
    os.kill(pid, signal.SIGKILL)
    while worker()[1] == epoch:
        time.sleep(0.05)
    running.client.generate([1, 2], SamplingParams(max_tokens=1))


def says(running: Engine, prompts: list[list[int]]) -> list[Any]:
    return [(list(c.token_ids), [(entry.logprob, entry.top) for entry in c.logprobs or ()])
            for c in running.client.generate(prompts, SAMPLED)]


@pytest.mark.slow
def test_a_recovery_goes_on_as_its_engine_began(tmp_path: Path) -> None:
    """Without a seed, alone and together, and after a worker that would have chosen otherwise."""
    write_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=32)
    with engine(tmp_path, "2,9") as (running, run_dir):
        assert read_info(run_dir, WORKER).exact.startswith("on, costs 2 %")  # type: ignore
        alone = [says(running, [prompt])[0] for prompt in PROMPTS]
        killed(running)
        assert read_info(run_dir, WORKER).exact.startswith("on, costs 2 %")  # type: ignore
        assert says(running, PROMPTS) == alone


@pytest.mark.slow
def test_what_is_off_is_refused_through_every_door(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=32)
    with engine(tmp_path, "9,2", port=0) as (running, run_dir):
        for _ in range(2):
            assert read_info(run_dir, WORKER).exact == (  # type: ignore[union-attr]
                "off here, would cost 9 % (as forced): --exact on")
            with pytest.raises(InvalidRequest, match="deterministic: .*--exact on") as refused:
                running.client.generate([1, 2, 3], SAMPLED)
            assert refused.value.param == "deterministic"
            where = actor.where(run_dir)
            assert where is not None
            for body in ({"prompt": [1, 2, 3], "deterministic": True},
                         {"prompt": [1, 2, 3], "deterministic": True, "stream": True}):
                answer = httpx.post(f"http://{where.host}:{where.port}/v1/completions", json=body)
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"] == "deterministic"
            sglang = {"input_ids": [1, 2, 3], "sampling_params": {"deterministic": True}}
            answer = httpx.post(f"http://{where.host}:{where.port}/generate", json=sglang)
            assert answer.status_code == 400 and "deterministic" in answer.text
            killed(running)
