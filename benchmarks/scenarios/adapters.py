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

CONTEXT = 128
"""Tokens of each prompt."""


class Opened(NamedTuple):
    """A runner with sequences in all slots that are to be used."""

    runner: ModelRunner
    slots: np.ndarray

    def decode(self, step: int) -> float:
        """Milliseconds of processor time of a step."""
        plan, start = StepPlan(1, step, decode=self.slots.tobytes()), time.process_time_ns()
        self.runner.run(plan)
        return (time.process_time_ns() - start) / 1e6


def opened(folder: Path, sequences: int, adapters: int, rank: int, used: int) -> Opened:
    """adapters: 0 = none are served; used: how many the sequences have, the model by itself apart:
    of n adapters one of n + 1 sequences has none."""
    config = Config(
        model=ModelConfig(model=str(folder), load_format="dummy", dtype="bfloat16"),
        device=DeviceConfig(device="cpu", threads=1), memory=MemoryConfig(kv_cache_bytes=1 << 28),
        scheduler=SchedulerConfig(max_num_seqs=sequences),
        adapters=AdapterConfig(enable_lora=adapters > 0, **(
            {"max_loras": adapters, "max_lora_rank": rank} if adapters else {})))
    runner = open_device(config, 1, lambda *_: None, {}).runner
    if runner.adapters is not None:
        for number in range(1, adapters + 1):
            runner.adapters.known[1, number] = random_adapter(runner, rank, number)
    each = -(-(CONTEXT + 512) // runner.tables.page_size)
    admits, appends, extends = [], [], []
    for slot in range(1, sequences + 1):
        number = slot % (used + 1) if used else 0
        admits.append(Admit(slot, np.arange(slot, slot + CONTEXT, dtype=np.int32).tobytes(),
                            CONTEXT, 0, b"", ResolvedParams(max_tokens=500, temperature=0.0), 1,
                            adapter=number))
        appends += [[slot, i, (slot - 1) * each + i + 1] for i in range(each)]
        extends.append([slot, CONTEXT])
    runner.run(StepPlan(1, 1, admit=admits, page_appends=np.array(appends, np.int32).tobytes(),
                        extend=np.array(extends, np.int32).tobytes()))
    return Opened(runner, np.arange(1, sequences + 1, dtype=np.int32))


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
        kinds = {"none served": (0, 0), "none named": (adapters, 0),
                 f"{adapters} beside the model": (adapters, adapters),
                 "1 beside the model": (adapters, 1)}
        engines = {name: opened(path, sequences, served, rank, used)
                   for name, (served, used) in kinds.items()}
    steps = count(2)
    spent = take_turns({name: partial(decode_next, own, steps) for name, own in engines.items()},
                       turns)
    least = {name: min(own) for name, own in spent.items()}
    for name, own in least.items():
        yield {"sequences have": name, "ms": own, "of none served": least["none served"] / own}


def decode_next(own: Opened, steps: Iterator[int]) -> float:
    return own.decode(next(steps))
