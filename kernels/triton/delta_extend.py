"""See `kernels.reference.delta_rule`: the tokens of an extend step, in chunks, on tensor cores.

Two launches behind the convolution. `_prepare` makes of each chunk what needs no state: gates, the
inverse of its triangular system (the UT transform of section 3.3 of the paper) and what queries
see of the chunk's own keys. `_walk` takes a part of each state through its sequence's chunks:

    new = T beta (v - exp(G) k S);  out = exp(G) q S + attend new;  S = exp(G_L) S + k^T new,

where G are the log gates summed from the chunk's start, T = (1 + tril(beta k k^T decay, -1))^-1,
and S, held as [K, V], is in fp32. Taking the old state's share off the values before T, rather than
after it (as with the paper's W and U), rounds differences and not what they are made of, and leaves
two matrices of [L, L] in memory where there were three of [L, K] and [L, V].

All products are of bf16 with sums in fp32. A factor that bf16 does not hold goes in as two, itself
and what rounding took off it (`_product`), where that is worth its products: see `delta_extend`.
Keys and queries are taken as they are, and their lengths into the sums, so they are never rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.ragged import CHUNK, Ragged, segments_of
from actorium.kernels.reference.delta_rule import NORM_EPS
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.triton.causal_conv import conv_tokens
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.product import rounded

ROOM = 116 * 1024
"""Bytes of shared memory in which `_walk`, in bf16 and with 128 numbers a key, loads a chunk while
it computes the one before."""
VALUES = 32
"""Columns of a state in a program of `_walk`: one sequence of 32 heads makes 128 programs. Before
sm_90, where operands are in registers, half as many."""
FACTORS = tl.constexpr(5)
"""Rows of fp32[FACTORS, L] that `_prepare` leaves for each chunk: beta, what multiplies the
products of keys and of queries with the old state, and new values on their way into the state; the
first of the last is the decay of the state over the chunk."""


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, A_SPLIT: tl.constexpr, B_SPLIT: tl.constexpr) -> tl.tensor:
    """a @ b in fp32. A factor that is split keeps 16 bits of its fraction, else 8."""
    high_a, high_b = rounded(a), rounded(b)
    out = tl.dot(high_a, high_b)
    if B_SPLIT:
        out = tl.dot(high_a, rounded(b - high_b), out)
    if A_SPLIT:
        out = tl.dot(rounded(a - high_a), high_b, out)
    return out


@triton.jit
def _store_matrix(to: tl.tensor, at: tl.tensor, x: tl.tensor, L: tl.constexpr,
                  SPLIT: tl.constexpr) -> None:
    """f32[L, L] as bf16[1 + SPLIT, L, L], the factors of `_product`; at: its place if not split."""
    to = to + at * (1 + SPLIT) + (tl.arange(0, L)[:, None] * L + tl.arange(0, L)[None, :])
    high = x.to(tl.bfloat16)
    tl.store(to, high)
    if SPLIT:
        tl.store(to + L * L, (x - high.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _product_stored(a: tl.tensor, at: tl.tensor, b: tl.tensor, out: tl.tensor, L: tl.constexpr,
                    SPLIT: tl.constexpr) -> tl.tensor:
    """out + a @ b, of a lower triangular matrix that `_store_matrix` left at `at`."""
    i, j = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    a = a + at * (1 + SPLIT) + (i * L + j)
    # The choice is made in registers, and what comes from there needs one buffer in shared memory
    # instead of two, so that two programs share a multiprocessor.
    high_a, high_b = rounded(tl.where(i >= j, tl.load(a), 0.0)), rounded(b)
    out = tl.dot(high_a, high_b, out)
    if SPLIT:
        out = tl.dot(high_a, rounded(b - high_b), out)
        out = tl.dot(rounded(tl.where(i >= j, tl.load(a + L * L), 0.0)), high_b, out)
    return out


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    return tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit
def _inverse_length(x: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """1 / |x| of each row."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + eps)


@triton.jit
def _decays(g: tl.tensor, L: tl.constexpr) -> tl.tensor:
    """exp(g[j + 1] + .. + g[i]) of the log gates f32[L], f32[L, L]; 0 where i < j.

    Sums of the gates between two tokens, not differences of sums, which are not exact once a gate
    has been far below the others. They are products with ones, of gates in three parts, of which
    nothing is left."""
    i, j = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    ones, rest = rounded(tl.where(i >= j, 1.0, 0.0)), tl.where(i > j, g[:, None], 0.0)
    high = rounded(rest)
    rest -= high
    middle = rounded(rest)
    out = tl.dot(ones, rounded(rest - middle))
    out = tl.dot(ones, high, tl.dot(ones, middle, out))
    return tl.where(i >= j, tl.exp(out), 0.0)


