"""Steps with adapters that were captured leave the bits of steps that are run operation by
operation, whichever adapters their rows have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import (
    PROMPTS,
    UNSERVED,
    AdapterDriver,
    open_with_adapters,
    toy_adapter,
)
from helpers_graphs import RecordingCapturer
from helpers_kinds import write_kind
from helpers_ranks import run_ranks, whole
from helpers_speculation import make_runner
from helpers_toys import write_toy
from torch import Tensor
from transformers import AutoModelForCausalLM

from actorium.actors.runtime.beat_gauges import eager_key
from actorium.gpu.adapters.adapter_slots import AdapterSlots
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.plan.graph_memory import GraphShape
from actorium.gpu.step.staging import DeviceArrays
from actorium.kernels.adapter_rows import (
    BLOCK,
    AdapterRows,
    AdapterStack,
    most_blocks,
    sorted_rows,
)
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference.torch_ops import TorchOps

NEW = 5
WIDTHS = {"hidden_size": 64, "intermediate_size": 64}
BATCHES = ([1, 0, 2, 1], [0, 2, 0, 0], [3, 3, 3, 3], [2, 1], [0, 0, 0, 0])
"""Adapters of sequences that are served together."""


@pytest.mark.skipif(library() is None, reason="no compiler")
@pytest.mark.parametrize(("architecture", "quantization"), [
    ("LlamaForCausalLM", "auto"), ("LlamaForCausalLM", "int8"), ("Qwen3NextForCausalLM", "auto"),
    ("FalconH1ForCausalLM", "auto"), ("Qwen2MoeForCausalLM", "auto"),
    ("DeepseekV2ForCausalLM", "auto"), ("GPTNeoXForCausalLM", "auto"),
    ("Gemma3nForCausalLM", "auto")])
def test_programs_on_a_cpu(tmp_path: Path, architecture: str, quantization: str) -> None:
    given = WIDTHS if quantization != "auto" else {}  # codes are of 32 columns at a time
    oracle = write_toy(tmp_path / "model", architecture, torch.bfloat16, **given)
    opened = open_with_adapters(tmp_path / "model", slots=3, seqs=4, model={
        "dtype": "bfloat16", "quantization": quantization})
    driver = AdapterDriver(opened)
    for number in (1, 2, 3):
        targets = ("proj", "dense") if number == 2 else ("",)
        toy_adapter(oracle, tmp_path / f"{number}", 4 * number, number, targets=targets,
                    skip=UNSERVED)
        driver.load(number, tmp_path / f"{number}")
    runner, found = opened.runner, []
    for segments in (runner.segments, None):
        assert found or segments is not None, opened.info.no_graphs
        runner.segments, own = segments, []
        runner.served.clear()
        for adapters in BATCHES:
            tokens = driver.generate(PROMPTS[:len(adapters)], adapters, NEW)
            own.append((tokens, torch.cat(driver.seen)))
        eager = 1 if segments is not None else NEW  # prompts
        assert runner.served[eager_key("adapters")] == eager * (len(BATCHES) - 1)
        assert runner.served["program"] == (0 if eager == NEW else len(BATCHES) * (NEW - 1))
        found.append(own)
    for (tokens, logits), (others, bits) in zip(*found, strict=True):
        assert tokens == others and torch.equal(logits, bits)
    first, *_, last = found[0]
    assert first[0] != last[0], "adapters change tokens"


@pytest.mark.skipif(library() is None, reason="no compiler")
def test_programs_of_ranks(tmp_path: Path) -> None:
    oracle = write_toy(tmp_path / "model", "LlamaForCausalLM", torch.bfloat16)
    for number in (1, 2):
        toy_adapter(oracle, tmp_path / f"{number}", 4 * number, number)

    def body(group: RankGroup) -> list[Any]:
        opened = open_with_adapters(tmp_path / "model", group, seqs=4, threads=1,
                                    tensor_parallel_size=2, model={"dtype": "bfloat16"})
        driver, runner, found = AdapterDriver(opened), opened.runner, []
        for number in (1, 2):
            driver.load(number, tmp_path / f"{number}")
        for segments in (runner.segments, None):
            runner.segments = segments
            runner.served.clear()
            tokens = driver.generate(PROMPTS, BATCHES[0], NEW)
            found.append((tokens, torch.cat(driver.seen), runner.served["program"]))
        return found

    for (tokens, logits, programs), (others, bits, none) in whole(run_ranks(tmp_path, 2, body)):
        assert tokens == others and torch.equal(logits, bits)
        assert (programs, none) == (NEW - 1, 0)


def adapt_by_tables(x: Tensor, y: Tensor, rows: AdapterRows, stack: AdapterStack) -> Tensor:
    """See `reference.adapt`: as on a device, where nothing that the tables say decides what is
    run."""
    place, (slot, first, count) = torch.arange(len(rows.rows)), rows.blocks.t().unsqueeze(2)
    within = (place >= first) & (place < first + count)
    there = within.any(0)
    slots = (within * slot).sum(0)
    at = torch.where(there, rows.rows, 0).long()
    low = torch.einsum("rk,rjk->rj", x.index_select(0, at), stack.a.index_select(0, slots))
    low = low.unflatten(1, (-1, stack.rank)) * stack.scales.index_select(0, slots).unsqueeze(2)
    parts = stack.b.index_select(0, slots).split(stack.widths, 2)
    added = torch.cat([torch.einsum("rj,rjn->rn", low[:, module], part)
                       for module, part in enumerate(parts)], 1)
    return y.index_add_(0, at, torch.where(there.unsqueeze(1), added, 0.0).to(y.dtype))


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_graphs_on_a_device(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph would hold is recorded, and done again."""
    monkeypatch.setattr(TorchOps, "adapt", staticmethod(adapt_by_tables))
    write_kind(tmp_path / "model", kind)
    opened = open_with_adapters(tmp_path / "model", slots=3, kernels="torch")
    assert opened.runner.adapters is not None
    layers, driver = opened.runner.adapters.layers, AdapterDriver(opened)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for number in (1, 2, 3):
        toy_adapter(oracle, tmp_path / f"{number}", 4 * number, number)
        driver.load(number, tmp_path / f"{number}")
    found, known = [], driver.slots.known
    for captured in (False, True):
        runner = make_runner(opened.runner.model, 0, slots=8, arrays=DeviceArrays)
        runner.adapters = AdapterSlots(layers, runner.tables.slots, runner.arrays)
        runner.adapters.known = known
        driver = AdapterDriver(opened._replace(runner=runner))
        graphs = None
        if captured:
            shapes = [GraphShape(rows, 1, adapted) for rows in (8, 4, 2, 1)
                      for adapted in (True, False)]
            graphs = runner.graphs = runner.decode_graphs(RecordingCapturer(), shapes)
            graphs.capture(lambda phase, detail: None)
        runner.served.clear()
        found.append([driver.generate(PROMPTS[:len(adapters)], adapters, NEW)
                      for adapters in BATCHES])
        assert runner.served[eager_key("adapters")] == (len(BATCHES) - 1) * (1 if captured else NEW)
        assert graphs is None or graphs.replays == len(BATCHES) * (NEW - 1)
    assert found[0] == found[1]
    assert found[0][0] != found[0][-1], "adapters change tokens"


def test_tables_have_room_for_every_step() -> None:
    for rows in (1, 2, BLOCK, BLOCK + 1, 40, 64):
        for slots in (1, 2, 3, 8, 70):
            alike = [min(row, slots - 1) for row in range(rows)]  # one row each but of the last
            turns = [row % slots for row in range(rows)]
            blocks = [len(sorted_rows(torch.tensor(own, dtype=torch.int32).numpy())[1])
                      for own in (alike, turns)]
            assert max(blocks) <= most_blocks(rows, slots), (rows, slots)
            assert slots > 1 or blocks[0] == most_blocks(rows, slots)
