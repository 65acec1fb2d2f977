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
from actorium.gpu.step.pools import KVPagePool
from actorium.kernels.inputs import HiddenStream, settled
from actorium.kernels.reference.kv import read_rows

ROWS = 3
"""Of the random input."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of a difference, see `_apart`: joined operations leave out roundings, of 2**-9 in bfloat16."""
FP8_TOLERANCE = 6e-2
"""The same where products take FP8: an input that is rounded otherwise is off by 2**-4."""
PAGE_TOLERANCE = {torch.int8: 2e-2, torch.float8_e4m3fn: FP8_TOLERANCE,
                  torch.float8_e5m2: FP8_TOLERANCE}
"""Of what is kept in pages of 8 bits: a number next to a tie becomes another code."""
NOTHING = AttentionPlan(0, None, None, None)


def tolerance(model: Decoder) -> float:
    """Of a model's differences."""
    known = TOLERANCE[model.dtype]
    return known if model.shape.fp8 is None else max(known, FP8_TOLERANCE)


@torch.inference_mode()
def difference(model: Decoder, layer: Any, plain: LayerRun, fused: LayerRun, pair: bool) -> float:
    """The largest difference between two ways to run a layer: of what goes into its middle, what is
    in its pages, what it returns. pair: it is given two numbers to add.

    Where the worker's pages are of another dtype, what is in such pages counts as well: as a
    tolerance of the model, where it is that of the pages."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(model.device, model.dtype)

    size = (ROWS, model.shape.hidden)
    stream: HiddenStream = (drawn(*size), drawn(*size)) if pair else drawn(*size)
    y = drawn(ROWS, layer.mixer.inner)

    def both(pages: torch.dtype) -> list[float]:
        one, other = (_run(model, own, _copied(stream), y.clone(), pages) for own in (plain, fused))
        return [_apart(a, b) for a, b in zip(one, other, strict=True)]

    found, kept = max(both(model.dtype)), page_dtype(model)
    if kept is model.dtype:
        return found
    *_, in_pages = both(kept)
    return max(found, in_pages * tolerance(model) / (TOLERANCE | PAGE_TOLERANCE)[kept])


@torch.inference_mode()
def piece_difference(model: Decoder, width: int, plain: Callable[[Tensor], Tensor],
                     fused: Callable[[Tensor], Tensor]) -> float:
    """The same of a norm and the product behind it, [T, width] -> [T, *]."""
    x = torch.randn((ROWS, width), generator=torch.Generator().manual_seed(1))
    x = x.to(model.device, model.dtype)
    return _apart(plain(x), fused(x))


def page_dtype(model: Decoder) -> torch.dtype:
    """Of the worker's pages."""
    return model.attention.pages or model.dtype


def bare_step(model: Decoder, tokens: int, pages: torch.dtype) -> ForwardContext:
    """A step of so many tokens, one behind the other, that all layers leave in the same pages of
    this dtype; what meets over them is left out."""
    s, at = model.shape, torch.arange(1, tokens + 1, device=model.device)
    pool = KVPagePool(s, tokens + 1, 1, pages, model.device, 1)
    count = max(1, s.layers)
    group = GroupContext(at, pool.layers * count, NOTHING, pool.scales * count)
    return ForwardContext(model.ropes_at(at.clamp(max=s.max_model_len - 1)),
                          [group] * max(1, len(s.groups)), None, [])


def _run(model: Decoder, run: LayerRun, stream: HiddenStream, y: Tensor,
         dtype: torch.dtype) -> list[Tensor]:
    """What goes into the middle, what the layer returns, what is in pages of this dtype."""
    step = bare_step(model, ROWS, dtype)
    p, carried = run.enter(stream, step)
    out = settled(run.leave(y, carried))
    group = step.groups[0]
    kept = read_rows(group.pages[0], torch.arange(ROWS + 1, device=model.device), torch.float32,
                     *group.scales[:1])
    return [p.flatten(1), out, kept]


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
