"""A worker's tiers: what is kept of a model, and a device's way of copying it under the scheduler's
own plans."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_deepseek import add_mtp
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint
from helpers_speculation import make_runner
from helpers_streams import ToyStreams
from helpers_worker import Ring

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.messages import StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.non_cache_memory import STAGING_BYTES, staging_bytes
from actorium.gpu.step.host_pages import COPY_KIND, HostPages, PageStaging
from actorium.gpu.step.launched_step import LaunchedStep
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker.device import open_device
from actorium.gpu.worker.tiers import _kinds
from actorium.tools.cli.plan_command import PlanOptions, make_report

PAGE = 8
DICE = random.Random(3)
SHARED = [DICE.randrange(199) for _ in range(60)]
PROMPTS = ([[DICE.randrange(199) for _ in range(70)] for _ in range(6)]
           + [SHARED + [DICE.randrange(199) for _ in range(20)] for _ in range(4)])
"""Two fill the pool."""
PARAMS = ResolvedParams(max_tokens=10, temperature=0.0)


class LateRing(Ring):
    """Two steps under way: the second is launched before the result of the first is waited for."""

    def __init__(self, runner: ModelRunner, **options: Any) -> None:
        super().__init__(runner, **options)
        self.launched: deque[LaunchedStep] = deque()

    def step(self) -> bool:
        self._deliver()
        if not self.plans and not self.launched:
            return False
        if self.plans:
            self.launched.append(self.runner.launch(self.plans.popleft()))
        if len(self.launched) > 1 or not self.plans:
            self.core.on_message(self.launched.popleft().result(), 0.0)
        return True


WRITERS: dict[str, Callable[[Path], Any]] = {
    "auto": write_checkpoint, "int8": write_checkpoint,
    "windows": lambda path: write_checkpoint(
        path, "Gemma3ForCausalLM", sliding_window=24, sliding_window_pattern=2),
    "recurrent": lambda path: write_hybrid(path, DENSE, 5),
    "MTP": lambda path: add_mtp(path, write_hybrid(path, DENSE, 5, mtp_num_hidden_layers=1))}


def model_of(kind: str, path: Path, speculative: str = "off") -> Any:
    WRITERS[kind](path)
    return load_model(path, Config(speculation=SpeculationConfig(speculative=speculative)),
                      torch.device("cpu"), lambda *_: None)


def staged(model: Any, slots: int, streams: Any, **options: Any) -> ModelRunner:
    """A runner with a pool that two prompts fill, and a device's way of copying."""
    runner = make_runner(model, 0, arrays=DeviceArrays, slots=4, pages=26, page_size=PAGE,
                         checkpoints=5, **options)
    runner.host = host = HostPages(_kinds(runner), 0, [slots] * len(_kinds(runner)))
    runner.staging = PageStaging(host, 3 * max(host.totals), streams)
    return runner


@pytest.mark.parametrize("kind", ["int8", "windows", "recurrent"])
def test_tokens_are_as_without_tiers(kind: str, tmp_path: Path) -> None:
    """Pages go out and come back beside the steps, some of them corrupt, while sequences come, go
    and are preempted."""
    model = model_of(kind, tmp_path)
    options = {"kv_dtype": torch.int8} if kind == "int8" else {}
    plain = Ring(make_runner(model, 0, arrays=DeviceArrays, slots=4, page_size=PAGE, checkpoints=9,
                             **options), budget=32)
    ring = LateRing(staged(model, 120, ToyStreams(None), **options), budget=32,
                    force_preempt_every=9)
    for _ in range(2):
        for prompt in PROMPTS:
            plain.submit(prompt, PARAMS)
            ring.submit(prompt, PARAMS)
    wanted = [out.tokens for out in plain.run()]
    host, dice = ring.runner.host, random.Random(1)
    assert host is not None
    while ring.step():
        if dice.randrange(2):
            host.rows[dice.randrange(host.slots), dice.randrange(host.width)] ^= 4
    assert [ring.outputs[sid].tokens for sid in sorted(ring.outputs)] == wanted
    found = ring.core.health().gauges
    assert found["host_pages_stored"] > 60 and found["host_pages_hit"] > 20
    assert found["host_pages_corrupt"] > 0 and ring.preemptions > 0


def test_a_wait_that_is_missing_changes_tokens(tmp_path: Path) -> None:
    """Of the test above: it can fail."""
    model = model_of("int8", tmp_path)
    runs = []
    for deaf in ("", "host of 1", "host of 2"):
        ring = LateRing(staged(model, 120, ToyStreams(None, deaf)), budget=32)
        for prompt in PROMPTS * 2:
            ring.submit(prompt, PARAMS)
        runs.append([out.tokens for out in ring.run()])
    assert runs[0] != runs[1] and runs[0] != runs[2]


