"""The tensors that a model reads from its checkpoint, by name: the loader reads these, and the
memory plan counts them. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from actorium.gpu.families.fp8_config import BLOCK
from actorium.gpu.families.layer_shapes import GATED, ExpertShape, LatentShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import (
    ConvShape,
    DeltaShape,
    KdaShape,
    MambaShape,
    ScanShape,
)
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.families.weight_formats import ONLINE, GroupedShape, WeightFormat

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm", "lm_head.weight"
EMBED_NORM = "model.embed_norm"
POSITIONS = "model.embed_positions.weight"
"""The table of learned positions."""
TYPES = "model.embed_token_types.weight"
"""The table of token types."""
DISTANCES = "model.distances.weight"
"""What heads add to scores by distance, which all layers share."""
TOKEN_TABLE, TOKEN_PROJECTION, TOKEN_NORM = (
    "model.embed_tokens_per_layer", "model.per_layer_model_projection",
    "model.per_layer_projection_norm")
"""What makes the inputs that tokens give every layer by themselves; see `TokenInputs`."""
SPREAD, MERGE = "model.altup_projections.", "model.altup_unembed_projections."
"""What makes streams of hidden states of embeddings, and one of them again; see `AltUpShape`."""
EMBED_AND_HEAD = (EMBED, HEAD)
OUTER = (*EMBED_AND_HEAD, f"{TOKEN_TABLE}.weight")
"""The tensors that are not a projection's and can be held in 4 to 8 bits."""
ATTENTION = "self_attn."
"""What the names of an attention's tensors begin with, in a layer of any family."""
INDEXER = "indexer."
"""What those of an attention's indexer begin with there."""
SINKS = "sinks"
"""What checkpoints call a layer's attention sinks."""
TOWER = "visual."
"""Prefix of the names of a vision tower's tensors, in checkpoints of text and images."""
NORMS = ("input_layernorm", "post_attention_layernorm")
"""Of a layer, before its mixer and before its MLP, as most families name them."""


class Projection(NamedTuple):
    """How a projection's weight is served. Nothing but whole rows of it is taken apart, so that it
    can be in FP8; which scales it then keeps depends on where its rows go."""

    stack: str
    """Projections of a module that have the same name here are one product."""
    mixed: bool = False
    """Those of the stack that are in FP8 are served beside others; else all are in FP8, or none."""
    scattered: bool = False
    """Its rows lie in another order than in the checkpoint, across blocks that share a scale."""
    gated_head: int = 0
    """Where its rows are those of two products, in turn so many of each: queries and their gate."""


class TensorSpec(NamedTuple):
    """A tensor that the model needs, as the checkpoint has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    """Kept in this one; "" = the model's."""
    projection: Projection | None = None
    """None: not the weight of a projection that can be served in FP8."""
    segments: tuple[int, ...] = ()
    """Rows of parts, one after the other, each of which GPUs share out on its own; (): of one."""

    @property
    def module(self) -> str:
        """The name of what it is the weight of."""
        return self.name.removesuffix(".weight")

    @property
    def size(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)


