"""What a layer takes with passes and without them, middles left out."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.gpu.models.decoder import Decoder, LayerRun
from actorium.gpu.models.forward_context import ForwardContext, GroupContext
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.passes.self_check import NOTHING
from actorium.kernels.inputs import HiddenStream, settled

LAYERS = 4
"""The first ones, which are measured."""
TURNS = 5


class Way(NamedTuple):
    """A model's layers as some passes made them."""

    runs: list[LayerRun]
    error: float
    """See `self_check.difference`."""


def way(model: Decoder, on: tuple[str, ...]) -> Way:
    """The layers with these passes; the model runs them so from now on."""
    report = PassManager(model, on).install()
    return Way(model.runs, report.error)


@torch.inference_mode()
def microseconds(model: Decoder, ways: list[Way], tokens: int) -> list[float]:
    """Of a layer, in each of these ways, for so many tokens: medians of turns."""
    s = model.shape
    pages = torch.zeros((tokens + 1, *s.kv_row), dtype=model.dtype, device=model.device)
    positions = torch.arange(1, tokens + 1, device=model.device).clamp_(max=s.max_model_len - 1)
    group = GroupContext(positions, [pages] * s.layers, NOTHING)
    step = ForwardContext(model.ropes_at(positions), [group] * max(1, len(s.groups)), None, [])
    hidden = torch.randn((tokens, s.hidden), device=model.device).to(model.dtype)
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(TURNS + 1):
        for times, own in zip(found, ways, strict=True):
            times.append(_seconds(model, own, hidden.clone(), step))
    return [1e6 * median(times[1:]) / min(LAYERS, s.layers) for times in found]


def _seconds(model: Decoder, own: Way, hidden: Tensor, step: ForwardContext) -> float:
    stream: HiddenStream = hidden
    middles = [torch.zeros((len(hidden), layer.mixer.inner), dtype=model.dtype,
                           device=model.device) for layer in model.layers[:LAYERS]]
    began = perf_counter()
    for run, middle in zip(own.runs, middles, strict=False):
        _, carried = run.enter(stream, step)
        stream = run.leave(middle, carried)
    if settled(stream).is_cuda:
        torch.cuda.synchronize(model.device)
    return perf_counter() - began