@triton.jit
def _inverse(system: tl.tensor, L: tl.constexpr) -> tl.tensor:
    """(1 + system)^-1 - 1 of a strictly lower triangular f32[L, L], by forward substitution of
    blocks of 1, 2, 4 ..: with T the inverse of the diagonal blocks, and A those between two
    neighbours, the inverse of both together is T - T A T. No power of the system is formed, so
    nothing grows that is not in the result."""
    i, j = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    out = tl.where(i == j, 1.0, tl.where((i ^ j) == 1, -system, 0.0))
    for level in range(1, L.bit_length() - 1):
        between = tl.where(((i >> level) ^ (j >> level)) == 1, system, 0.0)
        out -= _product(_product(out, between, True, True), out, True, True)
    return tl.where(i > j, out, 0.0)


@triton.jit(do_not_specialize=["stride", "gates_at"], do_not_specialize_on_alignment=["chunks"])
def _prepare(qkv: tl.tensor, p: tl.tensor, stride: tl.tensor, gates_at: tl.tensor,
             decay: tl.tensor, bias: tl.tensor, chunks: tl.tensor, solved: tl.tensor,
             attend: tl.tensor, factors: tl.tensor, scale: tl.tensor, eps: tl.tensor,
             HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
             K_BLOCK: tl.constexpr, FP32: tl.constexpr, SPLIT: tl.constexpr) -> None:
    """One chunk of one value head."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(chunks + 2 * at).to(tl.int64)
    place = tl.arange(0, L)
    live = place < tl.load(chunks + 2 * at + 1)
    k = tl.arange(0, K_BLOCK)
    key = head // (HV // HK) * K
    channels: tl.constexpr = 2 * HK * K + HV * V
    raw = p + first * stride + gates_at + head + place * stride
    beta = 1 / (1 + tl.exp(-tl.load(raw, mask=live, other=0).to(tl.float32)))
    beta = tl.where(live, beta, 0.0)
    g = tl.load(raw + HV, mask=live, other=0).to(tl.float32) + tl.load(bias + head)
    g = tl.where(live, -tl.load(decay + head) * _softplus(g), 0.0)
    i, j = place[:, None], place[None, :]
    between = _decays(g, L)
    tile = qkv + first * channels + key + (place[:, None] * channels + k[None, :])
    inside = live[:, None] & (k < K)[None, :]
    q = tl.load(tile, mask=inside, other=0)
    length_q = _inverse_length(q, eps) * scale
    by = tl.load(tile + HK * K, mask=inside, other=0)
    length_k = _inverse_length(by, eps)
    between *= length_k[None, :]
    old = tl.exp(tl.cumsum(g, axis=0))
    to = factors + (at * HV + head) * (FACTORS * L) + place
    tl.store(to, beta)
    tl.store(to + L, old * length_k)
    tl.store(to + 2 * L, old * length_q)
    tl.store(to + 3 * L, tl.sum(tl.where(i == L - 1, between, 0.0), axis=0))
    tl.store(to + 4 * L, tl.exp(tl.sum(g, axis=0)) + tl.zeros((L,), tl.float32))
    turned = tl.trans(by)
    to = (at * HV + head) * (L * L)
    _store_matrix(attend, to, _product(q, turned, FP32, FP32) * between * length_q[:, None], L,
                  FP32)
    system = _product(by, turned, FP32, FP32) * between * (beta * length_k)[:, None]
    system = tl.where(i > j, system, 0.0)
    _store_matrix(solved, to, _inverse(system, L), L, SPLIT)


@triton.jit(do_not_specialize_on_alignment=["sequences", "pieces"])
def _walk(qkv: tl.tensor, solved: tl.tensor, attend: tl.tensor, factors: tl.tensor,
          states: tl.tensor, sequences: tl.tensor, pieces: tl.tensor, out: tl.tensor,
          HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
          K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, FP32: tl.constexpr,
          SPLIT: tl.constexpr) -> None:
    """Columns of one head's state of one sequence, through all of its chunks."""
    head = tl.program_id(1)
    own = sequences + 3 * tl.program_id(2)
    place, k = tl.arange(0, L), tl.arange(0, K_BLOCK)
    v = tl.program_id(0) * V_BLOCK + tl.arange(0, V_BLOCK)
    live_k, live_v = k < K, v < V
    key = head // (HV // HK) * K
    channels: tl.constexpr = 2 * HK * K + HV * V
    inside = v[None, :] * K + k[:, None]
    kept = live_k[:, None] & live_v[None, :]
    row = tl.load(own + 2).to(tl.int64)
    state = tl.load(states + (row * HV + head) * (V * K) + inside, mask=kept, other=0)
    state = state.to(tl.float32)
    for number in range(tl.load(own), tl.load(own + 1)):
        piece = pieces + 4 * number
        first, count = tl.load(piece).to(tl.int64), tl.load(piece + 1)
        chunk = tl.load(piece + 2).to(tl.int64) * HV + head
        for at in range(0, count, L):
            live = at + place < count
            tokens = qkv + (first + at) * channels
            keys = tokens + (place[:, None] * channels + k[None, :])
            mask = live[:, None] & live_k[None, :]
            q = tl.load(keys + key, mask=mask, other=0)
            by = tl.load(keys + (key + HK * K), mask=mask, other=0)
            gone = _product(by, state, FP32, SPLIT)
            mask = live[:, None] & live_v[None, :]
            value = tl.load(tokens + (2 * HK * K + head * V) + (place[:, None] * channels
                                                                + v[None, :]),
                            mask=mask, other=0).to(tl.float32)
            factor = factors + chunk * (FACTORS * L) + place
            value -= gone * tl.load(factor + L)[:, None]
            value *= tl.load(factor)[:, None]
            value = _product_stored(solved, chunk * (L * L), value, value, L, SPLIT)
            done = _product(q, state, FP32, FP32) * tl.load(factor + 2 * L)[:, None]
            done = _product_stored(attend, chunk * (L * L), value, done, L, FP32)
            tl.store(out + ((first + at) * HV + head) * V + (place[:, None] * (HV * V)
                                                             + v[None, :]),
                     done.to(out.dtype.element_ty), mask=mask)
            value *= tl.load(factor + 3 * L)[:, None]
            state *= tl.load(factors + chunk * (FACTORS * L) + 4 * L)
            state += _product(tl.trans(by), value, FP32, SPLIT)
            chunk += HV
        save = tl.load(piece + 3).to(tl.int64)
        tl.store(states + (save * HV + head) * (V * K) + inside, state.to(states.dtype.element_ty),
                 mask=kept)


