"""Decoders of one parametrised layer: `CausalLM` (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3,
Granite 3, and those of `dense_config` and `layer_norm_config`), whose models differ in biases,
norms, MLPs, the activation, and the window and rope of each layer; and `HybridLM` (Qwen3-Next,
Qwen3.5, Qwen2-MoE and Qwen3-MoE, Mixtral, Granite 3 MoE, GPT-OSS), which mixes recurrent and
attention layers, dense MLPs and experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import DeltaShape
from actorium.gpu.families.tensor_specs import POSITIONS
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer, Mlp
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense, gated_apart, layer_mlp, mixture_fused, ungated
from actorium.gpu.models.recurrent import delta_fused, gated_delta
from actorium.gpu.weights.loader import Fused

UNUSED = 2
"""Rows before the first position's in OPT's table."""


class CausalLM(Decoder):
    """Attention and a dense MLP in every layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        attend, mlp = f"{at}self_attn.", f"{at}mlp."
        qkv = {f"{attend}q_proj": s.q_size, f"{attend}k_proj": s.kv_size,
               f"{attend}v_proj": s.kv_size}
        halves = {f"{mlp}{name}_proj": s.intermediate for name in ("gate", "up")}
        rows, part = sum(qkv.values()), partial(_cut, qkv)
        fused = [Fused(f"{attend}qkv_proj.weight", (rows, s.hidden), part),
                 Fused(f"{mlp}gate_up_proj.weight", (sum(halves.values()), s.hidden),
                       partial(_cut, halves))]
        biases = Fused(f"{attend}qkv_proj.bias", (rows,), partial(part, kind="bias"))
        if s.gated:
            turned_halves = dict(reversed(halves.items()))
            return [*fused, Fused(f"{mlp}up_gate_proj.weight", (sum(halves.values()), s.hidden),
                                  partial(_cut, turned_halves)), biases,
                    Fused(f"{mlp}gate_up_proj.bias", (sum(halves.values()),),
                          partial(_cut, halves, kind="bias"))]
        by_head = partial(_cut_heads, attend, s)
        turned = {f"{attend}o_proj": (s.q_size, s.hidden), f"{mlp}up_proj": (s.hidden,
                  s.intermediate), f"{mlp}down_proj": (s.intermediate, s.hidden)}
        return [*fused, biases,
                Fused(f"{attend}qkv_by_head.weight", (rows, s.hidden), by_head),
                Fused(f"{attend}qkv_by_head.bias", (rows,), partial(by_head, kind="bias")),
                Fused(f"{attend}qkv_proj.weight_t", (s.hidden, rows), lambda own: part(own.t())),
                *(Fused(f"{name}.weight_t", shape, partial(_turned, name))
                  for name, shape in turned.items())]

    @classmethod
    def fused(cls, s: ModelShape) -> list[Fused]:
        padded = Fused("model.embed_positions.padded", (s.learned_positions + UNUSED, s.hidden),
                       lambda table: [(POSITIONS, table[UNUSED:])])
        return [*super().fused(s), padded]

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer = attention(w.under("self_attn."), s, i)
        inner = w.under("mlp.")
        if not s.gated:
            mlp: Mlp = ungated(inner, s)
        elif s.activation in ("silu", "gelu") and not s.down_bias:
            mlp = dense(inner, s.mlp_bias, s.activation)
        else:
            mlp = gated_apart(inner, s)
        norms = [w.norm_of(s, name, self.device) if name and (at or i or s.first_norm) else None
                 for at, name in enumerate(s.layer_norms)]
        return Layer(mixer, mlp, s.norm_eps, *norms, layer_norm=s.layer_norm, parallel=s.parallel,
                     post_norms=s.post_norms)



def _cut(rows: dict[str, int], stacked: Tensor, kind: str = "weight"
         ) -> Iterator[tuple[str, Tensor]]:
    """The weights (or biases) of projections that lie one behind the other, each with so many
    rows."""
    for name, part in zip(rows, stacked.split(tuple(rows.values())), strict=True):
        yield f"{name}.{kind}", part.contiguous()


def _cut_heads(at: str, s: ModelShape, stacked: Tensor, kind: str = "weight"
               ) -> Iterator[tuple[str, Tensor]]:
    """Those of queries, keys and values that lie together for each key head: its queries first."""
    shared = s.heads // s.kv_heads
    groups = stacked.view(s.kv_heads, shared + 2, s.head_dim, *stacked.shape[1:])
    for name, part in zip("qkv", groups.split((shared, 1, 1), 1), strict=True):
        yield f"{at}{name}_proj.{kind}", part.flatten(0, 2)


def _turned(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight that lies on its side."""
    yield f"{name}.weight", weight.t().contiguous()


class HybridLM(Decoder):
    """Attention or GatedDeltaNet, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        fused: list[Fused] = []
        if i in s.recurrent and isinstance(s.recurrence, DeltaShape):
            fused += delta_fused(f"{at}linear_attn.", s.recurrence, s.hidden)
        if s.has_experts(i) and s.experts:
            fused += mixture_fused(at, s.hidden, s.experts)
        return fused

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer: Mixer
        if i in s.recurrent and isinstance(s.recurrence, DeltaShape):
            mixer = gated_delta(w.under("linear_attn."), s.recurrence, s.norm_eps,
                                s.recurrent.index(i))
        else:
            mixer = attention(w.under("self_attn."), s, i)
        return Layer(mixer, layer_mlp(w, s, i), s.norm_eps,
                     *(w.norm(name) if name else None for name in s.layer_norms))
