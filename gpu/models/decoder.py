"""What the decoders of all families share: embeddings, a stack of layers, final norm and head; and
drafting by the layer of a checkpoint that predicts the token after the next (multi-token
prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2), in DeepSeek's and in Qwen's form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from actorium.gpu.attention.backend_choice import StepAttention
from actorium.gpu.families.architectures import mtp_names
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import (
    DISTANCES,
    EMBED,
    EMBED_NORM,
    FINAL_NORM,
    HEAD,
    POSITIONS,
    TYPES,
    layer_prefix,
)
from actorium.gpu.models.eagle_head import EagleHead
from actorium.gpu.models.forward_context import (
    NO_ATTENTION,
    ChosenTokens,
    ForwardContext,
    GroupContext,
    StatePlan,
    plan_attention,
)
from actorium.gpu.models.layer_weights import LayerWeights, NamedProduct, RoutingTape
from actorium.gpu.models.pooler import Pooler
from actorium.gpu.models.rotary import rope_tables
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.parallel.split_layers import SplitEmbedding, SplitHead
from actorium.gpu.passes.canonical_ops import add, layer_norm, logits, norm, unmade
from actorium.gpu.plan.graph_memory import NOTHING_DECODED
from actorium.gpu.step.batch import ForwardBatch, ImageRows, with_deepstack, with_embeddings
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch
from actorium.gpu.vision.tower import VisionTower
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.lazy_tensors import WeightTensors
from actorium.gpu.weights.loader import Fused
from actorium.kernels.backends import select_ops
from actorium.kernels.grouped_rows import RowLookup
from actorium.kernels.inputs import HiddenStream, InputForm, settled
from actorium.kernels.linear import Linear
from actorium.kernels.reference.prompt_attention import distance_table
from actorium.kernels.reference.rope import axis_rows, rope_rows
from actorium.kernels.reference.torch_ops import TorchOps


class Mixer(Protocol):
    """Attention, or a recurrent layer. Only in its middle do tokens of a sequence meet: what comes
    before and behind works token by token, and its launches depend on nothing but the number of
    tokens."""

    @property
    def inner(self) -> int:
        """Width of what `between` gives."""

    @property
    def form(self) -> InputForm:
        """In which form the mixer is best given x; see `Linear`."""

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        """What the mixer gives, written plainly; see `canonical_ops`. x: [T, hidden], normed."""

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        """The middle, `attend` or `recur`: [T, inner], or those `rows` of it. p: [T, *],
        contiguous. States go on by the step's tokens. out: [T, inner], contiguous, to be written
        to; not with `rows`."""


class Mlp(Protocol):
    """A dense MLP, or a mixture of experts."""

    @property
    def waits(self) -> bool:
        """Whether the host must read how the rows are routed to experts before it can go on."""

    @property
    def form(self) -> InputForm:
        """In which form x is best given; see `Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """The MLP of x, [T, hidden], written plainly; see `canonical_ops`."""


@dataclass(slots=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    mlp: Mlp | None
    eps: float
    mixer_norm: Tensor | None
    """See `LayerNorms`."""
    mlp_norm: Tensor | None
    mixer_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    layer_norm: bool = field(default=False, kw_only=True)
    parallel: bool = field(default=False, kw_only=True)
    post_norms: bool = field(default=False, kw_only=True)
    """See `ModelShape`, as of the last two."""

    @property
    def waits(self) -> bool:
        """See `Mlp`."""
        return self.mlp is not None and self.mlp.waits

    def forward(self, hidden: Tensor, step: ForwardContext) -> Tensor:
        """The layer, written plainly; what runs is made of it by passes: see `LayerRun`."""
        if self.parallel and self.mlp is not None:
            return self.side_by_side(self.mlp, hidden, step)
        if self.post_norms and self.mlp is not None:
            hidden = self.normed(add(self.mixer.forward(hidden, step), hidden), self.mixer_norm)
            return self.normed(add(self.mlp.forward(hidden), hidden), self.mlp_norm)
        y = self.mixer.forward(self.normed(hidden, self.mixer_norm), step)
        hidden = add(self.normed(y, self.mixer_out_norm), hidden)
        if self.mlp is None:
            return hidden
        y = self.mlp.forward(self.normed(hidden, self.mlp_norm))
        return add(self.normed(y, self.mlp_out_norm), hidden)

    def side_by_side(self, mlp: Mlp, hidden: Tensor, step: ForwardContext) -> Tensor:
        """The same of a parallel one."""
        x = self.normed(hidden, self.mixer_norm)
        beside = x if self.mlp_norm is None else self.normed(hidden, self.mlp_norm)
        hidden = add(self.mixer.forward(x, step), hidden)
        return add(mlp.forward(beside), hidden)

    def normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The norm with this weight, where there is one."""
        if weight is None:
            return x
        return layer_norm(x, weight, self.eps) if self.layer_norm else norm(x, weight, self.eps)


class LayerRun(NamedTuple):
    """A layer as passes rewrote it."""

    whole: Callable[[HiddenStream, ForwardContext], HiddenStream]
    few: Callable[[HiddenStream, ForwardContext, Tensor], HiddenStream]
    """The same for those rows of the step's tokens; all of them leave keys, values and states."""
    enter: Callable[[HiddenStream, ForwardContext], tuple[Tensor, tuple[Any, ...]]]
    """Up to the middle: what that takes, and what is carried past it."""
    leave: Callable[[Tensor, tuple[Any, ...]], HiddenStream]
    """On from there; of what is carried, the rows that the middle gave."""


class LoadedModel(ABC):
    """A model with its weights on one device, as the worker and its steps use it."""

    no_graphs = ""
    """Why its steps are not captured; empty: they can be."""
    layers_by = ""
    """What runs its layers, in words; empty: operations of ours."""

    def __init__(self, shape: ModelShape, device: torch.device, attention: StepAttention,
                 native: bool = True, kernels: str = "auto", group: RankGroup = LoneRank(),
                 ops: TorchOps | None = None) -> None:
        """attention: what attends over its pages.
        native: C kernels where they can be had, on as many threads as torch has now.
        kernels: see `select_ops`, which may raise `ValueError`.
        group: of ranks that share the model; the shape is this one's.
        ops: the kernels, where they are another model's; None = they are to be selected."""
        self.shape, self.device, self.group = shape, device, group
        self.attention = attention
        self.dtype = TORCH_DTYPES[shape.dtype]
        widest = max(own.head_dim for own in shape.kinds)
        self.ops = ops or select_ops(self.dtype, device, widest, native, kernels,
                                     attention.exact_states)
        self.slopes: Tensor | None = None
        """f32[heads]: of this rank's heads, where scores fall with distance."""
        if shape.alibi:
            first = group.place.rank * shape.heads
            self.slopes = torch.tensor(shape.alibi[first:first + shape.heads], device=device)
        self.tape = RoutingTape()
        self.drafter: MtpDrafter | None = None
        """Of a model with a layer that drafts; who loads the model gives it one."""
        self.eagle: EagleHead | None = None
        """Likewise, of a model that a head of another checkpoint drafts for."""
        self.draft_model: LoadedModel | None = None
        """Likewise, a smaller model that drafts for it."""
        self.pooler: Pooler | None = None
        """Likewise, of a model that makes vectors or scores of prompts."""
        self.vision: VisionTower | None = None
        """Likewise, of a model that takes images."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether a step waits for the device, to read how its rows are routed to experts."""

    @abstractmethod
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """Run a step. batches and pools: of each group of attention layers; recurrent: None where
        no layer is.

        Returns [R, hidden], the rows `logit_rows` (in that order) before the final norm; with
        `all_rows`, all T of them.
        """

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """Final norm and head. rows: [R, hidden] -> [R, vocab]; see `head_logits`."""

    @abstractmethod
    def norm_rows(self, rows: Tensor) -> Tensor:
        """The final norm alone: [R, hidden]."""

    @abstractmethod
    def head_logits(self, normed: Tensor) -> Tensor:
        """The head alone. normed: [R, hidden] -> [R, vocab], f32 unless the device's sampler takes
        them as the product gives them (`Linear.logits`)."""

    def group_contexts(self, batches: Sequence[ForwardBatch],
                       pools: Sequence[KVPagePool]) -> list[GroupContext]:
        """How the rows of a step attend in each group of layers."""
        return [self.group_context(own, pool, group.window)
                for own, pool, group in zip(batches, pools, self.shape.groups, strict=True)]

    def group_context(self, batch: ForwardBatch, pool: KVPagePool, window: int) -> GroupContext:
        """The same of one group, or of a layer that drafts."""
        s, plan, chosen = self.shape, NO_ATTENTION, None
        if s.index is not None:
            chosen = ChosenTokens(batch, pool.page_size, s.index.chosen, s.attention_scale,
                                  self.attention.decode, self.ops.token_scores)
        elif s.attention_layers and not s.bidirectional:
            plan = plan_attention(batch, pool.page_size, window, s.attention_scale, self.attention,
                                  s.attention_cap, s.chunked, self.slopes)
        return GroupContext(batch.kv_index, pool.layers, plan, pool.scales, pool.index_keys,
                            chosen)


class Decoder(LoadedModel):
    """A decoder of our own layers. A family says which tensors a layer has, and makes the layer of
    them."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """Other forms in which checkpoints have some tensors of the i-th layer; their names begin
        with `at`."""
        return []

    @abstractmethod
    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        """The i-th layer of these weights."""

    @classmethod
    def fused(cls, s: ModelShape) -> list[Fused]:
        """Other forms in which checkpoints have some of `model_tensors`."""
        fused = [own for i in range(s.layers) for own in cls.layer_fused(s, i, layer_prefix(i))]
        names = mtp_names(s)
        return [*fused, *cls.layer_fused(s, s.layers, names.layer)] if names else fused

    def __init__(
        self, shape: ModelShape, tensors: WeightTensors, device: torch.device,
        attention: StepAttention, native: bool = True, kernels: str = "auto",
        group: RankGroup = LoneRank(), ops: TorchOps | None = None,
    ) -> None:
        """tensors: as `model_tensors` names them; they are taken out of the dict, but for those of
        the layer that drafts. The others: see `LoadedModel`; of a group, they are this rank's."""
        super().__init__(shape, device, attention, native, kernels, group, ops)
        if shape.bidirectional:
            self.no_graphs = NOTHING_DECODED
        self.products: list[NamedProduct] = []
        """All that were made, but for those in leaves; none once the model is loaded."""
        whole = LayerWeights(tensors, "", self.ops, shape.norm_plus_one, group, device=device,
                             made=self.products, tape=self.tape)
        # The largest first: what a layer is made of lies beside what was made before.
        self.embed, self.head = embedding_and_head(whole, shape)
        self.distances: Tensor | None = None
        """[heads, 2 * max_model_len - 1], see `distance_table`."""
        if shape.distance_buckets:
            self.distances = distance_table(whole.pop(DISTANCES), shape.max_model_len)
        self.layers = [self.load_layer(whole.under(layer_prefix(i)), i)
                       for i in range(shape.layers)]
        self.norm = whole.norm_of(shape, FINAL_NORM, device) if shape.final_norm else None
        self.embed_norm = whole.norm_of(shape, EMBED_NORM, device) if shape.embed_norm else None
        self.positions = whole.pop(POSITIONS) if shape.learned_positions else None
        self.types = whole.pop(TYPES) if shape.token_types else None
        self.load_more(whole)
        self.ropes = [table.to(device) for table in rope_tables(shape)]
        self.end_part: Head | None = None
        if self.head is not None and self.norm is not None:
            self.end_part = Head(self.norm, shape.norm_eps, self.head, shape.logit_scale,
                                 shape.logit_cap, shape.layer_norm)
        self.serves_adapters = False
        self.passes: tuple[str, ...] = ()
        """Names of those that are on."""
        self.runs: list[LayerRun] = []
        """Of each layer, and then `end`, of norm and head: made by `pass_manager.install`."""
        self.end: Callable[[Tensor], Tensor] = unmade

    @property
    def waits(self) -> bool:
        drafts = self.drafter is not None and self.drafter.waits
        return drafts or any(layer.waits for layer in self.layers)

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        batch = batches[0]
        hidden = self.embedded(batch.tokens, batch.turned_to, batch.types, batch.given)
        batch.given = None  # no layer's temporaries lie beside it
        ropes = [*self.ropes_at(batch.turned_to), *self.token_inputs(batch.tokens, hidden)]
        return self.run_layers(with_embeddings(batch.images, hidden), batches, pools, recurrent,
                               ropes)

    def run_layers(self, hidden: HiddenStream, batches: Sequence[ForwardBatch],
                   pools: Sequence[KVPagePool], recurrent: RecurrentBatch | None,
                   ropes: list[Tensor]) -> Tensor:
        """What `forward` does behind the embedding, whose rows `hidden` are; ropes: see `ropes_at`,
        and behind them `token_inputs`."""
        batch, step = batches[0], self.step_of(batches, pools, recurrent, ropes)
        *others, last = self.runs
        stream = [hidden]
        del hidden  # no other name: what a layer is given goes as soon as it has used it
        for i, run in enumerate(others):
            self._tap(i, stream[0], batch)
            stream.append(with_deepstack(batch.images, i, run.whole(stream.pop(), step)))
        self._tap(len(others), stream[0], batch)
        if batch.all_rows:
            return settled(last.whole(stream.pop(), step))
        return settled(last.few(stream.pop(), step, batch.logit_rows))

    def _tap(self, layer: int, stream: HiddenStream, batch: ForwardBatch) -> None:
        """Keep what goes into this layer, where a head drafts from it, or somebody asks for it; see
        `ForwardBatch`."""
        scale = self.shape.stream_scale
        if batch.hidden is not None and layer in batch.hidden.layers:
            batch.hidden.keep(layer, settled(stream), scale)
        if self.shape.eagle is not None and layer in self.shape.eagle.taps:
            # A layer may write to what it is given.
            own = stream.clone() if isinstance(stream, Tensor) else settled(stream)
            batch.tapped[layer] = own if scale == 1 else own * scale

    def embedded(self, tokens: Tensor, positions: Tensor, types: Tensor | None = None,
                 given: ImageRows | None = None) -> Tensor:
        """What goes into the first layer. tokens, positions, types: i64[T] -> [T, hidden]; types:
        None = all 0; given: of prompts that are embeddings."""
        hidden, scale, late = self.embeddings(tokens), self.shape.embed_scale, False
        if self.shape.scales_given:
            hidden, given = with_embeddings(given, hidden), None
        hidden = with_embeddings(given, hidden if scale == 1 else hidden * scale)
        if self.types is not None:
            alone = types is None or len(self.types) == 1
            hidden = hidden + (self.types[0] if alone else self.types[types])
        if self.embed_norm is not None and not (late := self.shape.bidirectional):
            hidden = self.ops.layer_norm(hidden, self.embed_norm, self.shape.norm_eps)
        if self.positions is not None:
            hidden = hidden + self.positions.index_select(0, positions)
        if late and self.embed_norm is not None:
            hidden = self.ops.layer_norm(hidden, self.embed_norm, self.shape.norm_eps)
        return hidden

    def token_inputs(self, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        """[T, layers * size] of what tokens give every layer by themselves (`TokenInputs`); nothing
        where they do not. tokens: i64[T]; hidden: [T, hidden], their embeddings."""
        return []

    def load_more(self, whole: LayerWeights) -> None:
        """Take what a family has beside layers, embeddings and head."""

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, not scaled. tokens: i64[T] -> [T, hidden]."""
        return self.looked_up(self.embed, tokens)

    def looked_up(self, table: Tensor | RowLookup, ids: Tensor) -> Tensor:
        """Rows of a table, which may be in codes. ids: i64[T]."""
        if isinstance(table, Tensor):
            return table.index_select(0, ids)
        return table.rows(ids, self.dtype)

    def ropes_at(self, positions: Tensor) -> list[Tensor]:
        """Returns the rope rows of a step: [T, 2, 1, head_dim] each. positions: i64[T]; or
        i64[3, T], of time, height and width."""
        if positions.dim() > 1:
            return [axis_rows(table, positions, rope.axes)
                    for table, rope in zip(self.ropes, self.shape.ropes, strict=True)]
        return [rope_rows(table, positions) for table in self.ropes]

    def step_of(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None, ropes: list[Tensor]) -> ForwardContext:
        """A step as the layers see it. ropes: see `run_layers`."""
        s, groups = self.shape, self.group_contexts(batches, pools)
        if s.bidirectional:
            lengths = [row.count for row in batches[0].extends]
            return ForwardContext(ropes, groups, None, [],
                                  self.ops.prompt_rows(lengths, self.device), self.distances)
        if recurrent is None or s.recurrence is None:
            return ForwardContext(ropes, groups, None, [])
        states = StatePlan(recurrent.rows, s.recurrence.width, self.device)
        return ForwardContext(ropes, groups, states, recurrent.pool.layers)

    def logits(self, rows: Tensor) -> Tensor:
        return self.end(rows)

    def norm_rows(self, rows: Tensor) -> Tensor:
        if self.norm is None:
            return rows
        own = self.ops.layer_norm if self.shape.layer_norm else self.ops.rms_norm
        return own(rows, self.norm, self.shape.norm_eps)

    def head_logits(self, normed: Tensor) -> Tensor:
        assert self.head is not None
        return logits(normed, self.head, self.shape.logit_scale, self.shape.logit_cap)


# --- Embedding and head --------------------------------------------------------------------------

def embedding_and_head(w: LayerWeights, s: ModelShape
                       ) -> tuple[Tensor | RowLookup, Linear | None]:
    """([V, hidden], or what gives its rows; the head), of one matrix where they are tied. Of
    several ranks, each has its rows of both. A bidirectional model has no head."""
    embed, looked_up = w.embedding(EMBED.removesuffix(".weight"), s.tied and not s.bidirectional)
    if s.bidirectional:
        alone = w.group.place.size == 1
        return embed if alone else SplitEmbedding(embed, s.vocab_size, w.group), None
    head = (looked_up if s.tied and looked_up
            else w.linear(s.head_bias, HEAD.removesuffix(".weight")))
    if w.group.place.size == 1:
        return embed, head
    return (SplitEmbedding(embed, s.vocab_size, w.group),
            SplitHead(head, s.vocabulary, w.group))


@dataclass(slots=True)
class Head:
    """The end of a model: the final norm and the head."""

    norm: Tensor
    eps: float
    product: Linear
    scale: float
    cap: float
    layer_norm: bool

    def forward(self, rows: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab], written plainly."""
        own = layer_norm if self.layer_norm else norm
        return logits(own(rows, self.norm, self.eps), self.product, self.scale, self.cap)


# --- Drafting ------------------------------------------------------------------------------------

@dataclass(slots=True)
class MtpDrafter:
    """The MTP layer of a model, chained for more than one draft: its own weights, beside the
    model's embedding, ropes and head."""

    model: Decoder
    token_norm: Tensor
    hidden_norm: Tensor
    join: Linear
    layer: Layer
    norm: Tensor
    run: LayerRun | None = None
    """Of the layer; see `Decoder.runs`."""

    @property
    def waits(self) -> bool:
        return self.layer.waits

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pool: KVPagePool,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[R, hidden], after the layer's norm, of `rows` (i64[R] of the T rows; None = all); keys
        and values of all T rows are written.

        hidden: [T, hidden], of each row after the model's final norm, or what this gave for it,
        further on in a chain. tokens: i64[T], the token after each row's. batch: positions,
        kv_index, extends and decodes as for a layer of full attention whose pages are `pool`'s;
        its tokens and logit_rows are not read.
        """
        m = self.model
        ops, eps = m.ops, m.shape.norm_eps
        token = ops.rms_norm(m.embeddings(tokens), self.token_norm, eps)
        hidden = self.join(torch.cat((token, ops.rms_norm(hidden, self.hidden_norm, eps)), -1))
        step = self._step(batch, pool, rows)
        assert self.run is not None
        last = (self.run.whole(hidden, step) if rows is None
                else self.run.few(hidden, step, rows))
        return ops.rms_norm(settled(last), self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, [R, hidden] -> [R, vocab], by the model's head."""
        return self.model.head_logits(hidden)

    def _step(self, batch: ForwardBatch, pool: KVPagePool, rows: Tensor | None) -> ForwardContext:
        m = self.model
        if batch.extends and rows is not None:  # only then does the plan look at them
            batch = replace(batch, all_rows=False, logit_rows=rows)
        return ForwardContext(m.ropes_at(batch.turned_to)[:1], [m.group_context(batch, pool, 0)],
                              None, [])


def load_drafter(model: Decoder, tensors: WeightTensors) -> MtpDrafter | None:
    """The drafter of these tensors, which are taken out of the dict; None where the shape has
    none."""
    s = model.shape
    names, whole = mtp_names(s), LayerWeights(tensors, "", model.ops, s.norm_plus_one, model.group,
                                              device=model.device)
    if names is None:
        return None
    return MtpDrafter(
        model, whole.norm(names.token_norm), whole.norm(names.hidden_norm),
        whole.joined(names.join), model.load_layer(whole.under(names.layer), s.layers),
        whole.norm(names.norm))
