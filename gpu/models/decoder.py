"""What the decoders of all families share: embeddings, a stack of layers, final norm and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actorium.gpu.families.architectures import mtp_names
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import EMBED, FINAL_NORM, HEAD, layer_prefix
from actorium.gpu.models.forward_context import (
    ForwardContext,
    GroupContext,
    StatePlan,
    plan_attention,
)
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.rotary import rope_tables
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.loader import Fused
from actorium.kernels.backends import select_ops
from actorium.kernels.inputs import HiddenStream, Input, InputForm, Unnormed, settled
from actorium.kernels.reference.paged_attention import AttentionOps
from actorium.kernels.reference.rope import rope_rows


class Mixer(Protocol):
    """Attention, or a recurrent layer, cut in three: only in the middle do tokens of a sequence
    meet. What comes before and behind works token by token, and its launches depend on nothing but
    the number of tokens."""

    @property
    def inner(self) -> int:
        """Width of what `between` gives."""

    @property
    def form(self) -> InputForm:
        """In which form `before` is best given x; see `Linear`."""

    @property
    def rereads(self) -> bool:
        """Whether `after` takes x as well."""

    def before(self, x: Input, step: ForwardContext) -> Tensor:
        """[T, *], contiguous: what the tokens bring. x: [T, hidden], normed. Keys and values are
        written."""

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None,
                out: Tensor | None = None) -> Tensor:
        """[T, inner], or those `rows` of it; p: what `before` gave. States go on by the step's
        tokens. out: [T, inner], contiguous, to be written to; not with `rows`."""

    def after(self, y: Tensor, x: Input | None, hidden: Tensor) -> HiddenStream:
        """hidden + the layer's output: [R, hidden], perhaps in the memory of `hidden`. y: what
        `between` gave; x, hidden: its rows of what the layer was given, x where `rereads`."""


class Mlp(Protocol):
    """A dense MLP, or a mixture of experts."""

    @property
    def waits(self) -> bool:
        """Whether the host must be told how experts share out the rows, before it can go on."""

    @property
    def form(self) -> InputForm:
        """In which form x is best given; see `Linear`."""

    def add(self, x: Input, residual: Tensor) -> HiddenStream:
        """residual + the MLP of x, both [T, hidden]."""


@dataclass(slots=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    mlp: Mlp
    mixer_norm: Tensor
    mlp_norm: Tensor


class Drafter(Protocol):
    """The MTP layer of a model, chained for more than one draft."""

    @property
    def waits(self) -> bool:
        """See `Mlp`."""

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

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, [R, hidden] -> [R, vocab], by the model's head: see
        `Decoder.head_logits`."""


