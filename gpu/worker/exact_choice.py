"""Whether an engine that was asked for `--exact auto` is exact: yes, where that costs less than
`LIMIT` percent of any step, measured once for a model on a machine.

What costs are a few kernels that have two ways. Steps of a real size are run on the loaded model;
the calls of these kernels in them are recorded, and then repeated by turns in both ways. So what is
compared is microseconds of the same call on the same memory, not whole steps: most of those is
equal, and other processes disturb them by more than the kernels differ. The difference counts
against the time of the step as it is served.

One way is kept for a whole engine: its workers go by the first one's choice, whatever they would
measure (`gpu/plan/choice_files.py`)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from actorium import __version__
from actorium.actors.config.tree import Config
from actorium.actors.messages import StepPlan
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.decoder import Decoder, LoadedModel
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.plan.choice_files import ChoiceFiles
from actorium.gpu.step.forward import StepCounts
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.exactness import (
    departures,
    extends_two_ways,
    set_exact,
    two_way_kernels,
)
from actorium.gpu.worker.warmup import GREEDY, admitted, few_states, i4
from actorium.kernels.cpu.native_library import cache_folder, library, processor_facts
from actorium.kernels.cpu.native_ops import NativeOps

Call = Callable[[], Any]
FORMAT = 1
"""Of the file: what it says means something else with every other number."""
LIMIT = 3.0
"""Percent of a step's time that exactness may cost to be the default."""
SEQUENCES, CONTEXT, CHUNK = (1, 32), 256, 256
"""Of the decode steps that are measured: sequences, and tokens of each; tokens of the prompt."""
BUDGET_S = 0.04
"""For the turns of one step's kernels, and for its own."""
LEAST_TURNS, MOST_TURNS = 9, 31
ALIKE = 4
"""Calls of one kind that are timed; the others count as these do."""


class Cost(NamedTuple):
    """What exactness adds to the time of one kind of step, in percent."""

    step: str
    percent: float
    """By the times that a quarter of the turns are below, which other processes disturb least."""
    least: float
    """Three turns of four say more."""


class ExactChoice(msgspec.Struct, frozen=True):
    """What an engine goes by, as it is remembered."""

    key: dict[str, str]
    """What it depends on."""
    on: bool
    percent: float
    """What exactness costs the step that it costs most."""
    step: str = ""
    """Which that is; "": both ways are the same kernels."""

    @property
    def text(self) -> str:
        """What the start says."""
        cost = "nothing" if self.percent < 0.05 else f"{self.percent:.2g} %"
        if self.on:
            return f"on, costs {cost}{f' ({self.step})' if self.percent >= 0.05 else ''}"
        return f"off here, would cost {cost} ({self.step}): --exact on"


def by_cost(key: dict[str, str], costs: Sequence[Cost]) -> ExactChoice:
    """The choice: off where most turns say that a step takes too long."""
    worst = max(costs, key=lambda cost: cost.percent, default=Cost("", 0.0, 0.0))
    return ExactChoice(key, all(cost.least < LIMIT for cost in costs),
                       round(max(0.0, worst.percent), 2), worst.step)


class ExactFiles(NamedTuple):
    """What is known of `--exact auto` before a model is loaded."""

    files: ChoiceFiles | None
    """None where nothing is to be chosen."""
    known: ExactChoice | None
    """What was chosen before."""
    epoch: int
    """The worker's."""

    def to_load(self, config: Config) -> Config:
        """The configuration to load by: kernels that are off need not be there."""
        if self.known is None or self.known.on:
            return config
        return msgspec.structs.replace(
            config, device=msgspec.structs.replace(config.device, exact="off"))


class Settled(NamedTuple):
    """What came of `--exact`."""

    text: str
    """What the start says."""
    inexact: str
    """Why not everything is exact; "": it is."""


def settle(config: Config, runner: ModelRunner, exact: ExactFiles, capture: Call) -> Settled:
    """Decides on `--exact auto`, and lets the kernels go that way. All ranks call this, before any
    programs are captured; capture: does that, for steps that are measured."""
    asked, model = config.device.exact, runner.model
    assert isinstance(model, LoadedModel)
    (files, choice, _), why = exact, ""
    if choice is None or choice.on:
        why = "; ".join(departures(model, asked))
    if asked != "auto":
        return Settled(asked, why)
    if not why and files is not None:
        choice = choice or _chosen(config, exact, files, runner, capture)
        if lost := _lost(files, choice, model.group):
            why = f"its choice cannot be kept for the worker's successors: {lost}"
        elif choice.on:
            return Settled(choice.text, "")
    set_exact(model, False)
    if why or choice is None:
        return Settled(f"off here: {why}", why)
    return Settled(choice.text, "exact is off here, --exact on")


def _lost(files: ChoiceFiles, choice: ExactChoice, group: RankGroup) -> str:
    """Why the choice could not be kept for the engine's next workers; "": it is."""
    why = ""
    if group.place.rank == 0:
        try:
            files.keep(choice)
        except OSError as error:
            why = error.strerror or str(error)
    return why or ("" if group.agreed(float(not why)) else "rank 0 cannot write")


