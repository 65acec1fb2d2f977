"""Whole models with random weights, in this process: plans made by hand, two under way, so that
nothing but the launch path and the device is measured. And transformers on the same shape.

A step's floor is the bytes of the weights that it reads and of the keys and values it attends to,
over the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.messages import Admit, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.gpu.step.pools import page_bytes
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import OpenedDevice, open_device
from actorium.gpu.worker.timing import make_timer

from . import shapes
from .child import Bench

NONE: Mapping[str, Any] = {}
WARM, STEPS = 8, 48
PAGE = 16


def shape_of(kind: dict[str, Any], toy: bool) -> dict[str, Any]:
    if not toy:
        return kind
    return kind | (shapes.SMALL if kind is shapes.LLAMA else shapes.SMALL_HYBRID)


def settings(toy: bool, path: Path, batch: int, speculative: str = "off",
             model: Mapping[str, Any] = NONE, memory: Mapping[str, Any] = NONE) -> Config:
    """Returns the settings for a model directory. model, memory: fields that differ from them."""
    return Config(
        model=ModelConfig(**{"model": str(path), "load_format": "dummy"} | dict(model)),
        memory=MemoryConfig(**{"memory_fraction": 0.85, "kv_cache_bytes": 16 << 20,
                               "prefix_cache": False} | dict(memory)),
        scheduler=SchedulerConfig(max_num_seqs=batch,
                                  max_num_batched_tokens=budget(toy)),
        speculation=SpeculationConfig(
            speculative=speculative,
            force_acceptance=shapes.ACCEPTANCE if speculative != "off" else ""),
        device=DeviceConfig(device="cpu" if toy else "cuda", threads=1 if toy else 0,
                            kernels="torch" if toy else "auto",
                            graph_batch_sizes="1,2,3,4" if toy else shapes.GRAPHS,
                            graph_token_counts="8,16" if toy else shapes.SEGMENTS))


def budget(toy: bool) -> int:
    return 64 if toy else 2048


@contextmanager
def opened(bench: Bench, kind: dict[str, Any], batch: int, speculative: str = "off",
           model: Mapping[str, Any] = NONE, memory: Mapping[str, Any] = NONE
           ) -> Iterator[tuple[OpenedDevice, dict[str, float]]]:
    """`loaded`, of a model of this shape with random weights. model, memory: see `settings`."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(shape_of(kind, bench.toy)))
        yield loaded(bench, settings(bench.toy, Path(scratch), batch, speculative, model, memory))


def loaded(bench: Bench, config: Config) -> tuple[OpenedDevice, dict[str, float]]:
    """A device with a model, and the seconds that each phase took. Pages hold random numbers."""
    seconds: dict[str, float] = {}
    with bench.machine.opening():
        device = open_device(config, 1, lambda phase, detail: None, seconds)
    for pool in device.runner.pools:
        for own in pool.tensors:
            _fill(own)
    return device, seconds


@contextmanager
def eager(runner: ModelRunner) -> Iterator[None]:
    """Decodes are launched operation by operation."""
    graphs, runner.graphs = runner.graphs, None
    try:
        yield
    finally:
        runner.graphs = graphs


def _fill(layer: Tensor) -> None:
    """Random numbers: with zeros the device would clock higher."""
    if layer.element_size() > 1:
        layer.normal_()
    else:  # e4m3 from 1/64 to 1.9 that way
        layer.view(torch.uint8).random_(0x08, 0x40)


