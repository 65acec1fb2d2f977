"""Whether a kernel's result is right: held against its reference in torch before it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from .case import Case
from .machine import tensors

SMALL = 0.1
"""Vectors shorter than so much of the usual one are held to that length: what cancels out has no
digits of its own."""
TOLERANCES: Mapping[tuple[str, str], float] = {
    # Results are rounded to bf16 (2**-9); probabilities and what is between two products, too.
    ("product", "bf16"): 0.01, ("attention", "bf16"): 0.02, ("experts", "bf16"): 0.02,
    ("elementwise", "bf16"): 0.01, ("sum of ranks", "bf16"): 0.01,
    # References quantise inputs as kernels do; a number between two codes may become either.
    ("product", "fp8"): 0.02, ("product", "int8"): 0.02, ("product", "int4"): 0.02,
    ("attention", "fp8"): 0.02,
    # Products in tf32 or bf16 within a chunk, sums over all of it.
    ("recurrent", "fp32"): 0.02, ("recurrent", "bf16"): 0.03, ("convolution", "fp32"): 0.01,
    # Share of the tokens: a draw at the edge of two tokens falls as sums are ordered.
    ("draw", "i64"): 0.02, ("likeliest", "i64"): 0.0}
"""By kernel and dtype: the most that `error` may be."""
CUT_OFF = {"fp8": 0.1}
"""By dtype, in Triton's interpreter, which loses what rounds up to a power of two."""


def compared(case: Case, interpreted: bool, spoiled: bool = False
             ) -> tuple[float, float]:
    """(error, what is allowed) of the first run of a case beside its reference, which sees what the
    case begins with. spoiled: its last vector is lost on the way, to see that this is noticed."""
    kernel, dtype, reference = case.truth
    allowed = TOLERANCES[kernel, dtype]
    want = tensors(reference())
    got = [own.clone(memory_format=torch.contiguous_format) for own in tensors(case.run())]
    if spoiled:
        floats = got[0].is_floating_point()
        (got[0].view(-1, got[0].shape[-1]) if floats else got[0])[-1] = 0 if floats else -1
    if len(got) != len(want):
        raise AssertionError(f"{len(got)} results, {len(want)} references")
    most = max(error(own, its) for own, its in zip(got, want, strict=True))
    return most, max(allowed, CUT_OFF.get(dtype, 0.0)) if interpreted else allowed


def error(got: Tensor, want: Tensor) -> float:
    """Of numbers, the largest distance of two vectors (the last dimension), as a share of the
    wanted one's length; infinite where one is not finite. Of integers, the share that differs."""
    if got.shape != want.shape:
        raise AssertionError(f"{list(got.shape)} numbers, {list(want.shape)} in the reference")
    if not got.is_floating_point():
        return float((got != want.to(got.dtype)).double().mean())
    got, want = (own.float().reshape(-1, own.shape[-1]) for own in (got, want))
    lengths = torch.linalg.vector_norm(want, dim=-1)
    usual = torch.linalg.vector_norm(lengths) / len(lengths)**0.5
    apart = torch.linalg.vector_norm(got - want, dim=-1)
    most = float((apart / lengths.clamp(min=SMALL * float(usual))).nan_to_num(nan=inf).max()
                 if float(usual) else apart.max())
    return most if bool(got.isfinite().all()) else inf
