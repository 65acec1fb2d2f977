"""The shape of a model: plain numbers of its `config.json`, and what one GPU of several has of it.

Nothing here needs torch: dtypes are names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from actorium.actors.errors import BadConfig
from actorium.gpu.families.fp8_config import Fp8Shape
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.families.weight_formats import GroupedShape

GATED = ("gate_proj", "up_proj", "down_proj")
"""The projections of a gated MLP, as most families name them."""
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that a model's weights and activations may have."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of one element, of weights, states and pages."""
CODE_SCALE_BYTES = {"int8": 2}
"""Bytes of the scale that each head of a token has beside its pages, by their dtype; no others have
any."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary embedding: base frequency and scaling, names as in transformers' `rope_parameters`."""

    kind: str = "default"
    """"none": nothing is rotated (NoPE)."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    """Positions the model was trained on before scaling (llama3, yarn, dynamic, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Of longrope: what each pair's wavelength is multiplied by where the longest sequence that is
    served is not longer than `original_max`."""
    long_factors: tuple[float, ...] = ()
    """The same where it is longer."""
    axes: tuple[int, ...] = ()
    """Which of a token's positions turns each pair: 0 that in time, 1 in height, 2 in width. Of
    text all three are one; (): so are they of everything."""


NOPE = RopeShape("none")


class QueryScaling(NamedTuple):
    """Queries are multiplied by 1 + beta * log(1 + floor((position + offset) / every)), so that
    attention over a long context stays as sharp as over a short one."""

    beta: float
    every: int
    offset: int = 0
    still_alone: bool = False
    """Only in layers that rotate nothing."""


class StateShape(NamedTuple):
    """What one recurrent layer keeps of one sequence."""

    state: tuple[int, int, int]
    """[heads, rows, columns] of the state proper, in the state dtype; of 0 where there is none."""
    columns: tuple[int, int]
    """(W - 1, channels): the last inputs of a convolution of width W, in the model's dtype."""
    inputs: int
    """What a token brings to both, of the layer's first projection: the convolution's channels and
    the gates' inputs (dt). Kept, in the model's dtype, of drafts that may be accepted."""


class DeltaShape(NamedTuple):
    """A GatedDeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Of the convolution."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "GatedDeltaNet"

    @property
    def key_size(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def inner(self) -> int:
        """Width of what the second projection takes."""
        return self.value_size

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [HV, V, K], and columns; its inputs are those and b and a."""
        return StateShape((self.value_heads, self.value_dim, self.key_dim),
                          (self.width - 1, self.channels), self.channels + 2 * self.value_heads)

    def split(self, tp: int) -> DeltaShape:
        """One GPU's heads; see `ModelShape.split`."""
        return self._replace(key_heads=_shared(self.key_heads, tp, "key heads"),
                             value_heads=_part(self.value_heads, tp, "value heads"))


class MambaShape(NamedTuple):
    """A Mamba-2 layer."""

    heads: int
    groups: int
    """Of B and C: each is shared by heads in a row."""
    head_dim: int
    state_dim: int
    width: int
    """Of the convolution."""
    conv_bias: bool
    proj_bias: bool
    time_limit: tuple[float, float]
    """Least and largest time step."""
    norm_eps: float
    """Of the layer's own norm."""
    shared_by: int = 1
    """GPUs that have heads of one group between them, so that its norm goes over all of theirs."""
    out_bias: bool = False
    """Of the second projection; `proj_bias`: of the first."""
    norm: str = "after"
    """When the heads' outputs are normed: after they are gated, before, or "none"."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "Mamba-2"

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [H, P, N], and columns; its inputs are those and dt."""
        return StateShape((self.heads, self.head_dim, self.state_dim),
                          (self.width - 1, self.channels), self.channels + self.heads)

    def split(self, tp: int) -> MambaShape:
        """One GPU's heads; see `ModelShape.split`."""
        if self.norm == "before" and tp > self.groups:
            raise BadConfig(f"--tp: {tp} GPUs cannot share the norm before the gate of "
                            f"{self.groups} groups of Mamba-2's heads", "tp")
        return self._replace(groups=_shared(self.groups, tp, "key heads"),
                             heads=_part(self.heads, tp, "value heads"),
                             shared_by=max(1, tp // self.groups))


class ConvShape(NamedTuple):
    """A gated short convolution (LFM2): it keeps columns, and no state beside them."""

    channels: int
    width: int
    """Of the convolution."""
    bias: bool
    """Of the convolution and of both projections."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "short convolution"

    @property
    def inner(self) -> int:
        """Width of what the second projection takes."""
        return self.channels

    @property
    def state(self) -> StateShape:
        """What the layer keeps: columns; its inputs are the gated channels."""
        return StateShape((0, 0, 0), (self.width - 1, self.channels), self.channels)

    def split(self, tp: int) -> ConvShape:
        """One GPU's channels; see `ModelShape.split`."""
        return self._replace(channels=_part(self.channels, tp, "channels of a convolution"))


class ScanShape(NamedTuple):
    """A Mamba layer: a state of a few numbers for each channel."""

    channels: int
    state_dim: int
    rank: int
    """Of the latent that time steps are made of."""
    width: int
    """Of the convolution."""
    conv_bias: bool
    proj_bias: bool
    norms: str = "none"
    """Of the latent, b and c: "none", "plain" (without weights) or "weighted"."""
    norm_eps: float = 1e-6

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "Mamba"

    @property
    def inner(self) -> int:
        """Width of what the second projection takes."""
        return self.channels

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [1, C, N], and columns; its inputs are the channels."""
        return StateShape((1, self.channels, self.state_dim), (self.width - 1, self.channels),
                          self.channels)

    def split(self, tp: int) -> ScanShape:
        """One GPU's channels; see `ModelShape.split`."""
        return self._replace(channels=_part(self.channels, tp, "channels of Mamba"))


class KdaShape(NamedTuple):
    """A layer of Kimi Delta Attention."""

    heads: int
    head_dim: int
    width: int
    """Of the convolution."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "Kimi Delta Attention"

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 3 * self.inner

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [H, V, K], and columns; its inputs are those, beta, and the latent
        of the decays."""
        return StateShape((self.heads, self.head_dim, self.head_dim),
                          (self.width - 1, self.channels),
                          self.channels + self.heads + self.head_dim)

    def split(self, tp: int) -> KdaShape:
        """One GPU's heads; see `ModelShape.split`."""
        return self._replace(heads=_part(self.heads, tp, "heads of Kimi Delta Attention"))


RecurrentShape = DeltaShape | MambaShape | ConvShape | ScanShape | KdaShape
"""Of the layers with a recurrent state: every kind has a `width`, of its convolution, and a
`state`, what a layer keeps of a sequence."""


class MixtureNames(NamedTuple):
    """What checkpoints call the tensors of a mixture."""

    at: str = "mlp."
    """What their names begin with in a layer."""
    router: str = "gate"
    expert: tuple[str, ...] = GATED
    """An expert's projections; of two, the first has no gate, and its activation is squared ReLU.
    """
    stacked: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")
    """Those of all experts in one, gate and up together; (): no checkpoint has them so."""
    turned: bool = False
    """Of these, each expert's rows are its inputs."""
    alternating: bool = False
    """That is so, too, and the columns of gate and up alternate."""
    shared: str = "shared_expert."
    """What the names of the expert that all tokens go through begin with."""
    bias: str = ""
    """That of the scores when experts are chosen; "": there is none."""
    bias_row: bool = False
    """It is a matrix of one row."""


class ExpertShape(NamedTuple):
    """A mixture of experts."""

    number: int
    chosen: int
    """Experts a token goes through."""
    size: int
    """Inner width of each."""
    shared: int
    """Inner width of the expert all tokens go through; 0 = there is none."""
    normalised: bool
    """The weights of the chosen ones add up to 1."""
    shared_gate: bool = True
    """A sigmoid gates what the shared expert gives."""
    names: MixtureNames = MixtureNames()
    bias: bool = False
    """The router and the experts' projections have biases."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of a clamped SwiGLU (`activation.clamped_swiglu`); None: a plain one."""
    latent: int = 0
    """Width of what the experts take and give, which two projections make of hidden states and
    back; 0 = hidden states."""


class Routing(NamedTuple):
    """How experts are chosen in float32, by groups (arXiv 2412.19437, section 2.1.2)."""

    groups: int = 1
    """The experts' number is a multiple of it."""
    chosen_groups: int = 1
    """Groups whose experts may be chosen."""
    factor: float = 1.0
    """On the weights of the chosen."""
    softmax: bool = False
    """Scores are probabilities; else sigmoids."""
    best: int = 2
    """Of a group's experts, the sum of whose scores says how good the group is."""
    least: float = 0.0
    """Of the sum that weights are divided by."""
    added: float = 1e-20
    """To that sum."""
    on_input: bool = False
    """The weights multiply what goes into the experts, not what they give."""


class LatentShape(NamedTuple):
    """Multi-head latent attention (arXiv 2405.04434): widths."""

    query_rank: int
    """Of the latent that queries are made of; 0 = they are projected at once."""
    rank: int
    """Of the latent that keys and values are made of."""
    plain: int
    """Of a head's query and key without position."""
    rope: int
    """Of their rotated part, which for keys all heads share."""
    value: int
    """Of a head's value."""
    interleaved: bool
    """The pairs that are rotated lie side by side in the checkpoint, not half the part apart."""

    @property
    def query(self) -> int:
        """Of a head's query."""
        return self.plain + self.rope

    @property
    def row(self) -> int:
        """Of what a token leaves in a layer's pages: its latent, and the rotated key."""
        return self.rank + self.rope


class LayerNorms(NamedTuple):
    """What checkpoints call the norms of a layer with attention; "": there is none."""

    mixer: str = "input_layernorm"
    """Of what goes into attention."""
    mlp: str = "post_attention_layernorm"
    mixer_out: str = ""
    """Of what attention gives; then of what the MLP gives as well."""
    mlp_out: str = ""

    @property
    def names(self) -> list[str]:
        """Of those that there are."""
        return [name for name in self if name]


class LayerParts(NamedTuple):
    """What the names of a layer's parts begin with in its checkpoint; "": there is no such part."""

    norm: str
    """Of the norm of what goes into the mixer; `mlp_norm`: into the MLP."""
    attention: str
    recurrent: str
    """With attention as well, both take the same input, and what they give is added."""
    mlp_norm: str = ""
    mlp: str = ""


class Multipliers(NamedTuple):
    """Factors inside the layers of a model whose widths were chosen by muP (arXiv 2203.03466)."""

    attention_in: float
    """On what goes into attention; `recurrent_in`: into the recurrent layer."""
    key: float
    attention_out: float
    recurrent_in: float
    projected: tuple[float, float, float, float, float]
    """On the parts of Mamba-2's first projection: z, x, B, C, dt."""
    recurrent_out: float
    gate: float
    """On what SiLU takes in the MLP."""
    down: float


class LayerGroup(NamedTuple):
    """The layers of one attention window: they share a page pool and a page table."""

    window: int
    """Tokens a query sees, itself included; 0 = all."""
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a decoder that arithmetic needs (memory plan, forward pass, loader)."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    ropes: tuple[RopeShape, ...]
    """One for all layers; or that of the layers with full attention, and of the windowed ones; none
    where nothing is rotated; or those that `layer_ropes` choose from."""
    windows: tuple[int, ...]
    """Per layer: tokens a query sees, itself included; 0 = all."""
    max_model_len: int
    """Longest sequence the model serves."""
    dtype: str
    """Of weights and activations: one of `WEIGHT_DTYPES`."""
    attention_scale: float
    """On the product of query and key."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_name: str = "mlp."
    """What the names of a dense MLP's tensors begin with in a layer."""
    chunked: bool = False
    """What a query sees begins at a multiple of its window."""
    qk_norm: bool = False
    """Queries and keys are normed, head by head."""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """What checkpoints call the norms of queries and of keys; "": these have no weights."""
    norms_still: bool = True
    """Layers that rotate nothing norm them too."""
    norm_after_rope: bool = False
    """Heads are normed once they are rotated."""
    query_scaling: QueryScaling | None = None
    """How queries grow with their position; None: they do not."""
    qk_norm_by_head: bool = False
    """Each head has a weight of its own in these norms."""
    qk_norm_bias: bool = False
    qk_norms: tuple[int, int] | tuple[()] = ()
    """Query and key heads of all GPUs, where the norm of each is a tensor by itself."""
    whole_qk_norm: bool = False
    """They are normed, the heads of all GPUs together."""
    clip_qkv: float = 0.0
    """Queries, keys and values are at most so far from 0; 0 = they stay."""
    learned_positions: int = 0
    """Rows of a table of which that of its position is added to each embedding; 0 = there is
    none."""
    head_bias: bool = False
    embed_scale: float = 1.0
    """On the embeddings."""
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0 = they stay."""
    logit_cap: float = 0.0
    """The same of logits."""
    sinks: bool = False
    """Each head has a learned score that no token's value goes with (an attention sink)."""
    activation: str = "silu"
    """silu or gelu (its tanh form): what gates the MLP; of one that is not gated, also gelu_erf,
    relu, relu2 (its square), or xielu."""
    gated: bool = True
    """The MLP has a gate."""
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    layer_norm: bool = False
    """Norms, of heads as well, are LayerNorms, which subtract the mean; else RMS norms."""
    norm_parts: tuple[str, ...] = ("weight",)
    """What checkpoints have of the norms of hidden states: of LayerNorms perhaps a bias, or
    nothing."""
    parallel: bool = False
    """Attention and the MLP take the same hidden states; a MLP without a norm of its own takes them
    as normed for attention."""
    layer_norms: LayerNorms = LayerNorms()
    parts: tuple[LayerParts, ...] = ()
    """Of each layer, for families whose layers differ in them; (): each has a mixer and an MLP."""
    dense_names: tuple[str, ...] = GATED
    """What a dense MLP's projections are called, where `parts` say where it is."""
    multipliers: Multipliers | None = None
    """None: all are 1."""
    rotary_dim: int = 0
    """Leading dimensions of a head that are rotated; 0 = all."""
    interleaved: bool = False
    """The pairs that are rotated lie side by side in the checkpoint, not half the part apart."""
    layer_ropes: tuple[int, ...] = ()
    """Of each layer, the index of its rope; (): by its window."""
    output_gate: bool = False
    """What attention gives is gated by a sigmoid, projected with the queries."""
    recurrent: tuple[int, ...] = ()
    """Layers with a recurrent state instead of attention; their windows mean nothing."""
    recurrence: RecurrentShape | None = None
    """Of the recurrent layers; None where there are none."""
    sparse: tuple[int, ...] = ()
    """Layers whose MLP is a mixture of experts."""
    experts: ExpertShape | None = None
    """Of the sparse layers."""
    routing: Routing | None = None
    """How they are chosen; None: by the highest probabilities."""
    latent: LatentShape | None = None
    """Attention over latents instead of keys and values."""
    mtp_layers: int = 0
    """1 where a layer of the checkpoint, beside all others, predicts further tokens (MTP)."""
    fp8: Fp8Shape | None = None
    """Which weights are in FP8 in memory; None: none."""
    grouped: GroupedShape | None = None
    """Which weights are in 4 to 8 bits in memory; None: none."""
    vision: VisionShape | None = None
    """Of the tower for images, which every GPU has whole; None: there is none."""
    by_transformers: int = 0
    """Numbers of all weights, where transformers' own class runs the model; 0: one of ours does."""
    tp: int = 1
    """GPUs that share the layers; sizes of heads, MLPs and vocabulary are those of one of them."""
    whole_vocab_size: int = 0
    """Of the vocabulary that GPUs share; 0: `vocab_size`."""

    @property
    def vocabulary(self) -> int:
        """Tokens there are, and the width of a row of logits, whatever part of them is here."""
        return self.whole_vocab_size or self.vocab_size

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the model's dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def sandwich_norms(self) -> bool:
        """Whether what attention and the MLP give is normed."""
        return bool(self.layer_norms.mixer_out)

    @property
    def adjusts_qkv(self) -> bool:
        """Whether queries, keys and values are clipped, or normed otherwise than by the RMS of each
        head."""
        return self.whole_qk_norm or self.clip_qkv > 0 or (self.qk_norm and self.layer_norm)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        recurrent = set(self.recurrent)
        if self.parts:
            return tuple(i for i, parts in enumerate(self.parts) if parts.attention)
        return tuple(i for i in range(self.layers) if i not in recurrent)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The attention layers by window, in the order in which the windows first appear. Where
        there are none, one layer stands for them, whose pages nobody reads: the scheduler counts
        tokens, and knows prefixes, by pages."""
        by_window: dict[int, list[int]] = {}
        for i in self.attention_layers or (0,):
            by_window.setdefault(self.windows[i], []).append(i)
        return tuple(LayerGroup(window, tuple(own)) for window, own in by_window.items())

    @property
    def has_dense(self) -> bool:
        """Whether some layer has an MLP that is no mixture."""
        if self.parts:
            return any(parts.mlp and i not in self.sparse for i, parts in enumerate(self.parts))
        return self.layers > len(self.sparse)

    def has_experts(self, i: int) -> bool:
        """Whether the i-th layer's MLP is a mixture; that of a layer that drafts, behind all
        others, is one where the model has any."""
        return i in self.sparse or (i >= self.layers and self.experts is not None)

    def rope_index(self, i: int) -> int:
        """Which of the ropes is that of the i-th layer; 0 of a layer that drafts."""
        if self.layer_ropes and i < self.layers:
            return self.layer_ropes[i]
        return len(self.ropes) - 1 if i < self.layers and self.windows[i] else 0

    @property
    def scales_queries(self) -> bool:
        """Whether any position that is served has queries that are scaled."""
        q = self.query_scaling
        return q is not None and self.max_model_len > q.every - q.offset

    def query_table(self, i: int) -> int | None:
        """Which of the tables by position, behind those of the ropes, has what the queries of the
        i-th layer are multiplied by; None: they are not."""
        ropes, q = self.ropes or (NOPE,), self.query_scaling
        if q is None or not self.scales_queries or (
                q.still_alone and ropes[self.rope_index(i)].kind != NOPE.kind):
            return None
        return len(ropes)

    def norms_heads(self, i: int) -> bool:
        """Whether the queries and keys of the i-th layer are normed, head by head."""
        still = bool(self.ropes) and self.ropes[self.rope_index(i)].kind == NOPE.kind
        return self.qk_norm and (self.norms_still or not still)

    def without_chunks(self) -> ModelShape:
        """The same where every sequence that is served is shorter than a chunk."""
        if not self.chunked or max(self.windows) < self.max_model_len:
            return self
        return replace(self, chunked=False, windows=(0,) * self.layers)

    def group_and_index(self, i: int) -> tuple[int, int]:
        """The group of the i-th layer, which has attention, and its index in it. A layer that
        drafts, behind all others, has a pool of its own, and so both are 0."""
        for g, group in enumerate(self.groups):
            if i in group.layers:
                return g, group.layers.index(i)
        return 0, 0

    @property
    def state(self) -> StateShape | None:
        """What a recurrent layer keeps of a sequence; None where no layer is recurrent."""
        return self.recurrence.state if self.recurrence else None

    @property
    def kv_row(self) -> tuple[int, int]:
        """What a token leaves in the pages of an attention layer: (parts, width of each). The keys
        of all heads and then their values; or one part, its latent."""
        if self.latent is not None:
            return 1, self.latent.row
        return 2 * self.kv_heads, self.head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values have the same)."""
        return self.kv_heads * self.head_dim

    def split(self, tp: int) -> ModelShape:
        """One GPU's part under tensor parallelism: heads, experts' and MLP's widths and the
        vocabulary are divided; kv heads fewer than `tp` are replicated. Raises `BadConfig`."""
        if tp == 1:
            return self
        if self.by_transformers:
            raise BadConfig("--tp: models that transformers' classes run (--model-impl) are not "
                            "split: their weights have no rank's parts", "tp")
        experts = self.experts
        if experts is not None:
            step = tp * (self.grouped.step if self.grouped else 1)
            experts = experts._replace(size=-(-experts.size // step) * (step // tp),
                                       shared=-(-experts.shared // tp))
        return replace(
            self, tp=tp, whole_vocab_size=self.vocabulary,
            kv_heads=_shared(self.kv_heads, tp, "kv heads"),
            heads=_part(self.heads, tp, "attention heads"), experts=experts,
            intermediate=-(-self.intermediate // tp), vocab_size=-(-self.vocab_size // tp),
            recurrence=self.recurrence.split(tp) if self.recurrence else None)


def _part(count: int, tp: int, what: str) -> int:
    """Of heads that each GPU has its own of."""
    if count % tp:
        raise BadConfig(f"--tp: {tp} GPUs cannot share {count} {what} evenly", "tp")
    return count // tp


def _shared(count: int, tp: int, what: str) -> int:
    """Of heads that several GPUs may have copies of."""
    if count % tp and tp % count:
        raise BadConfig(f"--tp: {count} {what} cannot be shared out to {tp} GPUs", "tp")
    return max(1, count // tp)
