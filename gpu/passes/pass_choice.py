"""Which passes are kept: those that lose nowhere, by timing a model's first layers with each and
without it, once for a shape on a machine.

One choice serves steps of all sizes. What is joined is rounded less often than what is not, so a
choice by the number of tokens would give a sequence other bits in a larger batch than alone, and
other ones when it is recovered; and a pass that wins at one token and loses at a thousand has not
been seen. So a step looks nothing up.

Other processes disturb what is measured. A pass is left out only where it was the slower one in
each of many turns; the first turn that it wins, or does not lose by more than a little, ends the
question. Hence most passes cost two turns or three."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from actorium import __version__
from actorium.actors.config.parsed_values import PASSES
from actorium.gpu.models.decoder import Decoder, LayerRun
from actorium.gpu.passes.pass_manager import PassManager, bare_step, page_dtype
from actorium.gpu.plan.choice_files import ChoiceFiles
from actorium.kernels.cpu.native_library import cache_folder, processor_facts
from actorium.kernels.inputs import HiddenStream

FORMAT = 1
"""Of the file: what it says means something else with every other number."""
TOKENS = (1, 8, 64, 256, 1024)
"""One of each range: steps of one token, of up to 16, of up to 128, of up to 512, and of more."""
LOSSES = 16
"""Turns out of as many that a pass must lose."""
MARGIN = 1.02
"""Times as long with the pass as without it: less is no loss."""
BUDGET_S = 2.0
"""Of a start, for measuring. Sizes of steps that do not fit are not measured: large ones of large
layers, where the products take nearly all of the time."""
LOG = logging.getLogger("actorium.passes")
LAYERS = 4
"""The first ones, which are measured."""
TURNS = 5


class Loss(msgspec.Struct, frozen=True):
    """Where a pass lost."""

    tokens: int
    without_us: float
    """Least microseconds of the measured layers without the pass."""
    with_us: float


class PassChoice(msgspec.Struct, frozen=True):
    """What was measured, as it is remembered."""

    key: dict[str, str]
    """What it depends on."""
    lost: dict[str, Loss]
    """The passes that are left out."""
    measured: list[int]
    """Of TOKENS."""

    def kept(self, on: Sequence[str]) -> tuple[str, ...]:
        """Those of `on` that are not left out."""
        return tuple(name for name in on if name not in self.lost)


class Chosen(NamedTuple):
    """What a start goes by."""

    choice: PassChoice
    path: Path
    """Where it is remembered."""
    remembered: bool
    """It was there; nothing was measured."""


def keep_winners(model: Decoder, on: tuple[str, ...], most: int, run_dir: Path | None = None
                 ) -> tuple[str, ...]:
    """Those of the passes `on` that lose in steps of no size up to `most` tokens. Of several ranks
    the first one decides; all call this. run_dir: the engine's, whose workers all go by the first
    one's choice."""
    group = model.group
    bits = torch.zeros(len(PASSES), dtype=torch.int64, device=model.device)
    if group.place.rank == 0:
        with group.alone():
            chosen = remembered_choice(model, on, most, run_dir=run_dir)
        LOG.info("passes: %s", choice_text(chosen))
        kept = chosen.choice.kept(on)
        bits = torch.tensor([name in kept for name in PASSES], dtype=torch.int64,
                            device=model.device)
    held = group.broadcast(bits).tolist()
    return tuple(name for name, here in zip(PASSES, held, strict=True) if here)


def remembered_choice(model: Decoder, on: tuple[str, ...], most: int, folder: Path | None = None,
                      run_dir: Path | None = None) -> Chosen:
    """What is remembered of this model on this machine; measured, and remembered, where nothing is.
    folder: default: the user's cache."""
    key = choice_key(model, on, most)
    files = ChoiceFiles.of("passes", key, folder or cache_folder(), run_dir)
    choice = files.read(PassChoice)
    remembered = choice is not None and set(choice.lost) <= set(PASSES)
    if choice is None or not remembered:
        choice = PassChoice(key, *_measured(model, on, most))
        # Where the machine was too busy for a single size, the next engine may find time.
        choice = files.remember(choice) if choice.measured else choice
    with suppress(OSError):  # a full disk: the cache has it
        files.keep(choice)
    return Chosen(choice, files.cached, remembered)


def choice_key(model: Decoder, on: Sequence[str], most: int) -> dict[str, str]:
    """What a choice depends on: versions, device, and the model's shape, which says in which
    formats its weights are."""
    lib = getattr(model.ops, "lib", None)
    cpu = model.device.type == "cpu"
    return {
        "format": str(FORMAT), "actorium": __version__, "torch": str(torch.__version__),
        "kernels": f"{model.ops.name} {Path(lib._name).stem if lib is not None else ''}".strip(),
        "device": _digest(processor_facts()) if cpu else torch.cuda.get_device_name(model.device),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()) if cpu else "", "ranks": (
            f"{model.group.place.size}{' sum with norms' * model.group.sums(model.dtype)}"),
        "shape": repr(replace(model.shape, max_model_len=0)),
        "pages": str(page_dtype(model)), "passes": ",".join(on),
        "tokens": ",".join(map(str, _sizes(most)))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _sizes(most: int) -> list[int]:
    return [tokens for tokens in TOKENS if tokens <= max(1, most)]