@pytest.mark.parametrize("kind", WRITERS)
def test_the_plan_has_room_for_what_is_kept(kind: str, tmp_path: Path) -> None:
    """By the shape alone: pages of every group, or a checkpoint, to the byte."""
    drafts, dtype = 2 * (kind == "MTP"), "int8" if kind == "int8" else "auto"
    speculation = SpeculationConfig(speculative="mtp:2" if drafts else "off")
    model = model_of(kind, tmp_path, speculation.speculative)
    runner = make_runner(model, drafts, page_size=PAGE, checkpoints=2, mtp=drafts > 0,
                         kv_dtype=torch.int8 if dtype == "int8" else None)
    totals, groups = HostPages(_kinds(runner), 1).totals, len(model.shape.groups)
    page, largest = sum(totals[:groups]), max(sum(totals[:groups]), *totals[groups:], 0)
    for tokens, room in ((1, largest), (40 * PAGE - 3, max(largest, 40 * page)),
                         (1 << 30, STAGING_BYTES)):
        config = Config(
            memory=MemoryConfig(page_size=PAGE, kv_cache_dtype=dtype, host_cache=1),
            speculation=speculation, scheduler=SchedulerConfig(max_num_batched_tokens=tokens))
        assert staging_bytes(config, model.shape) == 2 * room
    assert staging_bytes(Config(), model.shape) == 0


@pytest.mark.parametrize("host_cache", [0, 1 << 20])
@pytest.mark.parametrize("gpu_memory", [None, "1GiB"])
def test_the_plan_of_a_gpu_shows_it(gpu_memory: str | None, host_cache: int,
                                    tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = Config(model=ModelConfig(model=str(tmp_path)),
                    memory=MemoryConfig(host_cache=host_cache))
    report = make_report(config, PlanOptions(gpu_memory=gpu_memory))
    staged = staging_bytes(config, report.plan.shape)
    assert [own.bytes for own in report.outside if own.name == "page staging"] == (
        [staged] if gpu_memory and host_cache else [])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])])
@pytest.mark.parametrize("kind", ["int8", "recurrent"])
def test_pages_of_an_opened_device_come_back(kind: str, device: str, tmp_path: Path) -> None:
    """All of them, by the worker's own plans: what is corrupt is not copied."""
    WRITERS[kind](tmp_path)
    config = Config(
        model=ModelConfig(model=str(tmp_path), max_model_len=256),
        device=DeviceConfig(device=device, enforce_eager=True),
        memory=MemoryConfig(page_size=16, host_cache=8 << 20, max_total_tokens=512, checkpoints=3,
                            kv_cache_dtype="int8" if kind == "int8" else "auto"),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64))
    opened = open_device(config, 1, lambda *_: None, {})
    runner, told = opened.runner, opened.footprint
    host = runner.host
    assert host is not None and (runner.staging is None) == (device == "cpu")
    assert told.planned.get("page_staging") == told.measured.get("page_staging")
    assert (device == "cuda") == (told.measured.get("page_staging", 0) > 0)
    kinds, rows = _kinds(runner), list[tuple[int, int, int]]()
    for number, own in enumerate(kinds):
        for stack in own:
            stack.copy_(torch.randint(-9, 9, stack.shape))
        for thing in range(1, own[0].shape[1]):
            rows += [(number * COPY_KIND + part, thing, len(rows) + part)
                     for part in range(host.parts[number])]
    before = [stack.clone() for own in kinds for stack in own]
    column = np.array(rows, np.int32).tobytes()
    assert runner.run(StepPlan(1, 1, store=column)).lost == b""
    assert host.sums[:len(rows)].tolist() == [zlib.crc32(own) for own in host.rows[:len(rows)]]
    for own in kinds:
        for stack in own:
            stack[:, 1:] = 0
    host.rows[0, 3] ^= 1
    found = runner.run(StepPlan(1, 2, load=column)).lost
    assert np.frombuffer(found, np.int32).tolist() == [0]
    for was, (number, stack) in zip(before, ((number, stack) for number, own in enumerate(kinds)
                                             for stack in own), strict=True):
        first = 1 if number else 2
        assert torch.equal(stack[:, first:], was[:, first:])
    assert not any(stack[:, 1].any() for stack in kinds[0])
