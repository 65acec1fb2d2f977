"""The shape of a model: plain numbers of its `config.json`, and what one GPU of several has of it.

Nothing here needs torch: dtypes are names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actorium.actors.models.pooling_shape import PoolingShape
from actorium.gpu.families.fp8_config import Fp8Shape
from actorium.gpu.families.layer_shapes import (
    GATED,
    NOPE,
    AltUpShape,
    ExpertShape,
    FullHeads,
    IndexShape,
    LatentShape,
    LayerGroup,
    LayerNorms,
    LayerParts,
    Multipliers,
    QueryScaling,
    RopeShape,
    Routing,
    TokenInputs,
)
from actorium.gpu.families.recurrent_shapes import RecurrentShape, StateShape, part, shared
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.families.weight_formats import GroupedShape

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that a model's weights and activations may have."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of one element, of weights, states and pages."""
CODE_SCALE_BYTES = {"int8": 2}
"""Bytes of the scale that each head of a token has beside its pages, by their dtype; no others have
any."""


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
    down_bias: bool = False
    """A dense MLP's last product has a bias, where its others have none."""
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
    token_types: int = 0
    """Rows of a table of which that of its type (which of two texts it is of) is added to each
    embedding; 0 = there is none."""
    embed_norm: bool = False
    """Embeddings are normed: of a bidirectional model behind the sum with positions and types."""
    final_norm: bool = True
    """What the last layer gives is normed."""
    bidirectional: bool = False
    """Each token attends to all tokens of its prompt, or to those that are less than its layer's
    window away, on both sides: a prompt is computed in one step, and nothing is kept in pages."""
    distance_buckets: int = 0
    """Of a bidirectional model: rows of a table of what each head adds to scores, by how far apart
    tokens are; 0 = there is none."""
    post_norms: bool = False
    """Norms come behind the sums of what a mixer, or an MLP, gives and takes."""
    first_norm: bool = True
    """The first layer norms what goes into attention."""
    head_bias: bool = False
    embed_scale: float = 1.0
    """On the embeddings."""
    scales_given: bool = False
    """As well on rows of prompts given as embeddings; else these are as behind it."""
    stream_scale: float = 1.0
    """What hidden states between layers are to be multiplied by, to be those of the checkpoint's
    own class."""
    gives_hidden: bool = False
    """Whether requests may ask for what goes into any layer (`enable_return_hidden_states`)."""
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0 = they stay."""
    logit_cap: float = 0.0
    """The same of logits."""
    alibi: tuple[float, ...] = ()
    """Of the heads of all GPUs: by how much scores fall with each token of distance (ALiBi, arXiv
    2108.12409); (): they do not."""
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
    mtp_parts: LayerParts | None = None
    """Those of the layer that drafts, of a model whose layers differ in their parts."""
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
    full_heads: FullHeads | None = None
    """None: the heads of all layers are alike."""
    keys_as_values: bool = False
    """See `FullHeads`; of all layers."""
    value_norm: bool = False
    """Values are normed, head by head, without weights."""
    kv_sources: tuple[int, ...] = ()
    """Of each layer, the one whose keys and values it attends to, an earlier one where it has none
    of its own; (): its own."""
    shared_intermediate: int = 0
    """Of the MLPs in layers without keys and values of their own; 0: `intermediate`."""
    token_inputs: TokenInputs | None = None
    """None: layers take nothing but hidden states."""
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
    index: IndexShape | None = None
    """What chooses the tokens that queries attend to; None: they attend to all before them."""
    altup: AltUpShape | None = None
    """None: hidden states are one stream."""
    draft: ModelShape | None = None
    """Of a smaller model that drafts for it; None: there is none."""
    mtp_layers: int = 0
    """1 where a layer of the checkpoint, beside all others, predicts further tokens (MTP)."""
    eagle: EagleShape | None = None
    """Of the EAGLE-3 head that drafts for the model; None: there is none."""
    fp8: Fp8Shape | None = None
    """Which weights are in FP8 in memory; None: none."""
    grouped: GroupedShape | None = None
    """Which weights are in 4 to 8 bits in memory; None: none."""
    pooling: PoolingShape | None = None
    """What it makes of prompts beside completions; None: nothing."""
    vision: VisionShape | None = None
    """Of the tower for images, which every GPU has whole; None: there is none."""
    by_transformers: int = 0
    """Numbers of all weights, where transformers' own class runs the model; 0: one of ours does."""
    tp: int = 1
    """GPUs that share the layers; sizes of heads, MLPs and vocabulary are those of one of them."""
    whole_vocab_size: int = 0
    """Of the vocabulary that GPUs share; 0: `vocab_size`."""
    whole_intermediate: int = 0
    """Of the MLPs that GPUs share; 0: `intermediate`."""

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
        return (self.whole_qk_norm or self.clip_qkv > 0 or self.value_norm
                or (self.qk_norm and self.layer_norm))

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
        tokens, and knows prefixes, by pages. So it is where no layer keeps anything."""
        if self.bidirectional:
            return (LayerGroup(0, (0,)),)
        by_window: dict[int, list[int]] = {}
        for i in self.attention_layers or (0,):
            if self.owns_kv(i):
                by_window.setdefault(self.windows[i], []).append(i)
        return tuple(LayerGroup(window, tuple(own)) for window, own in by_window.items())

    def owns_kv(self, i: int) -> bool:
        """Whether the i-th layer, which has attention, has keys and values of its own."""
        return not self.kv_sources or i >= self.layers or self.kv_sources[i] == i

    def of_layer(self, i: int) -> ModelShape:
        """The same with heads and MLP of the i-th layer, where those of layers differ."""
        full = None if i >= self.layers or self.windows[i] else self.full_heads
        shape = self if full is None else replace(
            self, kv_heads=full.kv_heads, head_dim=full.head_dim, full_heads=None,
            keys_as_values=full.keys_as_values)
        if self.shared_intermediate and not self.owns_kv(i):
            return replace(shape, intermediate=self.shared_intermediate)
        return shape

    @property
    def kinds(self) -> tuple[ModelShape, ...]:
        """The shapes `of_layer` that there are."""
        if self.full_heads is None and not self.shared_intermediate:
            return (self,)
        alike = {(self.windows[i] > 0, self.owns_kv(i)): i for i in range(self.layers)}
        return tuple(self.of_layer(i) for i in alike.values())

    def of_rope(self, index: int) -> ModelShape:
        """The shape of the layers with this rope."""
        return next((self.of_layer(i) for i in range(self.layers)
                     if self.rope_index(i) == index), self)

    @property
    def rope_columns(self) -> int:
        """Width of the tables of cosines (and of sines) of all ropes, side by side."""
        return sum(self.of_rope(r).head_dim for r in range(len(self.ropes or (0,))))

    @property
    def stream_width(self) -> int:
        """Numbers of a token between two layers."""
        return self.hidden * (self.altup.streams if self.altup else 1)

    @property
    def token_width(self) -> int:
        """Of what a token gives all layers by itself; 0: nothing."""
        return self.layers * self.token_inputs.size if self.token_inputs else 0

    @property
    def has_dense(self) -> bool:
        """Whether some layer has an MLP that is no mixture."""
        if self.parts:
            return any(parts.mlp and i not in self.sparse for i, parts in enumerate(self.parts))
        return self.layers > len(self.sparse)

    def parts_of(self, i: int) -> LayerParts:
        """Those of the i-th layer, or of the one that drafts, behind all others."""
        if i < self.layers:
            return self.parts[i]
        assert self.mtp_parts is not None
        return self.mtp_parts

    @property
    def mixtures(self) -> int:
        """Layers with a mixture of experts."""
        beside = self.experts is not None and self.experts.beside
        return self.layers if beside else len(self.sparse)

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

    def simplified(self) -> ModelShape:
        """The same without what only sequences longer than any that is served need: chunks, an
        indexer."""
        own = self
        if self.chunked and max(self.windows) >= self.max_model_len:
            own = replace(own, chunked=False, windows=(0,) * self.layers)
        if self.index is not None and self.index.chosen >= self.max_model_len:
            own = replace(own, index=None)
        return own

    def index_layers(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Those of these layers that have an indexer, and its keys in their pages."""
        if self.index is None:
            return ()
        return tuple(i for i in layers if i not in self.index.shared)

    def group_and_index(self, i: int) -> tuple[int, int]:
        """The group of the layer whose keys and values the i-th one attends to, and its index in
        it. A layer that drafts, behind all others, has a pool of its own, and so both are 0."""
        i = self.kv_sources[i] if self.kv_sources and i < self.layers else i
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
        of all heads and then their values; or one part, its latent; or nothing."""
        if self.bidirectional:
            return 0, 0
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
        if self.by_transformers:  # what ranks share out beside these follows from the class
            plain = (2 - self.tied) * self.vocab_size * self.hidden
            numbers = plain + -(-max(0, self.by_transformers - plain) // tp)
            return replace(self, tp=tp, by_transformers=min(numbers, self.by_transformers),
                           draft=self.draft and self.draft.split(tp),
                           heads=part(self.heads, tp, "attention heads"),
                           kv_heads=part(self.kv_heads, tp, "key heads of transformers' classes"))
        experts = self.experts
        if experts is not None:
            step = tp * (self.grouped.step if self.grouped else 1)
            experts = experts._replace(size=-(-experts.size // step) * (step // tp),
                                       shared=-(-experts.shared // tp))
        full = self.full_heads
        return replace(
            self, tp=tp, whole_vocab_size=self.vocabulary, whole_intermediate=self.intermediate,
            full_heads=full and full._replace(kv_heads=shared(full.kv_heads, tp, "kv heads")),
            shared_intermediate=-(-self.shared_intermediate // tp),
            kv_heads=shared(self.kv_heads, tp, "kv heads"),
            heads=part(self.heads, tp, "attention heads"), experts=experts,
            intermediate=-(-self.intermediate // tp), vocab_size=-(-self.vocab_size // tp),
            recurrence=self.recurrence.split(tp) if self.recurrence else None,
            draft=self.draft and self.draft.split(tp))


@dataclass(frozen=True, slots=True)
class EagleShape:
    """An EAGLE-3 head (arXiv 2503.01840): a decoder layer in a checkpoint of its own, which drafts
    from hidden states of several of a model's layers."""

    layer: ModelShape
    """A model of this layer alone, whose vocabulary is that of the drafts."""
    taps: tuple[int, ...]
    """The model's layers whose inputs the head takes side by side."""
    width: int
    """Of each of these."""
    norm_first: bool = False
    """The residual begins behind the norm of the hidden state, not before it."""
    own_embedding: int = 0
    """Rows of an embedding of its own; 0: it has the model's."""
