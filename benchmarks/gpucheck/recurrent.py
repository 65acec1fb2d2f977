"""Cases: layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.ragged import ExtendRun as RaggedRun
from actorium.kernels.ragged import plan_ragged
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.ssd import SSDSizes, split_inputs
from actorium.kernels.reference.torch_ops import TorchOps

from . import shapes
from .case import BF16, Case, Named, Run, Setting, Truth, ready

FP32 = torch.float32


def deltas(s: Setting) -> Named:
    """GatedDeltaNet with a state in fp32: one token, a window of three with two accepted drafts
    waiting, a chunk of a prompt, and its convolution."""
    tokens = s.size(shapes.DELTA_TOKENS, 20)
    for keys, values in shapes.DELTA_HEADS:
        named = f"{keys}/{values} heads of 128"
        heads = Heads(s.size(keys, 2), s.size(values, values // 8), s.size(128, 32),
                      s.size(128, 32))
        for batch in shapes.DELTA_BATCHES:
            rows = min(batch, s.size(batch, 2))
            yield f"step, {batch} x {named}", partial(_step, s, heads, rows)
            yield f"window of 3, {batch} x {named}", partial(_window, s, heads, rows)
        for state, dtype in (("", FP32), (", bf16 state", BF16)):
            yield f"extend, {shapes.DELTA_TOKENS} x {named}{state}", partial(
                _extend, s, heads, tokens, dtype)
        yield f"convolution, {shapes.DELTA_TOKENS} x {named}", partial(_conv, s, heads, tokens)


def _layer(s: Setting, heads: Heads) -> DeltaLayer:
    return DeltaLayer(heads, s.randn(4, heads.channels, dtype=FP32),
                      s.randn(heads.values, dtype=FP32).abs(), s.randn(heads.values, dtype=FP32))


def _states(s: Setting, heads: Heads, batch: int) -> Tensor:
    return s.randn(batch, heads.values, heads.value_dim, heads.key_dim, dtype=FP32)


def _step(s: Setting, heads: Heads, batch: int) -> Case:
    layer, width = _layer(s, heads), heads.channels + 2 * heads.values
    states, kept = _states(s, heads, batch + 1), s.randn(batch + 1, 3, heads.channels)
    rows, p = s.arange(batch, torch.int64) + 1, s.randn(batch, width)

    def run(ops: TorchOps, states: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        return ops.delta_step(p, states, kept, rows, layer), states, kept

    return Case(lambda: run(s.ops, states, kept), _changing("fp32", run, states, kept),
                2 * states[1:].numel() * 4, peers=_fla(s, heads, batch, 1))


def _window(s: Setting, heads: Heads, batch: int) -> Case:
    layer, width = _layer(s, heads), heads.channels + 2 * heads.values
    states, kept = _states(s, heads, batch + 1), s.randn(batch + 1, 3, heads.channels)
    rows, pending = s.arange(batch, torch.int64) + 1, s.randn(batch + 1, 2, width)
    window = s.randn(3 * batch, width)
    accepted = torch.ones(batch, dtype=torch.int64, device=s.device)

    def run(ops: TorchOps, states: Tensor, kept: Tensor, pending: Tensor) -> tuple[Tensor, ...]:
        out = ops.delta_window(window, states, kept, pending, rows, accepted, layer)
        return out, states, kept, pending

    return Case(lambda: run(s.ops, states, kept, pending),
                _changing("fp32", run, states, kept, pending), 2 * states[1:].numel() * 4)


def _changing(dtype: str, run: Callable[..., Any], *tables: Tensor) -> Truth:
    return Truth("recurrent", dtype, lambda: run(TorchOps(), *(own.clone() for own in tables)))


def _conv(s: Setting, heads: Heads, tokens: int) -> Case:
    plan = plan_ragged([RaggedRun(1, tokens)], 4, s.device)
    x, layer = s.randn(tokens, heads.channels), _layer(s, heads)
    kept, peer = s.randn(2, 3, heads.channels) * 0, TorchOps()

    def run(ops: TorchOps, kept: Tensor) -> tuple[Tensor, Tensor]:
        return ops.conv_extend(x, kept, layer.conv, plan), kept

    return Case(lambda: run(s.ops, kept),
                _changing("fp32", run, kept)._replace(kernel="convolution"),
                tokens * heads.channels * (2 + 4),
                peers={"torch": ready(lambda: peer.conv_extend(x, kept, layer.conv, plan))})


def _extend(s: Setting, heads: Heads, tokens: int, dtype: torch.dtype) -> Case:
    """Includes the convolution and the gates, which the peer is given. Operations: those of the
    products the rule needs, each counted once, however it is computed."""
    plan, layer = plan_ragged([RaggedRun(1, tokens)], 4, s.device), _layer(s, heads)
    p, kept = s.randn(tokens, heads.channels + 2 * heads.values), s.randn(2, 3, heads.channels)
    states = (_states(s, heads, 2) * 0).to(dtype)
    flops = tokens * heads.values * 2 * (64 * 2 * heads.key_dim + 64 * 2 * heads.value_dim
                                         + 3 * heads.key_dim * heads.value_dim)

    def run(ops: TorchOps, states: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        return ops.delta_extend(p, states, kept, plan, layer), states, kept

    return Case(lambda: run(s.ops, states, kept),
                _changing("fp32" if dtype is FP32 else "bf16", run, states, kept), flops=flops,
                peers=_fla(s, heads, 1, tokens))


def _fla(s: Setting, heads: Heads, batch: int, tokens: int) -> dict[str, Callable[[], Run]]:
    """flash-linear-attention's rule alone, without the convolution that a step of ours holds."""
    if s.toy or not find_spec("fla"):
        return {}
    name = "fla, no convolution" if tokens == 1 else "fla"
    return {name: partial(_flas, s, heads, batch, tokens)}


