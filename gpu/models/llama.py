"""One parametrised decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ in biases, norms, the
activation and the window of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.batch import ForwardBatch
from actorium.gpu.loader import Want
from actorium.gpu.models.plan import AttentionPlan, plan_attention
from actorium.gpu.models.rotary import frequencies
from actorium.gpu.pools import PagePool
from actorium.gpu.shape import ModelShape
from actorium.gpu.states import Recurrent
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.ops import TorchOps, select_ops
from actorium.kernels.rope import rope_rows, rope_table

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def wanted_tensors(shape: ModelShape) -> list[Want]:
    """Names and shapes of every tensor the model reads from a checkpoint."""
    s = shape
    wants = [Want(EMBED, (s.vocab_size, s.hidden)), Want(NORM, (s.hidden,))]
    if not s.tied:
        wants.append(Want(HEAD, (s.vocab_size, s.hidden)))
    for i in range(s.layers):
        at = f"model.layers.{i}."
        wants += [Want(f"{at}{name}", size) for name, size in _layer_tensors(s)]
    return wants


def _layer_tensors(s: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    linears = [
        ("self_attn.q_proj", s.q_size, s.hidden, s.qkv_bias),
        ("self_attn.k_proj", s.kv_size, s.hidden, s.qkv_bias),
        ("self_attn.v_proj", s.kv_size, s.hidden, s.qkv_bias),
        ("self_attn.o_proj", s.hidden, s.q_size, s.o_bias),
        ("mlp.gate_proj", s.intermediate, s.hidden, s.mlp_bias),
        ("mlp.up_proj", s.intermediate, s.hidden, s.mlp_bias),
        ("mlp.down_proj", s.hidden, s.intermediate, s.mlp_bias),
    ]
    out: list[tuple[str, tuple[int, ...]]] = []
    for name, rows, columns, bias in linears:
        out.append((f"{name}.weight", (rows, columns)))
        if bias:
            out.append((f"{name}.bias", (rows,)))
    out += [(f"{name}.weight", (s.hidden,)) for name in _norms(s) if name]
    if s.qk_norm:
        out += [(f"self_attn.{name}_norm.weight", (s.head_dim,)) for name in ("q", "k")]
    return out


def _norms(s: ModelShape) -> tuple[str, str, str, str]:
    """Names of the norms before attention, after it, before the MLP, after it; "" where none."""
    if s.sandwich_norms:
        return ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm")
    return "input_layernorm", "", "post_attention_layernorm", ""


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer; q, k and v are one matrix, and so are gate and up."""

    qkv: Linear
    o: Linear
    gate_up: Gated
    down: Linear
    attention_norm: Tensor
    attended_norm: Tensor | None
    """Of what attention gives, before it is added."""
    mlp_norm: Tensor
    mlp_done_norm: Tensor | None
    """Of what the MLP gives."""
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the weight of every query and key head."""
    group: int
    """Its place in `ModelShape.groups`."""
    place: int
    """Its place in the group."""
    rope: int
    """Its place in `ModelShape.ropes`."""


class CausalLM:
    """A decoder with its weights on one device."""

    def __init__(
        self, shape: ModelShape, tensors: dict[str, Tensor], device: torch.device,
        native: bool = True,
    ) -> None:
        """tensors: as `wanted_tensors` names them; they are taken out of the dict.
        native: C kernels where they can be had, on as many threads as torch has now."""
        self.shape, self.device = shape, device
        self.scale = shape.attention_scale
        self.embed_scale = float(torch.tensor(shape.embed_scale).to(shape.dtype))
        self.ops = select_ops(shape.dtype, device, shape.head_dim, native)
        self.groups = shape.groups
        places = {i: (g, place) for g, group in enumerate(self.groups)
                  for place, i in enumerate(group.layers)}
        self.layers = [_layer(shape, tensors, i, self.ops, places[i]) for i in range(shape.layers)]
        self.embed = tensors.pop(EMBED)
        self.norm = _folded(shape, tensors.pop(NORM))
        self.head = self.ops.linear(self.embed if shape.tied else tensors.pop(HEAD))
        self.ropes = [
            rope_table(*frequencies(rope, shape.head_dim), shape.max_model_len, shape.dtype)
            .to(device) for rope in shape.ropes]

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[PagePool],
                recurrent: Recurrent | None = None) -> Tensor:
        """Run a step: each layer writes the step's keys and values at its group's `kv_index`, then
        attends. batches and pools: of each group. recurrent: None, there are no such layers.

        Returns [R, hidden], the rows `logit_rows` (in that order) before the final norm.
        """
        batch = batches[0]
        hidden = self.embed.index_select(0, batch.tokens)
        if self.embed_scale != 1:
            hidden = hidden * self.embed_scale
        ropes = [rope_rows(table, batch.positions) for table in self.ropes]
        plans = [plan_attention(own, pool.page_size, group.window, self.scale, self.ops)
                 for own, pool, group in zip(batches, pools, self.groups, strict=True)]
        for i, layer in enumerate(self.layers):
            g, rows = layer.group, batch.logit_rows if i == len(self.layers) - 1 else None
            hidden = self._layer(layer, hidden, ropes[layer.rope], batches[g].kv_index,
                                 pools[g].layers[layer.place], plans[g], rows)
        return hidden

    def _layer(
        self, layer: Layer, hidden: Tensor, rope: Tensor, kv_index: Tensor, pages: Tensor,
        plan: AttentionPlan, rows: Tensor | None,
    ) -> Tensor:
        """hidden: [T, hidden] -> the same; with `rows`, only those rows, after attention."""
        s, ops = self.shape, self.ops
        x = ops.rms_norm(hidden, layer.attention_norm, s.norm_eps)
        qkv = layer.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        ops.rotate_write(qkv, s.heads, layer.qk_norm, s.norm_eps, rope, pages, kv_index)
        q = qkv[:, :s.heads]
        if rows is None:
            out = plan.attend(q, pages)
        else:
            out, hidden = plan.attend_rows(q, pages, rows), hidden.index_select(0, rows)
        hidden = self._add(hidden, layer.o, out.reshape(-1, s.q_size), layer.attended_norm)
        x = ops.rms_norm(hidden, layer.mlp_norm, s.norm_eps)
        return self._add(hidden, layer.down, layer.gate_up(x), layer.mlp_done_norm)

    def _add(self, hidden: Tensor, linear: Linear, x: Tensor, norm: Tensor | None) -> Tensor:
        """hidden + linear(x), which is normed first where there is a norm."""
        if norm is None:
            return linear.add(x, hidden)
        return hidden + self.ops.rms_norm(linear(x), norm, self.shape.norm_eps)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Final norm and head. rows: [R, hidden] -> f32[R, vocab]."""
        return self.head.wide(self.ops.rms_norm(rows, self.norm, self.shape.norm_eps))


