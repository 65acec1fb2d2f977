"""Cases of `gpu_kernels`: layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from gpu_case import BF16, Case, Run, Setting
from torch import Tensor

from actorium.kernels.delta_window import Delta
from actorium.kernels.gated_delta import Heads
from actorium.kernels.mamba2 import Sizes, split_inputs
from actorium.kernels.ops import TorchOps
from actorium.kernels.ragged import Run as RaggedRun
from actorium.kernels.ragged import plan_ragged


def deltas(s: Setting) -> Iterator[Case]:
    """One token, a window of three with two accepted drafts waiting, a chunk of a prompt."""
    for keys, values in [(2, 2)] if s.toy else [(16, 16), (16, 32)]:
        heads = Heads(keys, values, s.size(128, 32), s.size(128, 32))
        for batch in (2,) if s.toy else (1, 32, 256):
            yield from _delta_steps(s, heads, batch)
        yield _conv_extend(s, heads, s.size(4096, 40))
        yield from _delta_extend(s, heads, s.size(4096, 40))


def _layer(s: Setting, heads: Heads) -> Delta:
    fp32 = torch.float32
    return Delta(heads, s.randn(4, heads.channels, dtype=fp32),
                 s.randn(heads.values, dtype=fp32).abs(), s.randn(heads.values, dtype=fp32))


def _delta_steps(s: Setting, heads: Heads, batch: int) -> Iterator[Case]:
    layer, width = _layer(s, heads), heads.channels + 2 * heads.values
    states = s.randn(batch + 1, heads.values, heads.value_dim, heads.key_dim, dtype=torch.float32)
    kept, rows = s.randn(batch + 1, 3, heads.channels), s.arange(batch, torch.int64) + 1
    p, moved = s.randn(batch, width), 2 * states[1:].numel() * 4
    named = f"{batch} x {heads.keys}/{heads.values} heads of {heads.key_dim}, fp32 state"
    yield Case("delta step", named, lambda: s.ops.delta_step(p, states, kept, rows, layer), moved,
               peers=_fla_step(s, heads, batch))
    pending, window = s.randn(batch + 1, 2, width), s.randn(3 * batch, width)
    accepted = torch.ones(batch, dtype=torch.int64, device=s.device)
    yield Case("delta window", f"{named}, q 3", lambda: s.ops.delta_window(
        window, states, kept, pending, rows, accepted, layer), moved)


def mambas(s: Setting) -> Iterator[Case]:
    """A token of Mamba-2, at Granite-4 Small's sizes."""
    sizes = Sizes(s.size(128, 4), 1, s.size(64, 8), s.size(128, 16))
    fp32, reference = torch.float32, TorchOps()
    for batch in (2,) if s.toy else (1, 32, 256):
        states = s.randn(batch + 1, sizes.heads, sizes.head_dim, sizes.state_dim, dtype=fp32)
        rows, dt = s.arange(batch, torch.int64) + 1, s.randn(batch, sizes.heads, dtype=fp32).abs()
        inputs = split_inputs(s.randn(batch, sizes.channels, dtype=fp32), dt, sizes)
        given = inputs, states, rows, -torch.ones_like(dt[0]), torch.ones_like(dt[0])
        yield Case("mamba-2 step", f"{batch} x {sizes.heads} heads, fp32 state",
                   partial(s.ops.ssd_step, *given),
                   2 * states[1:].numel() * 4,
                   peers={"torch": partial(reference.ssd_step, *given)})


def _conv_extend(s: Setting, heads: Heads, tokens: int) -> Case:
    plan = plan_ragged([RaggedRun(1, tokens)], 4, s.device)
    x, layer = s.randn(tokens, heads.channels), _layer(s, heads)
    kept = s.randn(2, 3, heads.channels) * 0
    peer = TorchOps()
    return Case("conv extend", f"{tokens} tokens, {heads.channels} channels",
                lambda: s.ops.conv_extend(x, kept, layer.conv, plan),
                tokens * heads.channels * (2 + 4),
                peers={"torch": lambda: peer.conv_extend(x, kept, layer.conv, plan)})


def _delta_extend(s: Setting, heads: Heads, tokens: int) -> Iterator[Case]:
    """With the convolution and the gates, which the peer is given. Operations: of the products that
    the rule needs, each counted once, whatever it takes to make it."""
    plan, layer = plan_ragged([RaggedRun(1, tokens)], 4, s.device), _layer(s, heads)
    p, kept = s.randn(tokens, heads.channels + 2 * heads.values), s.randn(2, 3, heads.channels)
    flops = tokens * heads.values * 2 * (64 * 2 * heads.key_dim + 64 * 2 * heads.value_dim
                                         + 3 * heads.key_dim * heads.value_dim)
    for dtype in (torch.float32, BF16):
        states = s.randn(2, heads.values, heads.value_dim, heads.key_dim, dtype=torch.float32)
        states = states.zero_().to(dtype)
        yield Case("delta extend", f"{tokens} tokens, {heads.keys}/{heads.values} heads, "
                   f"{str(dtype)[6:]} state",
                   partial(s.ops.delta_extend, p, states, kept, plan, layer), flops=flops,
                   peers=_fla_extend(s, heads, tokens))


def _fla_inputs(s: Setting, heads: Heads, batch: int, tokens: int) -> dict[str, Tensor]:
    n, fp32 = heads.values, torch.float32
    k = F.normalize(s.randn(batch, tokens, n, heads.key_dim, dtype=fp32), dim=-1).to(BF16)
    return {"q": s.randn(batch, tokens, n, heads.key_dim), "k": k,
            "v": s.randn(batch, tokens, n, heads.value_dim),
            "g": -s.randn(batch, tokens, n, dtype=fp32).sigmoid(),
            "beta": s.randn(batch, tokens, n).sigmoid(),
            "initial_state": s.randn(batch, n, heads.key_dim, heads.value_dim, dtype=fp32)}


def _fla_step(s: Setting, heads: Heads, batch: int) -> dict[str, Run]:
    if s.toy or not find_spec("fla"):
        return {}
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as rule

    given = _fla_inputs(s, heads, batch, 1)
    return {"fla": lambda: rule(**given, output_final_state=True)}


def _fla_extend(s: Setting, heads: Heads, tokens: int) -> dict[str, Run]:
    if s.toy or not find_spec("fla"):
        return {}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    given = _fla_inputs(s, heads, 1, tokens)
    return {"fla": lambda: rule(**given, output_final_state=True)}
