"""What a worker's step costs outside the model, and what sampling costs: microseconds, on the CPU.

    python benchmarks/worker.py [--steps 300]

The model is replaced by ready logits, so that only the plan, the tables, the sampling and the
result are timed. CPU time of the thread is taken, medians; `a + 1` on 32 integers is printed
beside it as a measure of how fast (or how busy) the machine is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from time import thread_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import Resolved
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import HostArrays
from actorium.gpu.step.tables import SlotTables
from actorium.kernels.cpu import sampling_cpu
from actorium.kernels.reference.philox import uniform

VOCAB, LARGE_VOCAB = 4096, 151_936
CONTEXT, MAX_LEN = 128, 3200
DRAFTS = 2
"""Of the lines with drafts."""
STEPS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k + top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
}
DRAWS: dict[str, tuple[float, int, float, float]] = {
    "temperature 0.7": (0.7, 0, 1.0, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "top_k 20, top_p 0.95, 0.6": (0.6, 20, 0.95, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
}


class ReadyModel:
    """Logits without a forward pass."""

    def __init__(self, rows: int) -> None:
        self.hidden, self.ready = torch.zeros(rows, 8), torch.randn(rows, VOCAB)

    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: None = None) -> Tensor:
        return self.hidden[:len(batches[0].logit_rows)]

    def logits(self, rows: Tensor) -> Tensor:
        return self.ready[:len(rows)]


def median_us(run: Callable[[], Any], times: int) -> float:
    """Median CPU time of one call, microseconds."""
    took = []
    for _ in range(times):
        start = thread_time()
        run()
        took.append(thread_time() - start)
    return float(np.median(took)) * 1e6


def step_us(rows: int, params: dict[str, Any], times: int, drafts: int = 0) -> float:
    """One steady decode step of `rows` sequences, from plan to result; each verifies so many drafts
    (and accepts hardly any)."""
    host = torch.device("cpu")
    shape: Any = SimpleNamespace(kv_row=(2, 8), layers=1)
    width = MAX_LEN // 16
    tables = SlotTables(HostArrays(host), rows + 1, width, 16, VOCAB, MAX_LEN, drafts=drafts)
    runner = ModelRunner(ReadyModel(rows * (drafts + 1)),
                         [KVPagePool(shape, 1, 16, torch.float32, host)],
                         tables, propose=lambda slots, at, k: np.zeros((len(slots), k), np.int32))
    slots = np.arange(1, rows + 1, dtype=np.int32)
    tokens, pages = np.arange(CONTEXT, dtype=np.int32), np.zeros(width, np.int32)
    admits = [Admit(slot, tokens.tobytes(), CONTEXT, 0, pages.tobytes(),
                    Resolved(max_tokens=MAX_LEN, **params), slot) for slot in slots.tolist()]
    extend = np.stack((slots, np.full(rows, CONTEXT, np.int32)), axis=1)
    runner.run(StepPlan(1, 1, admit=admits, extend=extend.tobytes(), drafts=drafts))
    plan = StepPlan(1, 2, decode=slots.tobytes(), drafts=drafts)
    return median_us(lambda: runner.run(plan), times)


def draw_us(kind: tuple[float, int, float, float], rows: int = 32) -> float:
    """Sampling of `rows` rows of a large vocabulary, normal logits of deviation 4."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, LARGE_VOCAB), np.float32) * 4
    one = np.ones(rows, np.float32)
    temperature, top_k, top_p, min_p = kind
    u = uniform(np.arange(rows), np.zeros(rows, np.int64), np.full(rows, 7))
    return median_us(lambda: sampling_cpu.sample(
        logits, one * np.float32(temperature), np.full(rows, top_k, np.int32),
        one * np.float32(top_p), one * np.float32(min_p), u), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU cost of a worker's step outside the model")
    parser.add_argument("--steps", type=int, default=300, help="steps timed per line")
    steps = min(parser.parse_args().steps, 700)
    torch.set_num_threads(1)
    small = np.arange(32, dtype=np.int32)
    unit = median_us(lambda: [small + 1 for _ in range(1000)], 9) / 1e3
    print(f"a + 1 on 32 integers: {unit:.2f} us")
    print(f"step outside the model, vocabulary {VOCAB}, us:   batch 1   batch 32   batch 256")
    for name, params in STEPS.items():
        row = [step_us(rows, params, steps) for rows in (1, 32, 256)]
        print(f"  {name:48}" + "".join(f"{us:9.0f}" for us in row))
    for name in ("greedy", "top_k + top_p"):
        row = [step_us(rows, STEPS[name], steps, DRAFTS) for rows in (1, 32, 256)]
        print(f"  {name + f', {DRAFTS} drafts':48}" + "".join(f"{us:9.0f}" for us in row))
    print(f"sampling 32 rows of {LARGE_VOCAB}, ms:")
    for name, kind in DRAWS.items():
        print(f"  {name:48}{draw_us(kind) / 1e3:9.1f}")


if __name__ == "__main__":
    main()