def _layer(s: ModelShape, tensors: dict[str, Tensor], i: int, ops: TorchOps,
           place: tuple[int, int]) -> Layer:
    at = f"model.layers.{i}."

    def take(*names: str) -> Tensor:
        parts = [tensors.pop(at + name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def both(bias: bool, *names: str) -> tuple[Tensor, Tensor | None]:
        weight = take(*(f"{name}.weight" for name in names))
        return weight, take(*(f"{name}.bias" for name in names)) if bias else None

    def linear(bias: bool, *names: str) -> Linear:
        return ops.linear(*both(bias, *names))

    def norm(name: str) -> Tensor | None:
        return _folded(s, take(f"{name}.weight")) if name else None

    before, attended, between, done = (norm(name) for name in _norms(s))
    assert before is not None and between is not None
    qk_norm = None
    if s.qk_norm:
        q, k = (_folded(s, take(f"self_attn.{name}_norm.weight")) for name in ("q", "k"))
        qk_norm = torch.cat((q.expand(s.heads, -1), k.expand(s.kv_heads, -1)))
    return Layer(
        qkv=linear(s.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=linear(s.o_bias, "self_attn.o_proj"),
        gate_up=ops.gated(*both(s.mlp_bias, "mlp.gate_proj", "mlp.up_proj"), s.activation),
        down=linear(s.mlp_bias, "mlp.down_proj"),
        attention_norm=before,
        attended_norm=attended,
        mlp_norm=between,
        mlp_done_norm=done,
        qk_norm=qk_norm,
        group=place[0],
        place=place[1],
        rope=len(s.ropes) - 1 if s.windows[i] else 0,
    )


def _folded(s: ModelShape, weight: Tensor) -> Tensor:
    """A norm's weight, with the 1 that some models add to it at every use."""
    return (weight.float() + 1).to(weight.dtype) if s.norm_plus_one else weight
