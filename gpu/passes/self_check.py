"""Whether what the passes made of a layer does what its graph meant: both on random input, each
with a cache of its own, up to the middle and on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorium.gpu.attention.attention_plan import AttentionPlan
from actorium.gpu.models.decoder import Decoder, LayerRun
from actorium.gpu.models.forward_context import ForwardContext, GroupContext
from actorium.kernels.inputs import HiddenStream, settled

ROWS = 3
"""Of the random input."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of a difference, see `_apart`: joined operations leave out roundings, of 2**-9 in bfloat16."""
FP8_TOLERANCE = 6e-2
"""The same where products take FP8: an input that is rounded otherwise is off by 2**-4."""
NOTHING = AttentionPlan(0, None, None, None)


def tolerance(model: Decoder) -> float:
    """Of a model's differences."""
    known = TOLERANCE[model.dtype]
    return known if model.shape.fp8 is None else max(known, FP8_TOLERANCE)


@torch.inference_mode()
def difference(model: Decoder, layer: Any, plain: LayerRun, fused: LayerRun, pair: bool) -> float:
    """The largest difference between two ways to run a layer: of what goes into its middle, what is
    in its pages, what it returns. pair: it is given two numbers to add."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(model.device, model.dtype)

    size = (ROWS, model.shape.hidden)
    stream: HiddenStream = (drawn(*size), drawn(*size)) if pair else drawn(*size)
    y = drawn(ROWS, layer.mixer.inner)
    (first, pages), (second, others) = (
        _run(model, own, _copied(stream), y.clone()) for own in (plain, fused))
    return max(map(_apart, [*first, pages], [*second, others]))


@torch.inference_mode()
def piece_difference(model: Decoder, width: int, plain: Callable[[Tensor], Tensor],
                     fused: Callable[[Tensor], Tensor]) -> float:
    """The same of a norm and the product behind it, [T, width] -> [T, *]."""
    x = torch.randn((ROWS, width), generator=torch.Generator().manual_seed(1))
    x = x.to(model.device, model.dtype)
    return _apart(plain(x), fused(x))


def _run(model: Decoder, run: LayerRun, stream: HiddenStream,
         y: Tensor) -> tuple[list[Tensor], Tensor]:
    s = model.shape
    pages = torch.zeros((ROWS + 1, *s.kv_row), dtype=model.dtype, device=model.device)
    positions = torch.arange(1, ROWS + 1, device=model.device)
    group = GroupContext(positions, [pages] * max(1, s.layers), NOTHING)
    step = ForwardContext(model.ropes_at(positions), [group] * max(1, len(s.groups)), None, [])
    p, carried = run.enter(stream, step)
    return [p.flatten(1), settled(run.leave(y, carried))], pages


def _copied(stream: HiddenStream) -> HiddenStream:
    return stream.clone() if isinstance(stream, Tensor) else (stream[0].clone(), stream[1].clone())


def _apart(a: Tensor, b: Tensor) -> float:
    """The length of the difference, against that of a. 0 where a has numbers that are none: weights
    like that are found when the numbers are checked, and no pass is at fault."""
    # Behind the queries, in what goes into the middle, lies what is of no more use.
    width = min(a.shape[1], b.shape[1])
    a, b = a[:, :width].float(), b[:, :width].float()
    if not a.isfinite().all():
        return 0.0
    found = float((a - b).norm()) / (float(a.norm()) or 1.0)
    return found if found == found else float("inf")
