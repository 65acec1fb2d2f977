"""One parametrised decoder: Llama, Mistral, Qwen2 and Qwen3 differ in biases and norms alone."""

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
from actorium.kernels.linear import Linear
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
    out += [(f"{name}_layernorm.weight", (s.hidden,)) for name in ("input", "post_attention")]
    if s.qk_norm:
        out += [(f"self_attn.{name}_norm.weight", (s.head_dim,)) for name in ("q", "k")]
    return out


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer; q, k and v are one matrix, and so are gate and up."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the weight of every query and key head."""
    group: int
    """Its place in `ModelShape.groups`."""
    place: int
    """Its place in the group."""


class CausalLM:
    """A decoder with its weights on one device."""

    def __init__(
        self, shape: ModelShape, tensors: dict[str, Tensor], device: torch.device,
        native: bool = True,
    ) -> None:
        """tensors: as `wanted_tensors` names them; they are taken out of the dict.
        native: C kernels where they can be had, on as many threads as torch has now."""
        self.shape, self.device = shape, device
        self.scale = shape.head_dim**-0.5
        self.ops = select_ops(shape.dtype, device, shape.head_dim, native)
        self.groups = shape.groups
        places = {i: (g, place) for g, group in enumerate(self.groups)
                  for place, i in enumerate(group.layers)}
        self.layers = [_layer(shape, tensors, i, self.ops, places[i]) for i in range(shape.layers)]
        self.embed = tensors.pop(EMBED)
        self.norm = tensors.pop(NORM)
        self.head = self.ops.linear(self.embed if shape.tied else tensors.pop(HEAD))
        inv_freq, scale = frequencies(shape)
        self.rope = rope_table(inv_freq, scale, shape.max_model_len, shape.dtype).to(device)

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[PagePool]) -> Tensor:
        """Run a step: each layer writes the step's keys and values at its group's `kv_index`, then
        attends. batches and pools: of each group.

        Returns [R, hidden], the rows `logit_rows` (in that order) before the final norm.
        """
        batch = batches[0]
        hidden = self.embed.index_select(0, batch.tokens)
        rope = rope_rows(self.rope, batch.positions)
        plans = [plan_attention(own, pool.page_size, group.window, self.scale, self.ops)
                 for own, pool, group in zip(batches, pools, self.groups, strict=True)]
        for i, layer in enumerate(self.layers):
            g, rows = layer.group, batch.logit_rows if i == len(self.layers) - 1 else None
            hidden = self._layer(layer, hidden, rope, batches[g].kv_index,
                                 pools[g].layers[layer.place], plans[g], rows)
        return hidden

    def _layer(
        self, layer: Layer, hidden: Tensor, rope: Tensor, kv_index: Tensor, pages: Tensor,
        plan: AttentionPlan, rows: Tensor | None,
    ) -> Tensor:
        """hidden: [T, hidden] -> the same; with `rows`, only those rows, after attention."""
        s, ops = self.shape, self.ops
        x = ops.rms_norm(hidden, layer.input_norm, s.norm_eps)
        qkv = layer.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        ops.rotate_write(qkv, s.heads, layer.qk_norm, s.norm_eps, rope, pages, kv_index)
        q = qkv[:, :s.heads]
        if rows is None:
            out = plan.attend(q, pages)
        else:
            out, hidden = plan.attend_rows(q, pages, rows), hidden.index_select(0, rows)
        hidden = layer.o.add(out.reshape(-1, s.q_size), hidden)
        x = ops.rms_norm(hidden, layer.post_norm, s.norm_eps)
        return layer.down.add(ops.silu_mul(layer.gate_up(x)), hidden)

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

    def linear(bias: bool, *names: str) -> Linear:
        weight = take(*(f"{name}.weight" for name in names))
        return ops.linear(weight, take(*(f"{name}.bias" for name in names)) if bias else None)

    qk_norm = None
    if s.qk_norm:
        q, k = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        qk_norm = torch.cat((q.expand(s.heads, -1), k.expand(s.kv_heads, -1)))
    return Layer(
        qkv=linear(s.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=linear(s.o_bias, "self_attn.o_proj"),
        gate_up=linear(s.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(s.mlp_bias, "mlp.down_proj"),
        input_norm=take("input_layernorm.weight"),
        post_norm=take("post_attention_layernorm.weight"),
        qk_norm=qk_norm,
        group=place[0],
        place=place[1],
    )
