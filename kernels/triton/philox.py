"""Uniform numbers by (seed, position): see `kernels.reference.philox`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

BLOCK = 128


@triton.jit
def philox4x32(c0: tensor, c1: tensor, c2: tensor, c3: tensor, k0: tensor, k1: tensor) -> tensor:
    """The four words after ten rounds; all are uint32 of one shape."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform_of(seed_low: tensor, seed_high: tensor, position: tensor) -> tensor:
    """float64 in [0, 1) with 53 random bits, from int32 words."""
    c0 = position.to(tl.uint32, bitcast=True)
    k0 = seed_low.to(tl.uint32, bitcast=True)
    k1 = seed_high.to(tl.uint32, bitcast=True)
    zero = c0 * 0
    a, b, _, _ = philox4x32(c0, zero, zero, zero, k0, k1)
    bits = ((a >> 5).to(tl.int64) << 26) | (b >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _words(words: tensor, out: tensor, n: tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    c0 = tl.load(words + at, mask=live, other=0).to(tl.uint32)
    c1 = tl.load(words + n + at, mask=live, other=0).to(tl.uint32)
    c2 = tl.load(words + 2 * n + at, mask=live, other=0).to(tl.uint32)
    c3 = tl.load(words + 3 * n + at, mask=live, other=0).to(tl.uint32)
    k0 = tl.load(words + 4 * n + at, mask=live, other=0).to(tl.uint32)
    k1 = tl.load(words + 5 * n + at, mask=live, other=0).to(tl.uint32)
    c0, c1, c2, c3 = philox4x32(c0, c1, c2, c3, k0, k1)
    tl.store(out + at, c0.to(tl.int64), mask=live)
    tl.store(out + n + at, c1.to(tl.int64), mask=live)
    tl.store(out + 2 * n + at, c2.to(tl.int64), mask=live)
    tl.store(out + 3 * n + at, c3.to(tl.int64), mask=live)


@triton.jit
def _uniform(low: tensor, high: tensor, position: tensor, out: tensor, n: tensor,
             BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    u = uniform_of(tl.load(low + at, mask=live, other=0), tl.load(high + at, mask=live, other=0),
                   tl.load(position + at, mask=live, other=0))
    tl.store(out + at, u, mask=live)


def philox(words: Tensor) -> Tensor:
    """Output words i64[4, n] of counters and keys i64[6, n], all below 2**32: `philox4x32`."""
    n = words.shape[1]
    out = torch.empty(4, n, dtype=torch.int64, device=words.device)
    if n:
        _words[(triton.cdiv(n, BLOCK),)](words, out, n, BLOCK=BLOCK)
    return out


def uniform(seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """f64[R] from i32[R] words of the seeds and i32[R] positions: `reference.philox.uniform`."""
    out = torch.empty(len(position), dtype=torch.float64, device=position.device)
    if len(position):
        _uniform[(triton.cdiv(len(position), BLOCK),)](seed_low, seed_high, position, out,
                                                       len(position), BLOCK=BLOCK)
    return out
