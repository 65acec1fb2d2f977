"""What a layer takes with passes and without them, middles left out."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.gpu.models.decoder import Decoder, LayerRun
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.passes.self_check import bare_step, page_dtype
from actorium.kernels.inputs import HiddenStream

LAYERS = 4
"""The first ones, which are measured."""
TURNS = 5


class Way(NamedTuple):
    """A model's first layers as some passes made them."""

    runs: list[LayerRun]
    matches: Mapping[str, int]
    error: float
    """See `self_check.difference`."""


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
        self.hidden = torch.randn((tokens, s.hidden), device=model.device).to(model.dtype)
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
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(turns + 1):
        for times, own in zip(found, ways, strict=True):
            times.append(timer.seconds(own))
    return [1e6 * median(times[1:]) / len(timer.layers) for times in found]