def _flas(s: Setting, heads: Heads, batch: int, tokens: int) -> Run:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    n = heads.values
    k = F.normalize(s.randn(batch, tokens, n, heads.key_dim, dtype=FP32), dim=-1).to(BF16)
    given = {"q": s.randn(batch, tokens, n, heads.key_dim), "k": k,
             "v": s.randn(batch, tokens, n, heads.value_dim),
             "g": -s.randn(batch, tokens, n, dtype=FP32).sigmoid(),
             "beta": s.randn(batch, tokens, n).sigmoid(),
             "initial_state": s.randn(batch, n, heads.key_dim, heads.value_dim, dtype=FP32)}
    rule = fused_recurrent_gated_delta_rule if tokens == 1 else chunk_gated_delta_rule
    return lambda: rule(**given, output_final_state=True)


def mambas(s: Setting) -> Named:
    """A token of Mamba-2, at Granite-4 Small's sizes, the state in fp32."""
    for batch in shapes.MAMBA_BATCHES:
        yield f"{batch} x 128 heads", partial(_mamba, s, min(batch, s.size(batch, 2)))


def _mamba(s: Setting, batch: int) -> Case:
    sizes = SSDSizes(s.size(128, 4), 1, s.size(64, 8), s.size(128, 16))
    states = s.randn(batch + 1, sizes.heads, sizes.head_dim, sizes.state_dim, dtype=FP32)
    rows, dt = s.arange(batch, torch.int64) + 1, s.randn(batch, sizes.heads, dtype=FP32).abs()
    inputs = split_inputs(s.randn(batch, sizes.channels, dtype=FP32), dt, sizes)
    decay, skip = -torch.ones_like(dt[0]), torch.ones_like(dt[0])

    def run(ops: TorchOps, states: Tensor) -> tuple[Tensor, ...]:
        return ops.ssd_step(inputs, states, rows, decay, skip), states

    return Case(lambda: run(s.ops, states), _changing("fp32", run, states),
                2 * states[1:].numel() * 4,
                peers={"torch": ready(lambda: run(TorchOps(), states))})