class Driver:
    """Sequences of one length that decode. Two plans are under way, as with overlap."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, steps: int, drafts: int = 0,
                 most: int = 2048) -> None:
        """steps: how many there will be. Raises `ValueError` if the pages do not suffice."""
        self.runner, self._drafts = runner, drafts
        self.results: list[StepResult] = []
        """Results of the last `steps`."""
        self._clock = make_timer(runner.arrays.device)
        self._slots = np.arange(1, batch + 1, dtype=np.int32)
        most = runner.tables.max_len
        self._width = -(-min(context + (steps + 4) * (drafts + 1), most) // PAGE)
        pages = runner.pools[0].pages
        if batch * self._width >= pages:
            raise ValueError(f"{batch} x {context} tokens need {batch * self._width} pages, "
                             f"{pages - 1} are there")
        self._admit(batch, context, most)

    def _admit(self, batch: int, context: int, most: int) -> None:
        """Without recurrent layers what is cached is believed, so only the rest of the last page
        need be computed."""
        own = 1 + np.arange(batch * self._width, dtype=np.int32).reshape(batch, self._width)
        cached = 0 if self.runner.states is not None else (context - 1) // PAGE
        params = ResolvedParams(max_tokens=1 << 20, temperature=0.0)
        groups = self.runner.tables.groups
        admits = [Admit(slot, self._tokens(context, slot), context, cached * PAGE,
                        np.tile(own[i, :cached], groups).tobytes(), params, slot)
                  for i, slot in enumerate(self._slots.tolist())]
        rest = [(slot, index, *[own[i, index]] * groups)
                for i, slot in enumerate(self._slots.tolist())
                for index in range(cached, self._width)]
        left = np.full(batch, context - cached * PAGE)
        appends = np.array(rest, np.int32).tobytes()
        while left.any():
            room, extend = most, []
            for i in np.flatnonzero(left).tolist():
                count = min(int(left[i]), room)
                if count:
                    extend.append((i + 1, count))
                    left[i] -= count
                    room -= count
            self._run(StepPlan(1, 0, admit=admits, page_appends=appends,
                               extend=np.array(extend, np.int32).tobytes(), drafts=self._drafts))
            admits, appends = [], b""

    def _tokens(self, count: int, slot: int) -> bytes:
        """Returns a prompt's tokens, different in each slot."""
        own = (np.arange(count) + 31 * slot) * 7919 % self.runner.tables.vocab
        return own.astype(np.int32).tobytes()

    def _run(self, plan: StepPlan) -> StepResult:
        return self._clock.launch(self.runner, plan).result()

    def prompt(self, tokens: int) -> None:
        """One more sequence, for `steps` to extend."""
        slot, used = len(self._slots) + 1, len(self._slots) * self._width
        pages = 1 + used + np.arange(-(-tokens // PAGE), dtype=np.int32)
        if pages[-1] >= self.runner.pools[0].pages:
            raise ValueError(f"{tokens} tokens need {len(pages)} pages more")
        params = ResolvedParams(max_tokens=1, temperature=0.0)
        self._run(StepPlan(1, 0, admit=[Admit(
            slot, self._tokens(tokens, slot), tokens, 0,
            np.tile(pages, self.runner.tables.groups).tobytes(), params, slot)]))

    def steps(self, count: int, extend: int = 0) -> dict[str, float]:
        """Figures of so many steps; extend: tokens of `prompt` in each of them."""
        waiting: deque[Any] = deque()
        self.results = results = []
        more = np.array([len(self._slots) + 1, extend], np.int32).tobytes() if extend else b""
        start = perf_counter()
        for _ in range(count):
            plan = StepPlan(1, 0, decode=self._slots.tobytes(), drafts=self._drafts, extend=more)
            waiting.append(self._clock.launch(self.runner, plan))
            if len(waiting) == 2:
                results.append(waiting.popleft().result())
        results += [timed.result() for timed in waiting]
        wall = perf_counter() - start
        busy, idle, late = (sum(getattr(r, name) for r in results)
                            for name in ("busy_us", "idle_us", "late_us"))
        tokens = sum(sum(r.counts) for r in results)
        return {"step_us": wall / count * 1e6, "device_us": statistics.median(
                    r.busy_us for r in results), "idle_ratio": (idle + late) / max(1, busy + idle),
                "tokens_s": tokens / wall, "tokens_a_step": tokens / count / len(self._slots)}

    def close(self) -> None:
        taken = np.array(list(self.runner.tables.sequences), np.int32)
        self._run(StepPlan(1, 0, release=taken.tobytes()))


def measured(runner: ModelRunner, batch: int, context: int, drafts: int,
             toy: bool) -> dict[str, float]:
    warm, steps = (1, 3) if toy else (WARM, STEPS)
    driver = Driver(runner, batch, context, warm + steps, drafts, budget(toy))
    try:
        driver.steps(warm)
        return driver.steps(steps)
    finally:
        driver.close()


def tokens(runner: ModelRunner, batch: int, context: int, steps: int, toy: bool) -> Any:
    """[steps, batch]: what a batch decodes greedily."""
    driver = Driver(runner, batch, context, steps, 0, budget(toy))
    try:
        driver.steps(steps)
        return np.stack([np.frombuffer(own.tokens, np.int32) for own in driver.results])
    finally:
        driver.close()


class Floor(NamedTuple):
    """Bytes that a decode step must read. Embeddings are looked up, not read."""

    weights: int
    token: float
    """Keys and values of one, in all layers."""
    sequence: int
    """Its recurrent states, read and written."""

    def us(self, batch: int, context: float, copy_gbs: float) -> float:
        """Returns microseconds of a step limited only by copy bandwidth."""
        return (self.weights + batch * (context * self.token + self.sequence)) / copy_gbs / 1e3


def floor(opened_: OpenedDevice) -> Floor:
    runner, shape = opened_.runner, opened_.runner.model.shape
    weights = opened_.footprint.planned["weights"]  # on a CPU the process is measured
    if not shape.tied:
        weights -= shape.vocab_size * shape.hidden * shape.itemsize
    kv = sum(page_bytes(shape, PAGE, pool.dtype, len(pool.layers)) for pool in runner.pools) / PAGE
    return Floor(weights, kv, 0 if runner.states is None else 2 * sum(
        layer.state[0].numel() * layer.state.element_size() for layer in runner.states.layers))