def exact_files(config: Config, shape: ModelShape, epoch: int, group: RankGroup,
                run_dir: Path | None, on_gpu: bool = False) -> ExactFiles:
    """What is known for a rank's part of a model; epoch: the worker's. All ranks call this."""
    device = config.device
    here = device.exact == "auto" and device.kernels == "auto" and not on_gpu
    if not here or (lib := library()) is None:
        return ExactFiles(None, None, epoch)
    facts = hashlib.sha256(processor_facts().encode()).hexdigest()[:20]
    forced = f"{device.exact_costs} of worker {epoch}" if device.exact_costs else ""
    key = {"format": str(FORMAT), "actorium": __version__, "torch": str(torch.__version__),
           "kernels": Path(lib._name).stem, "device": facts, "machine": platform.machine(),
           "threads": str(torch.get_num_threads()), "ranks": str(device.tensor_parallel_size),
           "shape": repr(replace(shape, max_model_len=0)),
           "pages": config.memory.kv_cache_dtype, "attention": repr(
               (device.attention_backend, device.prefill_attention_backend,
                device.decode_attention_backend, device.passes, device.optimization_level)),
           "sequences": str(config.scheduler.max_num_seqs), "forced": forced}
    files = ChoiceFiles.of("exact", key, cache_folder(), run_dir)
    choice = files.read(ExactChoice) if group.place.rank == 0 else None
    return ExactFiles(files, _shared(choice, files, group), epoch)


def _chosen(config: Config, exact: ExactFiles, files: ChoiceFiles, runner: ModelRunner,
            capture: Call) -> ExactChoice:
    """The choice by measuring, of ranks the first one's; remembered for other engines."""
    model, choice = runner.model, None
    assert isinstance(model, Decoder)
    if forced := [float(own) for own in config.device.exact_costs.split(",") if own]:
        percent = forced[min(exact.epoch, len(forced)) - 1]
        costs = [Cost("as forced", percent, percent)]
    else:
        capture()
        costs = measured_costs(runner, config.scheduler.max_num_batched_tokens)
        runner.segments = None  # they are of the exact kernels
    if model.group.place.rank == 0:
        choice = files.remember(by_cost(files.key, costs))
    own = _shared(choice, files, model.group)
    assert own is not None
    return own


def _shared(choice: ExactChoice | None, files: ChoiceFiles, group: RankGroup
            ) -> ExactChoice | None:
    """The first rank's, which others have without the name of the step."""
    row = [0, 0, 0] if choice is None else [1, int(choice.on), round(100 * choice.percent)]
    known, on, cents = group.broadcast(torch.tensor(row, dtype=torch.int64)).tolist()
    return choice or (ExactChoice(files.key, bool(on), cents / 100) if known else None)


# --- measuring -----------------------------------------------------------------------------------

class TwoWays(NamedTuple):
    """Calls of one kernel in a step, as it takes them."""

    exact: list[Call]
    fast: list[Call]
    times: float
    """As many times as these there are in the step."""


