"""Cases: drawing tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from actorium.kernels import sampling_tables as columns
from actorium.kernels.backends import select_sampling
from actorium.kernels.reference.torch_ops import TorchSampling
from actorium.kernels.sampling_tables import SamplingTables

from . import shapes
from .case import Case, Named, Run, Setting, Truth

ROWS, VOCAB = 256, 151_936
FLAT = 0.02
"""Spread of logits of which a nucleus of 0.9 holds nine tenths of all."""


def draws(s: Setting) -> Named:
    """256 rows of Qwen's vocabulary."""
    for name, (top_k, top_p, flat) in shapes.DRAWS.items():
        yield name, partial(_draw, s, top_k, top_p, flat)


def _draw(s: Setting, top_k: int, top_p: float, flat: bool) -> Case:
    rows, vocab = s.size(ROWS, 3), s.size(VOCAB, 200)
    ops = select_sampling(s.device, "auto" if not s.toy else "triton")
    record = torch.zeros(rows + 1, columns.WIDTH, dtype=torch.int32)
    real = record.view(torch.float32)
    record[:, columns.TOP_K], record[:, columns.SEED_LOW] = top_k, torch.arange(rows + 1)
    real[:, columns.TEMPERATURE] = 1.0 if top_p else 0.0
    real[:, columns.TOP_P], real[:, columns.REPETITION] = top_p or 1.0, 1.0
    tables = SamplingTables(record.to(s.device),
                            torch.full((rows + 1, 1), -1, dtype=torch.int32, device=s.device),
                            torch.zeros(rows + 1, 0, dtype=torch.int64, device=s.device))
    logits = s.randn(rows, vocab, dtype=torch.float32) * (FLAT if flat else 4)
    slots = s.arange(rows) + 1
    chosen = partial(ops.choose, logits, slots, slots, tables, top_p > 0,
                     0 < top_p < 1 or top_k > 0)
    truth = Truth("draw" if top_p else "likeliest", "i64", partial(
        TorchSampling().choose, logits, *chosen.args[1:]))
    return Case(chosen, truth, rows * vocab * 4, peers={
        "torch": partial(_torchs, logits, top_k, top_p)})


def _torchs(logits: Tensor, top_k: int, top_p: float) -> Run:
    if not top_p:
        return lambda: logits.argmax(-1)
    if top_p == 1.0:
        return lambda: logits.softmax(-1).multinomial(1)

    def sorted_out() -> Tensor:
        found, order = logits.sort(-1, descending=True)
        if top_k:
            found, order = found[:, :top_k], order[:, :top_k]
        p = found.softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p > top_p, 0.0)
        return order.gather(-1, p.multinomial(1))

    return sorted_out
