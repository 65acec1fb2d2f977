"""Adapters of models that are computed otherwise: exactly, by several ranks, with quantised
weights, with drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_adapters import (
    EPOCH,
    AdapterDriver,
    merged,
    open_with_adapters,
    toy_adapter,
    with_adapters,
)
from helpers_models import CPU, assert_greedy, oracle_logits, write_checkpoint
from helpers_ranks import run_ranks, whole
from helpers_recurrent import write_recurrent
from helpers_speculation import make_runner

from actorium.actors.messages import StepPlan
from actorium.gpu.adapters.adapter_setup import open_adapters
from actorium.gpu.adapters.adapter_slots import AdapterSlots
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import RankGroup

PROMPTS = [[5, 9, 100, 3, 77, 20], [8, 9, 10], [64, 2, 31, 7, 90]]
NEW = 5


def test_exactly_the_same_bits_in_any_company(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", dtype=torch.bfloat16,
                              head_dim=64)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model", exact="on"))
    for number in (1, 2):
        toy_adapter(oracle, tmp_path / f"{number}", seed=number, rank=5 * number)
        driver.load(number, tmp_path / f"{number}")
    adapters = [1, 0, 2]
    together = driver.generate(PROMPTS, adapters, NEW)
    steps = [step.clone() for step in driver.seen]
    for i, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True)):
        assert driver.generate([prompt], [adapter], NEW) == [together[i]]
        for step, one in zip(steps, driver.seen, strict=True):
            assert torch.equal(step[i], one[0]), (i, adapter)
    assert len({tuple(driver.generate(PROMPTS[:1], [own], NEW)[0]) for own in (0, 1, 2)}) == 3


RANKED: dict[str, Callable[[Path], Any]] = {
    "attention": lambda path: write_checkpoint(path, "Qwen3ForCausalLM", num_hidden_layers=2),
    "recurrent": lambda path: write_recurrent(path, "FalconH1ForCausalLM"),
    "uneven": lambda path: write_checkpoint(path, "LlamaForCausalLM", num_hidden_layers=2,
                                            num_key_value_heads=1, intermediate_size=90)}


@pytest.mark.parametrize("kind", RANKED)
def test_ranks_share_adapters(tmp_path: Path, kind: str) -> None:
    oracle = RANKED[kind](tmp_path / "model")
    adapter = toy_adapter(oracle, tmp_path / "adapter", targets=("proj",))

    def body(group: RankGroup) -> tuple[list[list[int]], torch.Tensor]:
        driver = AdapterDriver(open_with_adapters(tmp_path / "model", group, seqs=2, threads=1,
                                                  tensor_parallel_size=2))
        driver.load(1, tmp_path / "adapter")
        return driver.generate(PROMPTS[:2], [1, 0], NEW), torch.stack(driver.seen)

    [(tokens, logits), (others, _)] = whole(run_ranks(tmp_path, 2, body))
    assert tokens == others
    for i, model in enumerate((merged(oracle, adapter), oracle)):
        want = oracle_logits(model, PROMPTS[i] + tokens[i][:-1])[len(PROMPTS[i]) - 1:]
        assert float((logits[:, i] - want).abs().max()) < 2e-5 * float(want.abs().max())


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_are_quantised_and_adapters_are_not(tmp_path: Path, quantization: str) -> None:
    """With the adapter the model is off by no more than without."""
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=2,
                              hidden_size=128, intermediate_size=256)
    adapter = toy_adapter(oracle, tmp_path / "adapter", alpha=32.0)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model",
                                              model={"quantization": quantization}))
    driver.load(1, tmp_path / "adapter")
    tokens, off = driver.generate(PROMPTS[:2], [1, 0], 2), []
    for i, model in enumerate((merged(oracle, adapter), oracle)):
        want = oracle_logits(model, PROMPTS[i] + tokens[i][:1])[len(PROMPTS[i]) - 1:]
        found = torch.stack([step[i] for step in driver.seen])
        off.append(float((found - want).norm() / want.norm()))
    assert 1e-4 < off[0] < 1.5 * off[1] < 0.6


def test_drafts_are_verified_with_the_adapter(tmp_path: Path) -> None:
    """Drafts that are right now and then, of the model with the adapter or without."""
    oracle = write_checkpoint(tmp_path / "model", "Qwen3ForCausalLM")
    adapter, path = toy_adapter(oracle, tmp_path / "adapter"), tmp_path / "model"
    config = with_adapters(path)
    model = load_model(path, config, CPU, lambda *_: None)
    opened = open_adapters(path, config, model)
    assert opened is not None
    base = AdapterDriver(open_with_adapters(path))
    base.load(1, tmp_path / "adapter")
    known = [prompt + more for prompt, more in zip(
        PROMPTS[:2], base.generate(PROMPTS[:2], [1, 0], 12), strict=True)]

    def propose(slots: Any, positions: Any, k: int) -> Any:
        rows = [[known[slot - 1][at] if at % 3 and at < len(known[slot - 1]) else 7
                 for at in range(position, position + k)]
                for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)]
        return np.array(rows, np.int32).reshape(len(slots), k)

    runner = make_runner(model, 2, propose, page_size=16)
    runner.adapters = AdapterSlots(opened.layers, runner.tables.slots, runner.arrays)
    runner.adapters.known.update(base.slots.known)
    admits, appends = [], []
    for slot, adapted in ((1, 1), (2, 0)):
        admits.append(base.admit(slot, PROMPTS[slot - 1], adapted, 12))
        appends += base.appends
    found: list[list[int]] = [[], []]
    plan = StepPlan(EPOCH, 1, admit=admits, page_appends=np.array(appends, np.int32).tobytes(),
                    extend=np.array([[1, len(PROMPTS[0])], [2, len(PROMPTS[1])]],
                                    np.int32).tobytes(), drafts=2)
    steps = 0
    while min(map(len, found)) < 12:
        result, steps = runner.run(plan), steps + 1
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        for own, count in zip(found, result.counts, strict=True):
            own += [next(tokens) for _ in range(count)]
        plan = StepPlan(EPOCH, steps + 1, decode=np.array([1, 2], np.int32).tobytes(), drafts=2)
    assert steps < 12
    for i, one in enumerate((merged(oracle, adapter), oracle)):
        assert_greedy(one, PROMPTS[i], found[i][:12], 12)