class Decoder(ABC):
    """A decoder with its weights on one device. A family says which tensors a layer has, and makes
    the layer of them."""

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
        self, shape: ModelShape, tensors: dict[str, Tensor], device: torch.device,
        native: bool = True, kernels: str = "auto",
    ) -> None:
        """tensors: as `model_tensors` names them; they are taken out of the dict, but for those of
        the layer that drafts.
        native: C kernels where they can be had, on as many threads as torch has now.
        kernels: see `select_ops`, which may raise `ValueError`."""
        self.shape, self.device, self.dtype = shape, device, TORCH_DTYPES[shape.dtype]
        self.ops = select_ops(self.dtype, device, shape.head_dim, native, kernels)
        whole = LayerWeights(tensors, "", self.ops, shape.norm_plus_one)
        self.layers = [self.load_layer(whole.under(layer_prefix(i)), i)
                       for i in range(shape.layers)]
        self.norm = whole.norm(FINAL_NORM.removesuffix(".weight"))
        self.embed = tensors.pop(EMBED)
        self.head = self.ops.linear(self.embed if shape.tied else tensors.pop(HEAD))
        self.ropes = [table.to(device) for table in rope_tables(shape)]
        self.drafter: Drafter | None = None
        """Of a model with a layer that drafts; who loads the model gives it one."""

    @property
    def attention_ops(self) -> AttentionOps:
        """Kernels of attention over what the pages of this model hold."""
        latent = self.shape.latent
        return self.ops.latent(latent.rank) if latent else self.ops

    @property
    def waits(self) -> bool:
        """Whether a step waits for the device, to be told how experts share out its rows."""
        drafts = self.drafter is not None and self.drafter.waits
        return drafts or any(layer.mlp.waits for layer in self.layers)

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """Run a step. batches and pools: of each group of attention layers; recurrent: None where
        no layer is.

        Returns [R, hidden], the rows `logit_rows` (in that order) before the final norm; with
        `all_rows`, all T of them.
        """
        batch = batches[0]
        hidden: HiddenStream = self.embedded(batch.tokens)
        step = self.step_of(batches, pools, recurrent, self.ropes_at(batch.positions))
        for i, layer in enumerate(self.layers):
            last = i == len(self.layers) - 1 and not batch.all_rows
            # Two calls, so that what the mixer has made is gone when the MLP is run.
            hidden = self.mix(layer, hidden, step, batch.logit_rows if last else None)
            hidden = self.feed(layer, hidden)
        return settled(hidden)

    def embedded(self, tokens: Tensor) -> Tensor:
        """What goes into the first layer. tokens: i64[T] -> [T, hidden]."""
        hidden, scale = self.embed.index_select(0, tokens), self.shape.embed_scale
        return hidden if scale == 1 else hidden * scale

    def ropes_at(self, positions: Tensor) -> list[Tensor]:
        """Those of a step: [T, 2, 1, head_dim] each. positions: i64[T]."""
        return [rope_rows(table, positions) for table in self.ropes]

    def mix(self, layer: Layer, hidden: HiddenStream, step: ForwardContext,
            rows: Tensor | None = None) -> HiddenStream:
        """hidden + what a layer's mixer gives, [T, hidden]; or those `rows` of it."""
        x, p, total = self.enter(layer, hidden, step)
        del hidden  # its parts are of no more use
        y = layer.mixer.between(p, step, rows)
        if rows is not None:
            x = None if x is None else x.index_select(0, rows)
            total = total.index_select(0, rows)
        return layer.mixer.after(y, x, total)

    def feed(self, layer: Layer, hidden: HiddenStream) -> HiddenStream:
        """hidden + what its MLP gives."""
        x, total = self.ops.norm(hidden, layer.mlp_norm, self.shape.norm_eps, layer.mlp.form)
        return layer.mlp.add(x, total)

    def enter(self, layer: Layer, hidden: HiddenStream,
              step: ForwardContext) -> tuple[Input | None, Tensor, Tensor]:
        """Up to the middle of a layer: its normed input, if the mixer takes it again; what
        `Mixer.before` gives; and the layer's input, summed."""
        mixer = layer.mixer
        x, total = self.ops.norm(hidden, layer.mixer_norm, self.shape.norm_eps, mixer.form)
        return x if mixer.rereads else None, mixer.before(x, step), total

    def leave(self, layer: Layer, y: Tensor, x: Input | None, hidden: Tensor) -> HiddenStream:
        """On from there to the layer's end; see `Mixer.after`."""
        return self.feed(layer, layer.mixer.after(y, x, hidden))

    def step_of(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None, ropes: list[Tensor]) -> ForwardContext:
        """A step as the layers see it. ropes: see `ropes_at`."""
        s = self.shape
        groups = [GroupContext(own.kv_index, pool.layers, plan_attention(
                      own, pool.page_size, group.window, s.attention_scale, self.attention_ops))
                  for own, pool, group in zip(batches, pools, s.groups, strict=True)]
        if recurrent is None or s.recurrence is None:
            return ForwardContext(ropes, groups, None, [])
        states = StatePlan(recurrent.rows, s.recurrence.width, self.device)
        return ForwardContext(ropes, groups, states, recurrent.pool.layers)

    def logits(self, rows: Tensor) -> Tensor:
        """Final norm and head. rows: [R, hidden] -> [R, vocab]; see `head_logits`."""
        form = self.head.form
        if self.shape.logit_scale == 1 and form.norms is not None and form.norms(len(rows)):
            return self.head.logits(Unnormed(rows, self.norm, self.shape.norm_eps))
        return self.head_logits(self.norm_rows(rows))

    def norm_rows(self, rows: Tensor) -> Tensor:
        """The final norm alone: [R, hidden]."""
        return self.ops.rms_norm(rows, self.norm, self.shape.norm_eps)

    def head_logits(self, normed: Tensor) -> Tensor:
        """The head alone. normed: [R, hidden] -> [R, vocab], f32 unless the device's sampler takes
        them as the product gives them (`Linear.logits`)."""
        if self.shape.logit_scale == 1:
            return self.head.logits(normed)
        return self.head.wide(normed).mul_(self.shape.logit_scale)
