"""See `kernels.gated_delta`: the states of an extend step through their chunks, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gated_delta import Heads, Parts, through_chunks
from ..ragged import CHUNK, Ragged, chain_of

VALUES = 32
"""Columns of a transposed state in a program: 128 x 32 fp32 are 32 registers of a thread of four
warps, and a sequence of 32 heads makes 128 programs."""


@triton.jit(do_not_specialize=["size", "most"], do_not_specialize_on_alignment=["rows"])
def _through(read: tl.tensor, fresh: tl.tensor, fresh_b: tl.tensor, fresh_l: tl.tensor,
             fresh_v: tl.tensor, attend: tl.tensor, write: tl.tensor, decay: tl.tensor,
             states: tl.tensor, rows: tl.tensor, chain: tl.tensor, out: tl.tensor, size: tl.tensor,
             most: tl.tensor, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
             L: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr) -> None:
    """The state is held transposed: what is added to it is then a product of two operands that
    were not made by products of their own, of which one would have to be turned."""
    at = tl.program_id(0)
    head = tl.program_id(1)
    v = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    k = tl.arange(0, K_BLOCK)
    token = tl.arange(0, L)
    live_k, live_v, live = k < K, v < V, token < size
    inside = k[:, None] * 1 + v[None, :] * K + head * (V * K)
    kept = live_k[:, None] & live_v[None, :]
    keys = live[:, None] & live_k[None, :]
    values = live[:, None] & live_v[None, :]
    row = tl.load(rows + at).to(tl.int64)
    state = tl.load(states + row * (HV * V * K) + inside, mask=kept, other=0).to(tl.float32)
    own = chain + at * (1 + 2 * most)
    for number in range(tl.load(own)):
        chunk = tl.load(own + 1 + 2 * number).to(tl.int64) * HV + head
        save = tl.load(own + 2 + 2 * number).to(tl.int64)
        from_keys = read + chunk * (2 * size * K) + token[:, None] * K + k[None, :]
        old = tl.load(from_keys, mask=keys, other=0)
        new = tl.load(fresh + chunk * fresh_b + token[:, None] * fresh_l + v[None, :] * fresh_v,
                      mask=values, other=0) - tl.dot(old, state, input_precision="tf32x3")
        queries = tl.load(from_keys + size * K, mask=keys, other=0)
        weights = tl.load(attend + chunk * (size * size) + token[:, None] * size + token[None, :],
                          mask=live[:, None] & live[None, :], other=0)
        done = tl.dot(queries, state, input_precision="tf32x3")
        done = tl.dot(weights, new, done, input_precision="tf32x3")
        tl.store(out + chunk * (size * V) + token[:, None] * V + v[None, :], done, mask=values)
        turned = tl.load(write + chunk * (size * K) + token[None, :] * K + k[:, None],
                         mask=live[None, :] & live_k[:, None], other=0)
        state = state * tl.load(decay + chunk)
        state = tl.dot(turned, new, state, input_precision="tf32x3")
        if save >= 0:
            tl.store(states + save * (HV * V * K) + inside,
                     state.to(states.dtype.element_ty), mask=kept)
    tl.store(states + row * (HV * V * K) + inside, state.to(states.dtype.element_ty), mask=kept)


def through(parts: Parts, states: Tensor, plan: Ragged, heads: Heads) -> Tensor:
    """See `gated_delta.through_chunks`."""
    chain = chain_of(plan)
    if chain is None or plan.size > CHUNK:
        return through_chunks(parts, states, plan, heads)
    fresh = parts.fresh
    out = torch.empty(fresh.shape, device=fresh.device)
    _through[(len(chain), heads.values, triton.cdiv(heads.value_dim, VALUES))](
        parts.read.contiguous(), fresh, *fresh.stride(), parts.attend.contiguous(),
        parts.write.contiguous(), parts.decay.contiguous(), states, plan.by_length, chain, out,
        plan.size, len(plan.waves), HV=heads.values, K=heads.key_dim, V=heads.value_dim, L=CHUNK,
        K_BLOCK=max(16, triton.next_power_of_2(heads.key_dim)), V_BLOCK=VALUES, num_warps=4,
        num_stages=2)
    return out
