"""What LoRA adapters cost: decode steps with them, of the model beside them, and without any.

Random weights of a shape and random adapters on all its modules, in bfloat16 on one thread. Engines
take turns step by step; counted is processor time, of which other processes take none.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from harness import Rows, scenario, take_turns

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.adapters.adapter_reader import AdapterPart, HostAdapter
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import open_device
from actorium.tools.bench.workloads import shape_dir

CONTEXT, ROOM = 64, 192
"""Tokens of each prompt, and what a sequence has room for."""


class Batch(NamedTuple):
    """Sequences of a runner that decode together."""

    runner: ModelRunner
    slots: np.ndarray

    def decode(self, steps: Iterator[int]) -> float:
        """Milliseconds of processor time of a step."""
        plan, start = StepPlan(1, next(steps), decode=self.slots.tobytes()), time.process_time_ns()
        self.runner.run(plan)
        return (time.process_time_ns() - start) / 1e6


def opened(folder: Path, slots: int, adapters: int, rank: int) -> ModelRunner:
    """adapters: random ones, with numbers from 1; 0 = none are served."""
    lora = AdapterConfig(enable_lora=True, max_loras=adapters, max_lora_rank=rank)
    config = Config(
        model=ModelConfig(model=str(folder), load_format="dummy", dtype="bfloat16"),
        device=DeviceConfig(device="cpu", threads=1), memory=MemoryConfig(
            kv_cache_bytes=1 << 32, max_total_tokens=slots * (ROOM + 16)),
        scheduler=SchedulerConfig(max_num_seqs=slots),
        adapters=lora if adapters else AdapterConfig())
    runner = open_device(config, 1, lambda *_: None, {}).runner
    if runner.adapters is not None:
        for number in range(1, adapters + 1):
            runner.adapters.known[1, number] = random_adapter(runner, rank, number)
    return runner


def batch(runner: ModelRunner, first: int, sequences: int, used: int) -> Batch:
    """Sequences in slots from the first on, their prompts computed. used: adapters that they have,
    in turn with the model by itself."""
    each = ROOM // runner.tables.page_size
    admits, appends, extends = [], [], []
    slots = np.arange(first, first + sequences, dtype=np.int32)
    for slot in slots.tolist():
        tokens = np.arange(slot, slot + CONTEXT, dtype=np.int32).tobytes()
        admits.append(Admit(slot, tokens, CONTEXT, 0, b"",
                            ResolvedParams(max_tokens=ROOM - CONTEXT, temperature=0.0), 1,
                            adapter=slot % (used + 1)))
        appends += [[slot, i, (slot - 1) * each + i + 1] for i in range(each)]
        extends.append([slot, CONTEXT])
    runner.run(StepPlan(1, 1, admit=admits, page_appends=np.array(appends, np.int32).tobytes(),
                        extend=np.array(extends, np.int32).tobytes()))
    return Batch(runner, slots)


def random_adapter(runner: ModelRunner, rank: int, number: int) -> HostAdapter:
    """One on all modules that can have one."""
    assert runner.adapters is not None
    stacks, parts = runner.adapters.layers.stacks, []
    generator = torch.Generator().manual_seed(number)
    for product, stack in enumerate(stacks):
        for module, width in enumerate(stack.widths):
            a, b = (torch.randn(size, generator=generator).mul_(0.01).bfloat16()
                    for size in ((rank, stack.ins), (rank, width)))
            parts.append(AdapterPart(product, module, a, b, 1.0))
    return HostAdapter(bytes([number] * 32), parts)


@scenario
def decodes(shape: str = "S06", sequences: int = 32, adapters: int = 8, rank: int = 16,
            turns: int = 40) -> Rows:
    """Steps of decodes: none served; served and none named; all of them beside the model; one."""
    with tempfile.TemporaryDirectory() as folder:
        path = shape_dir(shape, Path(folder))
        without = opened(path, sequences, 0, rank)
        served = opened(path, 3 * sequences, adapters, rank)
    kinds = {"none named": 0, "1 beside the model": 1, f"{adapters} beside the model": adapters}
    batches = {"none served": batch(without, 1, sequences, 0)} | {
        name: batch(served, 1 + at * sequences, sequences, used)
        for at, (name, used) in enumerate(kinds.items())}
    steps = count(2)
    spent = take_turns({name: partial(own.decode, steps) for name, own in batches.items()}, turns)
    least = {name: min(own) for name, own in spent.items()}
    for name, own in least.items():
        yield {"sequences have": name, "ms": own, "of none served": least["none served"] / own}
