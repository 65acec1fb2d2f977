"""Steps with adapters that were captured leave the bits of steps that are run operation by
operation, whichever adapters their rows have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_adapters import PROMPTS, UNSERVED, AdapterDriver, open_with_adapters, toy_adapter
from helpers_toys import write_toy

from actorium.actors.runtime.beat_gauges import eager_key
from actorium.kernels.adapter_rows import BLOCK, most_blocks, sorted_rows
from actorium.kernels.cpu.native_library import library

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


def test_tables_have_room_for_every_step() -> None:
    for rows in (1, 2, BLOCK, BLOCK + 1, 40, 64):
        for slots in (1, 2, 3, 8, 70):
            alike = [min(row, slots - 1) for row in range(rows)]  # one row each but of the last
            turns = [row % slots for row in range(rows)]
            blocks = [len(sorted_rows(torch.tensor(own, dtype=torch.int32).numpy())[1])
                      for own in (alike, turns)]
            assert max(blocks) <= most_blocks(rows, slots), (rows, slots)
            assert slots > 1 or blocks[0] == most_blocks(rows, slots)