def delta_extend(p: Tensor, states: Tensor, columns: Tensor, plan: Ragged,
                 layer: DeltaLayer) -> Tensor:
    """See `TorchOps.delta_extend`; returns [T, HV, V] of p's dtype.

    Where p is bf16, what the convolution gives is rounded to it. Where the pool of states is fp32,
    what changes a state is split; where it is bf16, one product each is as exact as the pool.
    """
    dtype = p.dtype if p.dtype is torch.bfloat16 else torch.float32
    qkv = conv_tokens(p[:, :layer.heads.channels], columns, layer.conv, plan, dtype)
    return rule(qkv, p, states, plan, layer)


def rule(qkv: Tensor, p: Tensor, states: Tensor, plan: Ragged, layer: DeltaLayer) -> Tensor:
    """`delta_extend` behind the convolution. qkv: [T, channels], bf16 or f32."""
    heads, tokens = layer.heads, len(qkv)
    segments = segments_of(plan, CHUNK)
    chunks, fp32 = len(segments.chunks), qkv.dtype is torch.float32
    split = fp32 or states.dtype is torch.float32
    device, bf16 = qkv.device, torch.bfloat16
    solved = torch.empty((chunks, heads.values, 1 + split, CHUNK, CHUNK), dtype=bf16, device=device)
    attend = torch.empty((chunks, heads.values, 1 + fp32, CHUNK, CHUNK), dtype=bf16, device=device)
    factors = torch.empty((chunks, heads.values, FACTORS.value, CHUNK), device=device)
    out = torch.empty((tokens, heads.values, heads.value_dim), dtype=p.dtype, device=device)
    k_block = max(16, triton.next_power_of_2(heads.key_dim))
    limits = device_limits(device)
    capability = limits.capability
    # sm_100 has no registers left to load ahead: its tensor cores' sums pass through them.
    ahead = not fp32 and k_block <= 128 and limits.shared >= ROOM and capability <= 90
    values = VALUES // 2 if capability < 90 else VALUES
    sizes = {"HK": heads.keys, "HV": heads.values, "K": heads.key_dim, "V": heads.value_dim,
             "L": CHUNK, "K_BLOCK": k_block, "FP32": fp32, "SPLIT": split}
    _prepare[(chunks, heads.values)](
        qkv, p, p.stride(0), p.shape[1] - 2 * heads.values, layer.decay, layer.bias,
        segments.chunks, solved, attend, factors, heads.key_dim**-0.5, NORM_EPS, **sizes,
        num_warps=4)
    _walk[(triton.cdiv(heads.value_dim, values), heads.values, len(plan.counts))](
        qkv, solved, attend, factors, states, segments.sequences, segments.pieces, out, **sizes,
        V_BLOCK=values, num_warps=4, num_stages=1 + ahead)
    return out