@torch.inference_mode()
def measured_costs(runner: ModelRunner, most: int) -> list[Cost]:
    """Of each kind of step that can differ. The model is exact now, and steps are served as they
    are to be. most: tokens of a step. Leaves the tables empty."""
    model, longest = runner.model, runner.tables.max_len
    assert isinstance(model, Decoder) and isinstance(model.ops, NativeOps)
    if model.shape.bidirectional:  # whose attention has one way, and which decodes nothing
        return []
    served, runner.served = runner.served, StepCounts()  # these are not requests' steps
    rows_at_once = sorted({min(rows, few_states(runner), most) for rows in SEQUENCES})
    tokens, costs = min(CHUNK, most, longest - 1), []
    for rows in rows_at_once:
        with _decoding(runner, rows, max(1, min(CONTEXT, longest // 2))) as step:
            costs += _cost(runner, f"decodes of {rows}", rows, step)
    if model.ops.padded or extends_two_ways(model):
        costs += _cost(runner, f"a prompt of {tokens}", tokens, lambda: _prompt(runner, tokens))
    runner.served = served
    return costs


def _cost(runner: ModelRunner, name: str, rows: int, step: Call) -> list[Cost]:
    """Of a step of so many rows; [] where both ways are the same."""
    model = runner.model
    assert isinstance(model, Decoder)
    segments, runner.segments = runner.segments, None  # programs show no calls
    recorder = RepeatedCalls()
    try:
        with recorder.recording(model):
            step()
    finally:
        runner.segments = segments
    ways = [*recorder.ways(), *_padded(model, rows)]
    if not ways:
        return []
    exact, fast, more = 0.0, 0.0, [0.0] * MOST_TURNS
    for own in ways:
        turns = _turns_of(own, model.group)
        exact += own.times * quantiles([a for a, _ in turns], n=4)[0]
        fast += own.times * quantiles([b for _, b in turns], n=4)[0]
        more = [so_far + own.times * (a - b)
                for so_far, (a, b) in zip(more, turns, strict=False)]
    whole = _seconds(step, model.group)
    # As much as the step would take less with the fast ones.
    least = quantiles(more, n=4)[0]
    return [Cost(name, *(100 * own / max(whole - own, whole / 2)
                         for own in (exact - fast, least)))]


class RepeatedCalls:
    """Calls of kernels that have two ways, recorded to be repeated."""

    def __init__(self) -> None:
        self._calls: dict[Any, list[tuple[Any, Call]]] = {}
        """By kernel and sizes."""

    def __call__(self, kernel: Any, run: Callable[..., Any], *args: Any) -> None:
        kind = type(kernel), getattr(kernel, "window", 0), args[0].shape
        self._calls.setdefault(kind, []).append((kernel, partial(run, *args)))

    @contextmanager
    def recording(self, model: Decoder) -> Iterator[None]:
        """Meanwhile the model's calls are recorded."""
        kernels: list[Any] = [*two_way_kernels(model)]
        for kernel in kernels:
            kernel.recorder = self
        try:
            yield
        finally:
            kernels += [kernel for calls in self._calls.values() for kernel, _ in calls]
            for kernel in kernels:
                kernel.recorder = None

    def ways(self) -> list[TwoWays]:
        """Returns calls of each kind, in both ways."""
        out = []
        for calls in self._calls.values():
            some = calls[:ALIKE]
            exact, fast = ([_in_way(*each, way) for each in some] for way in (True, False))
            out.append(TwoWays(exact, fast, len(calls) / len(some)))
        return out


def _in_way(kernel: Any, run: Call, exact: bool) -> Call:
    def call() -> None:
        before, kernel.exact = kernel.exact, exact
        try:
            run()
        finally:
            kernel.exact = before
    return call


def _padded(model: Decoder, rows: int) -> list[TwoWays]:
    """Products of weights with columns of zeros behind their own, which are else oneDNN's."""
    ops = model.ops
    assert isinstance(ops, NativeOps)
    both = [NativeOps(ops.lib, ops.threads, exact=exact) for exact in (True, False)]
    ways = []
    for (outs, ins), times in ops.padded.items():
        weight = torch.randn((outs, ins), dtype=model.dtype)
        x = torch.randn((rows, ins), dtype=model.dtype)
        exact, fast = (partial(own.linear(weight), x) for own in both)
        ways.append(TwoWays([exact], [fast], times))
    return ways


def _turns_of(ways: TwoWays, group: RankGroup) -> list[tuple[float, float]]:
    """Seconds of the exact calls and of the fast ones, by turn."""
    def turn(number: int) -> tuple[float, float]:
        pair = (ways.exact, ways.fast) if number % 2 else (ways.fast, ways.exact)
        first, second = (_timed(calls) for calls in pair)
        return (first, second) if number % 2 else (second, first)

    turn(0)  # fills caches
    began = perf_counter()
    turn(1)
    return [turn(number) for number in range(_turns(perf_counter() - began, group))]


def _seconds(step: Call, group: RankGroup) -> float:
    """Of a step as it is served."""
    step()  # captures it
    first = _timed([step])
    turns = [first, *(_timed([step]) for _ in range(_turns(first, group) // 2))]
    return quantiles(turns, n=4)[0]


def _turns(seconds: float, group: RankGroup) -> int:
    """How many fit, of ranks as many on each."""
    fit = BUDGET_S / max(seconds, 1e-6)
    return int(group.agreed(max(LEAST_TURNS, min(MOST_TURNS, fit))))


def _timed(calls: Sequence[Call]) -> float:
    began = perf_counter()
    for call in calls:
        call()
    return perf_counter() - began


@contextmanager
def _decoding(runner: ModelRunner, rows: int, context: int) -> Iterator[Call]:
    """A decode step of so many sequences behind so many tokens, over the sink page."""
    slots = np.arange(1, rows + 1, dtype=np.int32)
    runner.run(StepPlan(0, 0, admit=[admitted(slot, context, GREEDY) for slot in slots.tolist()]))
    for slot in slots.tolist():
        runner.tables.sequences[slot].done = context - 1  # as if earlier chunks had computed them
    runner.run(StepPlan(0, 0, extend=np.stack((slots, np.ones_like(slots)), 1).tobytes()))
    try:
        yield lambda: runner.run(StepPlan(0, 0, decode=slots.tobytes()))
    finally:
        runner.run(StepPlan(0, 0, release=slots.tobytes()))


def _prompt(runner: ModelRunner, tokens: int) -> None:
    runner.run(StepPlan(0, 0, admit=[admitted(1, tokens, GREEDY)], extend=i4(1, tokens)))
    runner.run(StepPlan(0, 0, release=i4(1)))
