"""Sliding windows: tokens equal transformers' when all that lies behind a window is NaN."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import generated, load, write_checkpoint
from helpers_pairs import pairs
from helpers_windows import Driver
from helpers_worker import CPU, Ring, make_runner

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.messages import Admit, PageGroup, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.plan.sizes import GroupPages, PageDemand, pool_pages
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.worker.device import open_device

NEW, WINDOW = 24, 32
GREEDY = ResolvedParams(max_tokens=NEW, temperature=0.0)
LENGTHS = (1, 7, 16, 31, 32, 33, 64, 65, 97, 200)
MODELS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW,
                         "max_window_layers": 1},
    "Gemma3ForCausalLM": {"sliding_window": WINDOW, "num_hidden_layers": 4, "rope_theta": 5e4,
                          "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
}


@dataclass
class Case:
    """A checkpoint, its prompts and what transformers makes of them."""

    architecture: str
    model: Any
    oracle: Any
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        path = tmp_path_factory.mktemp("model")
        oracle = write_checkpoint(path, kind, seed=3, **MODELS[kind])
        rng = random.Random(7)
        prompts = [[rng.randrange(199) for _ in range(n)] for n in LENGTHS]
        tokens = [generated(oracle, prompt, NEW) for prompt in prompts]
        return Case(kind, load(path), oracle, prompts, tokens)

    return cached


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


def _pages(model: Any, page_size: int, chunk: int, sequences: int = len(LENGTHS)) -> list[int]:
    """As many as sizing gives for so many sequences of 300 tokens."""
    groups = [GroupPages(group.window, len(group.layers)) for group in model.shape.groups]
    return pool_pages(groups, PageDemand(page_size, sequences, 300, chunk), 1 << 40)


def _driver(model: Any, page_size: int, chunk: int,
            arrays: HostArrays | DeviceArrays | None = None) -> Driver:
    pages = _pages(model, page_size, chunk)
    return Driver(make_runner(model, pages, page_size, arrays=arrays), chunk)


@pytest.mark.parametrize(("page_size", "chunk", "arrays"), [
    (16, 7, HostArrays), *(pytest.param(*rarer, marks=pytest.mark.slow) for rarer in (
        (16, 50, DeviceArrays), (64, 512, HostArrays), (16, 512, HostArrays), (1, 7, HostArrays)))])
def test_greedy_equals_generate_with_pages_given_back(
    case: Case, page_size: int, chunk: int, arrays: type[HostArrays] | type[DeviceArrays]
) -> None:
    driver = _driver(case.model, page_size, chunk, arrays=arrays(CPU))
    seqs = [driver.admit(prompt, GREEDY) for prompt in case.prompts]
    driver.run()
    assert [s.output for s in seqs] == case.tokens
    windowed = sum(1 for group in case.model.shape.groups if group.window)
    behind = [max(0, n + NEW - 2 - WINDOW + 1) // page_size for n in LENGTHS]
    assert driver.given_back == windowed * sum(behind)


@pytest.mark.parametrize(("case", "page_size", "budget"), pairs(MODELS, [(16, 50), (1, 512)]),
                         indirect=["case"])
def test_greedy_equals_generate_under_the_scheduler(case: Case, page_size: int,
                                                    budget: int) -> None:
    """With pools that hold four sequences' windows, full of NaN at first."""
    runner = make_runner(case.model, _pages(case.model, page_size, budget, 4), page_size, slots=5)
    for layer in [layer for pool in runner.pools for layer in pool.layers]:
        layer.fill_(math.nan)
    ring = Ring(runner, budget=budget)
    for prompt in case.prompts:
        ring.submit(prompt, GREEDY)
    assert [out.tokens for out in ring.run()] == case.tokens


@pytest.mark.parametrize(("case", "chunk"), pairs(MODELS, [7, 512]), indirect=["case"])
def test_prompt_logprobs(case: Case, chunk: int) -> None:
    driver = _driver(case.model, 16, chunk)
    params = ResolvedParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for prompt in case.prompts[1:]:
        driver.admit(prompt, params)
    driver.run()
    for seq, prompt in zip(driver.running, case.prompts[1:], strict=True):
        with torch.no_grad():
            want = case.oracle(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        chosen = want.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        got = np.concatenate([np.frombuffer(p.chosen, np.float32) for p in seq.prompt_logprobs])
        np.testing.assert_allclose(got, chosen.numpy(), atol=1e-4)


@pytest.mark.parametrize(("case", "together"), pairs(MODELS, [True, False]), indirect=["case"])
def test_a_prefix_with_holes_behind_the_window(case: Case, together: bool) -> None:
    """Others go on from a prompt's pages, in the very step that fills them or later."""
    driver = _driver(case.model, 16, 1024)
    prompt, cached = case.prompts[-1], 176
    donor = driver.admit(prompt, ResolvedParams(max_tokens=1, temperature=0.0))
    driver.reserve(donor)
    if not together:
        driver.run()
    seqs = [driver.admit(prompt[:n], GREEDY, donor, cached) for n in (177, 180, 200)]
    driver.run()
    alone = [generated(case.oracle, prompt[:n], NEW) for n in (177, 180, 200)]
    assert [s.output for s in seqs] == alone


@pytest.mark.parametrize(("native", "head_dim"), pairs([True, False], [16, 64]))
def test_bf16_reads_nothing_behind_the_window(case: Case, head_dim: int, native: bool,
                                              tmp_path: Path) -> None:
    """The C kernels (on tiles where the head allows) and torch's: what else is in the pool, NaN or
    not, and whether pages are given back changes no token."""
    write_checkpoint(tmp_path, case.architecture, seed=4, dtype=torch.bfloat16,
                     **{**MODELS[case.architecture], "head_dim": head_dim})
    model = load(tmp_path, native=native)
    if native and model.ops.name != "native":
        pytest.skip("no C compiler, or torch with another OpenMP")
    runs = []
    for keep, poison in ((True, 0.0), (False, math.nan)):
        driver = Driver(make_runner(model, 200), 100, poison, keep)
        seqs = [driver.admit(prompt, GREEDY) for prompt in case.prompts[::3]]
        driver.run()
        runs.append([s.output for s in seqs])
    assert runs[0] == runs[1]


def test_the_worker_reports_its_groups(tmp_path: Path) -> None:
    architecture = "Gemma3ForCausalLM"
    write_checkpoint(tmp_path, architecture, **MODELS[architecture])
    config = Config(model=ModelConfig(model=str(tmp_path)),
                    memory=MemoryConfig(page_size=16, max_total_tokens=1600),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
                    device=DeviceConfig(device="cpu", threads=1))
    opened = open_device(config, 1, lambda *_: None, {})
    assert opened.ready.groups == [PageGroup(1 + 4 * (WINDOW // 16 + 2) + 4, WINDOW),
                                   PageGroup(1 + 1600 // 16, 0)]
    assert [len(pool.layers) for pool in opened.runner.pools] == [3, 1]
    runner, params = opened.runner, ResolvedParams(max_tokens=2)
    tokens, pages = np.zeros(40, np.int32).tobytes(), np.ones(5, np.int32).tobytes()
    with pytest.raises(ValueError, match="slot 1: 5 pages are not the same number for each of 2"):
        runner.run(StepPlan(1, 1, admit=[Admit(1, tokens, 40, 32, pages, params, 1)]))
    with pytest.raises(ValueError, match="3 numbers are no rows of slot"):
        runner.run(StepPlan(1, 1, page_appends=np.ones(3, np.int32).tobytes()))
