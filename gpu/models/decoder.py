"""What the decoders of all families share: embeddings, a stack of layers, final norm and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.attention import rope_tables
from actorium.gpu.models.mtp import (
    Drafter,
    DraftNames,
    draft_fused,
    draft_wants,
    load_drafter,
)
from actorium.gpu.models.plan import GroupStep, StatePlan, Step, plan_attention
from actorium.gpu.models.weights import Weights
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch
from actorium.gpu.weights.loader import Fused, Want
from actorium.kernels.inputs import HiddenStream, Input, InputForm, Unnormed, settled
from actorium.kernels.ops import select_ops
from actorium.kernels.reference.paged_attention import AttentionOps
from actorium.kernels.reference.rope import rope_rows

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ATTENTION = "self_attn."
"""What the names of an attention's tensors begin with, in a layer of any family."""
NORMS = ("input_layernorm", "post_attention_layernorm")
"""Of a layer, before its mixer and before its MLP, as most families name them."""


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

    def before(self, x: Input, step: Step) -> Tensor:
        """[T, *], contiguous: what the tokens bring. x: [T, hidden], normed. Keys and values are
        written."""

    def between(self, p: Tensor, step: Step, rows: Tensor | None,
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


def norm_wants(at: str, s: ModelShape, names: Sequence[str] = NORMS) -> list[Want]:
    """Norms of a layer's input or output; `at` begins their names."""
    return [Want(f"{at}{name}.weight", (s.hidden,)) for name in names]


class Decoder(ABC):
    """A decoder with its weights on one device. A family says which tensors a layer has, and makes
    the layer of them."""

    @staticmethod
    @abstractmethod
    def layer_wants(s: ModelShape, i: int, at: str) -> list[Want]:
        """Names and shapes of the i-th layer's tensors; their names begin with `at`."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """Other forms in which checkpoints have some of them."""
        return []

    @staticmethod
    def draft_names(s: ModelShape) -> DraftNames | None:
        """Where checkpoints have the layer that drafts; None where the family has none. As a
        decoder layer its number is `s.layers`."""
        return None

    @abstractmethod
    def load_layer(self, w: Weights, i: int) -> Layer:
        """The i-th layer of these weights."""

    @classmethod
    def wants(cls, s: ModelShape) -> list[Want]:
        """Names and shapes of every tensor the model reads from a checkpoint."""
        wants = [Want(EMBED, (s.vocab_size, s.hidden)), Want(NORM, (s.hidden,))]
        if not s.tied:
            wants.append(Want(HEAD, (s.vocab_size, s.hidden)))
        wants += [want for i in range(s.layers) for want in cls.layer_wants(s, i, _at(i))]
        return wants + draft_wants(cls, s)

    @classmethod
    def attention_modules(cls, s: ModelShape) -> list[str]:
        """What the names of each attention layer's tensors begin with; that of a layer that drafts
        is the last."""
        found = [f"{_at(i)}{ATTENTION}" for i in range(s.layers) if i not in s.recurrent]
        names = cls.draft_names(s) if s.mtp_layers else None
        return [*found, f"{names.layer}{ATTENTION}"] if names else found

    @classmethod
    def fused(cls, s: ModelShape) -> list[Fused]:
        """Other forms in which checkpoints have some of them."""
        fused = [own for i in range(s.layers) for own in cls.layer_fused(s, i, _at(i))]
        return fused + draft_fused(cls, s)

    def __init__(
        self, shape: ModelShape, tensors: dict[str, Tensor], device: torch.device,
        native: bool = True, kernels: str = "auto",
    ) -> None:
        """tensors: as `wants` names them; they are taken out of the dict.
        native: C kernels where they can be had, on as many threads as torch has now.
        kernels: see `select_ops`, which may raise `ValueError`."""
        self.shape, self.device = shape, device
        self.ops = select_ops(shape.dtype, device, shape.head_dim, native, kernels)
        whole = Weights(tensors, "", self.ops, shape.norm_plus_one)
        self.layers = [self.load_layer(whole.under(_at(i)), i) for i in range(shape.layers)]
        self.norm = whole.norm(NORM.removesuffix(".weight"))
        self.embed = tensors.pop(EMBED)
        self.head = self.ops.linear(self.embed if shape.tied else tensors.pop(HEAD))
        self.ropes = [table.to(device) for table in rope_tables(shape)]
        self.drafter: Drafter | None = load_drafter(self, whole)

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

    def mix(self, layer: Layer, hidden: HiddenStream, step: Step,
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
              step: Step) -> tuple[Input | None, Tensor, Tensor]:
        """Up to the middle of a layer: its normed input, if the mixer takes it again; what
        `Mixer.before` gives; and the layer's input, summed."""
        mixer = layer.mixer
        x, total = self.ops.norm(hidden, layer.mixer_norm, self.shape.norm_eps, mixer.form)
        return x if mixer.rereads else None, mixer.before(x, step), total

    def leave(self, layer: Layer, y: Tensor, x: Input | None, hidden: Tensor) -> HiddenStream:
        """On from there to the layer's end; see `Mixer.after`."""
        return self.feed(layer, layer.mixer.after(y, x, hidden))

    def step_of(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None, ropes: list[Tensor]) -> Step:
        """A step as the layers see it. ropes: see `ropes_at`."""
        s = self.shape
        groups = [GroupStep(own.kv_index, pool.layers, plan_attention(
                      own, pool.page_size, group.window, s.attention_scale, self.attention_ops))
                  for own, pool, group in zip(batches, pools, s.groups, strict=True)]
        if recurrent is None or s.recurrence is None:
            return Step(ropes, groups, None, [])
        states = StatePlan(recurrent.rows, s.recurrence.width, self.device)
        return Step(ropes, groups, states, recurrent.pool.layers)

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


def _at(i: int) -> str:
    return f"model.layers.{i}."