def stacks(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """The weights of projections, those together that are one product where they can be."""
    by_name: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in specs:
        if spec.projection is not None:
            at = spec.module.rpartition(".")[0]
            by_name.setdefault((at, spec.projection.stack), []).append(spec)
    return list(by_name.values())


def held_format(grouped: GroupedShape | None, spec: TensorSpec) -> WeightFormat | None:
    """In how many bits this tensor is held; None: in its dtype.

    Those of projections, and of OUTER where they are named; what is in a file in a format that no
    kernel takes is dequantised, and what is made takes the next smaller group.
    """
    outer = spec.name in OUTER
    if grouped is None or not (grouped.names(spec.module) if outer else spec.projection):
        return None
    form, columns = grouped.format(spec.module), spec.shape[1]
    if form is None or grouped.source == ONLINE:
        return form and form.fitting(columns)
    return form if form.takes(columns) else None


class MtpNames(NamedTuple):
    """Where checkpoints have the layer that drafts (multi-token prediction), the first of
    several."""

    layer: str
    """What the names of its decoder layer's tensors begin with."""
    join: str
    """The projection of token and hidden together."""
    token_norm: str
    hidden_norm: str
    norm: str
    """Of what the layer gives."""


def layer_prefix(i: int) -> str:
    """What the names of the i-th layer's tensors begin with."""
    return f"model.layers.{i}."


def embedding_and_head_tensors(s: ModelShape) -> list[TensorSpec]:
    """Embeddings, final norm and head."""
    specs = [TensorSpec(EMBED, (s.vocab_size, s.hidden))]
    if s.final_norm:
        specs += norm_tensors("", s, (FINAL_NORM,))
    if s.embed_norm:
        specs += norm_tensors("", s, (EMBED_NORM,))
    if s.learned_positions:
        specs.append(TensorSpec(POSITIONS, (s.learned_positions, s.hidden)))
    if s.token_types:
        specs.append(TensorSpec(TYPES, (s.token_types, s.hidden)))
    if s.distance_buckets:
        specs.append(TensorSpec(DISTANCES, (s.distance_buckets, s.heads)))
    if (given := s.token_inputs) is not None:
        specs += [TensorSpec(f"{TOKEN_TABLE}.weight", (given.vocab, s.token_width)),
                  *linear_tensors(TOKEN_PROJECTION, s.token_width, s.hidden),
                  TensorSpec(f"{TOKEN_NORM}.weight", (given.size,))]
    if s.altup is not None:
        specs += [spec for at in (SPREAD, MERGE) for i in range(s.altup.streams - 1)
                  for spec in linear_tensors(f"{at}{i}", s.hidden, s.hidden)]
    if s.head_bias:
        specs.append(TensorSpec("lm_head.bias", (s.vocab_size,)))
    if s.tied or s.bidirectional:
        return specs
    return [*specs, TensorSpec(HEAD, (s.vocab_size, s.hidden))]


def score_tensors(s: ModelShape) -> list[TensorSpec]:
    """What makes scores of pooled rows, which every GPU has whole, in float32."""
    return [TensorSpec(f"{own.name}.{part}", shape, "float32")
            for layer in (s.pooling.head if s.pooling else ())
            for own in (layer, layer.norm) if own is not None
            for part, shape in own.tensors]


def norm_tensors(at: str, s: ModelShape, names: Sequence[str] = NORMS) -> list[TensorSpec]:
    """Norms of a layer's input or output; `at` begins their names."""
    return [TensorSpec(f"{at}{name}.{part}", (s.hidden,)) for name in names
            for part in s.norm_parts]


def mtp_tensors(names: MtpNames, s: ModelShape) -> list[TensorSpec]:
    """What the layer that drafts has beside a decoder layer's tensors."""
    return [TensorSpec(f"{names.join}.weight", (s.hidden, -(-2 * s.hidden // s.tp))),
            *(TensorSpec(f"{name}.weight", (s.hidden,)) for name in names[2:])]


def linear_tensors(name: str, rows: int, columns: int, bias: bool = False,
                   projection: Projection | None = None,
                   segments: tuple[int, ...] = ()) -> list[TensorSpec]:
    """The tensors of one projection; by default a product of its own."""
    own = projection or Projection(name.rpartition(".")[2])
    weight = TensorSpec(f"{name}.weight", (rows, columns), projection=own, segments=segments)
    return [weight, TensorSpec(f"{name}.bias", (rows,), segments=segments)] if bias else [weight]


# --- attention -----------------------------------------------------------------------------------

def attention_tensors(at: str, s: ModelShape) -> list[TensorSpec]:
    """Attention over keys and values."""
    gated = s.head_dim if s.output_gate else 0
    # The rotated pairs are brought half a head apart.
    moved = (s.interleaved or s.rotary_dim not in (0, s.head_dim)) and BLOCK % s.head_dim > 0
    qkv = Projection("qkv", scattered=moved or gated % BLOCK > 0)
    specs = [
        *linear_tensors(f"{at}q_proj", s.q_size * (2 if gated else 1), s.hidden, s.qkv_bias,
                        qkv._replace(gated_head=gated)),
        *linear_tensors(f"{at}k_proj", s.kv_size, s.hidden, s.qkv_bias, qkv),
        *linear_tensors(f"{at}v_proj", s.kv_size, s.hidden, s.qkv_bias, qkv),
        *linear_tensors(f"{at}o_proj", s.hidden, s.q_size, s.o_bias),
    ]
    if s.whole_qk_norm:
        specs += [TensorSpec(f"{at}q_norm.weight", (s.q_size,)),
                  TensorSpec(f"{at}k_norm.weight", (s.kv_size,))]
    if s.sinks:
        specs.append(TensorSpec(f"{at}{SINKS}", (s.heads,), "float32"))
    if s.qk_norms:
        specs += [TensorSpec(f"{at}{name}_norm.norms.{i}.weight", (s.head_dim,))
                  for name, heads in zip("qk", s.qk_norms, strict=True) for i in range(heads)]
    elif s.qk_norm:
        parts = ("weight", "bias") if s.qk_norm_bias else ("weight",)
        specs += [TensorSpec(f"{at}{name}.{part}",
                             (heads, s.head_dim) if s.qk_norm_by_head else (s.head_dim,))
                  for name, heads in zip(s.head_norms, (s.heads, s.kv_heads), strict=True)
                  for part in parts if name]
    return specs


def latent_tensors(at: str, s: ModelShape, m: LatentShape) -> list[TensorSpec]:
    """Attention over latents."""
    queries, down = s.heads * m.query, Projection("down", scattered=_turned(m, m.row, 1))
    up = _turned(m, m.query, s.heads)
    if m.query_rank:
        specs = [*linear_tensors(f"{at}q_a_proj", m.query_rank, s.hidden, s.qkv_bias, down),
                 TensorSpec(f"{at}q_a_layernorm.weight", (m.query_rank,)),
                 *linear_tensors(f"{at}q_b_proj", queries, m.query_rank, False,
                                 Projection("q_b_proj", scattered=up))]
    else:
        specs = linear_tensors(f"{at}q_proj", queries, s.hidden, False,
                               down._replace(scattered=up))
    return [
        *specs,
        *linear_tensors(f"{at}kv_a_proj_with_mqa", m.row, s.hidden, s.qkv_bias, down),
        TensorSpec(f"{at}kv_a_layernorm.weight", (m.rank,)),
        TensorSpec(f"{at}kv_b_proj.weight", (s.heads * (m.plain + m.value), m.rank)),
        *linear_tensors(f"{at}o_proj", s.hidden, s.heads * m.value, s.o_bias),
    ]


def index_tensors(at: str, s: ModelShape, m: LatentShape) -> list[TensorSpec]:
    """The indexer of an attention over latents, which every GPU has whole, in the model's dtype."""
    if (x := s.index) is None:
        return []
    return [TensorSpec(f"{at}{INDEXER}wq_b.weight", (x.heads * x.dim, m.query_rank)),
            TensorSpec(f"{at}{INDEXER}wk.weight", (x.dim, s.hidden)),
            TensorSpec(f"{at}{INDEXER}k_norm.weight", (x.dim,)),
            TensorSpec(f"{at}{INDEXER}k_norm.bias", (x.dim,)),
            TensorSpec(f"{at}{INDEXER}weights_proj.weight", (x.heads, s.hidden))]


def _turned(m: LatentShape, each: int, heads: int) -> bool:
    """Whether rows of heads of `each` rows, of which the last `m.rope` are brought into another
    order, leave their block."""
    ends = range(each, heads * each + 1, each)
    return m.interleaved and any((end - m.rope) // BLOCK != (end - 1) // BLOCK for end in ends)


# --- recurrent layers ----------------------------------------------------------------------------

def delta_tensors(at: str, s: DeltaShape, hidden: int) -> list[TensorSpec]:
    """GatedDeltaNet, its projections apart (as Qwen3.5 has them)."""
    into = Projection("in_proj", mixed=True)
    qkv = s.key_size, s.key_size, s.value_size
    rows = {"qkv": qkv, "z": (s.value_size,), "b": (s.value_heads,), "a": (s.value_heads,)}
    return [
        *(spec for name, own in rows.items()
          for spec in linear_tensors(f"{at}in_proj_{name}", sum(own), hidden, False, into, own)),
        TensorSpec(f"{at}conv1d.weight", (s.channels, 1, s.width), segments=qkv),
        TensorSpec(f"{at}dt_bias", (s.value_heads,), "float32"),
        TensorSpec(f"{at}A_log", (s.value_heads,), "float32"),
        TensorSpec(f"{at}norm.weight", (s.value_dim,)),
        *linear_tensors(f"{at}out_proj", hidden, s.value_size),
    ]


def mamba_tensors(at: str, s: MambaShape, hidden: int) -> list[TensorSpec]:
    """Mamba-2."""
    states = s.groups * s.state_dim
    xbc = s.inner, states, states
    specs = [
        *linear_tensors(f"{at}in_proj", s.inner + s.channels + s.heads, hidden, s.proj_bias,
                        segments=(s.inner, *xbc, s.heads)),
        TensorSpec(f"{at}conv1d.weight", (s.channels, 1, s.width), segments=xbc),
        *(TensorSpec(f"{at}{name}", (s.heads,), "float32") for name in ("dt_bias", "A_log", "D")),
        *linear_tensors(f"{at}out_proj", hidden, s.inner, s.out_bias),
    ]
    if s.norm != "none":
        specs.append(TensorSpec(f"{at}norm.weight", (s.inner,)))
    if s.conv_bias:
        specs.append(TensorSpec(f"{at}conv1d.bias", (s.channels,), segments=xbc))
    return specs


def conv_tensors(at: str, s: ConvShape, hidden: int) -> list[TensorSpec]:
    """A gated short convolution."""
    specs = [
        *linear_tensors(f"{at}in_proj", 3 * s.channels, hidden, s.bias,
                        segments=(s.channels,) * 3),
        TensorSpec(f"{at}conv.weight", (s.channels, 1, s.width)),
        *linear_tensors(f"{at}out_proj", hidden, s.channels, s.bias),
    ]
    return [*specs, TensorSpec(f"{at}conv.bias", (s.channels,))] if s.bias else specs


def scan_tensors(at: str, s: ScanShape, hidden: int) -> list[TensorSpec]:
    """Mamba."""
    specs = [
        *linear_tensors(f"{at}in_proj", 2 * s.channels, hidden, s.proj_bias,
                        segments=(s.channels, s.channels)),
        TensorSpec(f"{at}conv1d.weight", (s.channels, 1, s.width)),
        *linear_tensors(f"{at}x_proj", s.rank + 2 * s.state_dim, s.channels),
        *linear_tensors(f"{at}dt_proj", s.channels, s.rank),
        TensorSpec(f"{at}dt_proj.bias", (s.channels,), "float32"),
        TensorSpec(f"{at}A_log", (s.channels, s.state_dim), "float32"),
        TensorSpec(f"{at}D", (s.channels,), "float32"),
        *linear_tensors(f"{at}out_proj", hidden, s.channels, s.proj_bias),
    ]
    if s.norms == "weighted":
        specs += [TensorSpec(f"{at}{name}_layernorm.weight", (size,)) for name, size in (
            ("dt", s.rank), ("b", s.state_dim), ("c", s.state_dim))]
    return [*specs, TensorSpec(f"{at}conv1d.bias", (s.channels,))] if s.conv_bias else specs


def kda_tensors(at: str, s: KdaShape, hidden: int) -> list[TensorSpec]:
    """Kimi Delta Attention; the latents every GPU has whole."""
    into = Projection("in_proj", mixed=True)
    rows = {**dict.fromkeys("qkv", s.inner), "b": s.heads, "f_a": s.head_dim, "g_a": s.head_dim}
    return [
        *(spec for name, count in rows.items()
          for spec in linear_tensors(f"{at}{name}_proj", count, hidden, False, into)),
        *(TensorSpec(f"{at}{name}_conv1d.weight", (s.inner, 1, s.width)) for name in "qkv"),
        *(spec for name in "fg"
          for spec in linear_tensors(f"{at}{name}_b_proj", s.inner, s.head_dim)),
        TensorSpec(f"{at}dt_bias", (s.inner,), "float32"),
        TensorSpec(f"{at}A_log", (s.heads,), "float32"),
        TensorSpec(f"{at}o_norm.weight", (s.head_dim,)),
        *linear_tensors(f"{at}o_proj", hidden, s.inner),
    ]


# --- MLPs ----------------------------------------------------------------------------------------

def dense_tensors(at: str, hidden: int, size: int, bias: bool = False,
                  names: tuple[str, ...] = GATED) -> list[TensorSpec]:
    """An MLP; names: of gate, up and down, or of the last two."""
    gate_up, (*wide, down) = Projection("gate_up"), names
    return [*(spec for name in wide
              for spec in linear_tensors(f"{at}{name}", size, hidden, bias, gate_up)),
            *linear_tensors(f"{at}{down}", hidden, size, bias)]


def mixture_tensors(at: str, hidden: int, s: ExpertShape) -> list[TensorSpec]:
    """A mixture of experts, each expert's tensors apart. at: of the layer."""
    at = f"{at}{s.names.at}"
    router = f"{at}{s.names.router}"
    specs = [TensorSpec(f"{router}.weight", (s.number, hidden)), *_experts(at, hidden, s)]
    if s.bias:
        specs.append(TensorSpec(f"{router}.bias", (s.number,)))
    if s.shared:
        specs += dense_tensors(f"{at}{s.names.shared}", hidden, s.shared)
        specs.append(TensorSpec(f"{at}shared_expert_gate.weight", (1, hidden)))
    return specs


def grouped_mixture_tensors(at: str, hidden: int, s: ExpertShape) -> list[TensorSpec]:
    """A mixture whose experts are chosen in float32. at: of the layer."""
    names, at = s.names, f"{at}{s.names.at}"
    specs = [TensorSpec(f"{at}{names.router}.weight", (s.number, hidden), "float32")]
    if names.bias:
        rows = (1, s.number) if names.bias_row else (s.number,)
        specs.append(TensorSpec(f"{at}{names.bias}", rows, "float32"))
    specs += _experts(at, s.latent or hidden, s)
    if s.latent:
        specs += [*linear_tensors(f"{at}fc1_latent_proj", s.latent, hidden),
                  *linear_tensors(f"{at}fc2_latent_proj", hidden, s.latent)]
    if s.shared:
        gated = len(names.expert) == len(GATED)
        specs += dense_tensors(f"{at}{names.shared}", hidden, s.shared,
                               names=GATED if gated else names.expert)
    return specs


def layer_mlp_tensors(at: str, s: ModelShape, i: int) -> list[TensorSpec]:
    """The MLP of the i-th layer, dense or a mixture. at: of the layer."""
    if s.experts is None or not s.has_experts(i):
        return dense_tensors(f"{at}{s.mlp_name}", s.hidden, s.intermediate)
    mixture = grouped_mixture_tensors if s.routing else mixture_tensors
    return mixture(at, s.hidden, s.experts)


def _experts(at: str, hidden: int, s: ExpertShape) -> Iterable[TensorSpec]:
    return (spec for e in range(s.number)
            for spec in dense_tensors(f"{at}experts.{e}.", hidden, s.size, s.bias,
                                      s.names.expert))


# --- vision towers -------------------------------------------------------------------------------

def vision_tensors(v: VisionShape) -> list[TensorSpec]:
    """All tensors of a vision tower. None is quantised at load, and every rank has them whole."""
    patch = (v.hidden, v.channels, v.frames, v.patch, v.patch)
    specs = [TensorSpec(f"{TOWER}patch_embed.proj.weight", patch)]
    if not v.gated:
        specs.append(TensorSpec(f"{TOWER}patch_embed.proj.bias", (v.hidden,)))
    if v.positions:
        specs.append(TensorSpec(f"{TOWER}pos_embed.weight", (v.positions**2, v.hidden)))
    for i in range(v.depth):
        specs += _block(f"{TOWER}blocks.{i}.", v)
    specs += _merger(f"{TOWER}merger.", v, v.hidden)
    for i in range(len(v.deepstack)):
        specs += _merger(f"{TOWER}deepstack_merger_list.{i}.", v, v.merged)
    return specs


def mlp_names(v: VisionShape) -> tuple[str, ...]:
    """The products of a block's MLP; the last leads back."""
    return ("gate_proj", "up_proj", "down_proj") if v.gated else ("linear_fc1", "linear_fc2")


def merger_names(v: VisionShape) -> tuple[str, str, str]:
    """Norm and products of a merger."""
    return ("ln_q", "mlp.0", "mlp.2") if v.gated else ("norm", "linear_fc1", "linear_fc2")


def _block(at: str, v: VisionShape) -> Iterator[TensorSpec]:
    yield from _norm(f"{at}norm1", v, v.hidden)
    yield from _product(f"{at}attn.qkv", 3 * v.hidden, v.hidden)
    yield from _product(f"{at}attn.proj", v.hidden, v.hidden)
    yield from _norm(f"{at}norm2", v, v.hidden)
    *first, last = mlp_names(v)
    for name in first:
        yield from _product(f"{at}mlp.{name}", v.intermediate, v.hidden)
    yield from _product(f"{at}mlp.{last}", v.hidden, v.intermediate)


def _merger(at: str, v: VisionShape, normed: int) -> Iterator[TensorSpec]:
    norm, into, out = merger_names(v)
    yield from _norm(f"{at}{norm}", v, normed)
    yield from _product(f"{at}{into}", v.merged, v.merged)
    yield from _product(f"{at}{out}", v.out_hidden, v.merged)


def _norm(name: str, v: VisionShape, size: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (size,))
    if not v.gated:
        yield TensorSpec(f"{name}.bias", (size,))


def _product(name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, columns))
    yield TensorSpec(f"{name}.bias", (rows,))