# --- measuring ------------------------------------------------------------------------------------

def _measured(model: Decoder, on: tuple[str, ...],
              most: int) -> tuple[dict[str, Loss], list[int]]:
    """(where passes lost, the sizes of steps that were measured)"""
    full = way(model, on)
    less = {name: way(model, tuple(other for other in on if other != name))
            for name in on if full.matches[name]}

    def timed(tokens: int) -> Callable[[str], float]:
        timer = LayerTimer(model, tokens)
        return lambda name: timer.seconds(less[name] if name else full)

    return losses(list(less), _sizes(most), timed)


def losses(names: Sequence[str], sizes: Sequence[int],
           timed: Callable[[int], Callable[[str], float]],
           now: Callable[[], float] = perf_counter) -> tuple[dict[str, Loss], list[int]]:
    """(where passes lost, the sizes of steps that were measured)

    timed(tokens)(name): seconds of the layers for so many tokens, without a pass; "": with all.
    """
    end, lost, measured = now() + BUDGET_S, dict[str, Loss](), list[int]()
    spent, before = 0.0, 0
    for tokens in sizes:
        began = now()
        if measured and began + spent * tokens / before > end:
            break
        seconds = timed(tokens)
        for name in (name for name in names if name not in lost):
            found = _lost(partial(seconds, ""), partial(seconds, name), lambda: now() > end)
            if found is not None:
                lost[name] = Loss(tokens, 1e6 * found[0], 1e6 * found[1])
        if now() > end:
            break
        measured.append(tokens)
        spent, before = now() - began, tokens
    return lost, measured


def _lost(fused: Callable[[], float], apart: Callable[[], float],
          late: Callable[[], bool]) -> tuple[float, float] | None:
    """(least seconds without the pass, with it) where it lost each turn; None where it did not."""
    least, fewest = inf, inf
    for turn in range(-1, LOSSES):
        first, second = (fused, apart) if turn % 2 else (apart, fused)
        one, other = first(), second()
        own, bare = (one, other) if turn % 2 else (other, one)
        if turn < 0:  # the first turn fills caches
            continue
        if own <= MARGIN * bare or late():
            return None
        least, fewest = min(least, bare), min(fewest, own)
    return least, fewest


def choice_text(chosen: Chosen) -> str:
    """In words."""
    choice, path, found = chosen
    sizes = ", ".join(map(str, choice.measured))
    how = (f"remembered in {path}" if found else
           f"measured over {LAYERS} layers at {sizes} tokens, remembered in {path}" if sizes else
           f"not measured, {BUDGET_S:g} s were not enough")
    out = "; ".join(f"{name} left out, at {own.tokens} tokens {own.with_us:.0f} us with it and "
                    f"{own.without_us:.0f} without" for name, own in choice.lost.items())
    return f"{out or 'none is left out'}; {how}"


# --- Timing --------------------------------------------------------------------------------------

class Way(NamedTuple):
    """A model's first layers as some passes made them."""

    runs: list[LayerRun]
    matches: Mapping[str, int]
    error: float
    """See `pass_manager.difference`."""


def way(model: Decoder, on: tuple[str, ...]) -> Way:
    """The layers with these passes; the model goes on as it is."""
    manager = PassManager(model, on)
    return Way(manager.runs(LAYERS), manager.report.matches, manager.report.error)


class LayerTimer:
    """Runs a model's first layers over steps of one size, on random numbers."""

    def __init__(self, model: Decoder, tokens: int) -> None:
        s = model.shape
        self.model = model
        self.layers = model.layers[:LAYERS]
        self.step = bare_step(model, tokens, page_dtype(model))
        self.hidden = torch.randn((tokens, s.stream_width), device=model.device).to(model.dtype)
        self.middles = [torch.zeros((tokens, layer.mixer.inner), dtype=model.dtype,
                                    device=model.device) for layer in self.layers]

    @torch.inference_mode()
    def seconds(self, own: Way) -> float:
        """Of all measured layers, once; on a CUDA device of what the host does not delay."""
        if self.model.device.type == "cuda" and not self.model.waits:
            from actorium.kernels.triton.skinny_linear import replayed_seconds

            return replayed_seconds(lambda: self._run(own.runs, self.hidden.clone()), 1)
        hidden = self.hidden.clone()
        began = perf_counter()
        self._run(own.runs, hidden)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return perf_counter() - began

    def _run(self, runs: list[LayerRun], hidden: Tensor) -> HiddenStream:
        stream: HiddenStream = hidden
        for run, middle in zip(runs, self.middles, strict=True):
            _, carried = run.enter(stream, self.step)
            stream = run.leave(middle, carried)
        return stream


def microseconds(model: Decoder, ways: list[Way], tokens: int, turns: int = TURNS) -> list[float]:
    """Of a layer, in each of these ways, for so many tokens: medians of turns."""
    timer = LayerTimer(model, tokens)
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(turns + 1):
        for times, own in zip(seconds, ways, strict=True):
            times.append(timer.seconds(own))
    return [1e6 * median(times[1:]) / len(timer.layers) for times in seconds]
