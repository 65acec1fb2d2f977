"""What the decoders of all families share: embeddings, a stack of layers, final norm and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actorium.gpu.batch import ForwardBatch
from actorium.gpu.loader import Fused, Want
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
from actorium.gpu.pools import PagePool
from actorium.gpu.shape import ModelShape
from actorium.gpu.states import Recurrent
from actorium.kernels.attention import AttentionOps
from actorium.kernels.ops import select_ops
from actorium.kernels.rope import rope_rows

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Mixer(Protocol):
    """Attention, or a recurrent layer."""

    def __call__(self, x: Tensor, hidden: Tensor, step: Step, rows: Tensor | None) -> Tensor:
        """hidden + the layer's output for x, both [T, hidden]; with `rows`, those rows of it.

        Keys and values are written before they are attended; states go on by the step's tokens.
        """


class Mlp(Protocol):
    """A dense MLP, or a mixture of experts."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the MLP of x, both [T, hidden]."""


@dataclass(slots=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    mlp: Mlp
    mixer_norm: Tensor
    mlp_norm: Tensor


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
        return self.ops.latent if self.shape.latent else self.ops

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[PagePool],
                recurrent: Recurrent | None = None) -> Tensor:
        """Run a step. batches and pools: of each group of attention layers; recurrent: None where
        no layer is.

        Returns [R, hidden], the rows `logit_rows` (in that order) before the final norm; with
        `all_rows`, all T of them.
        """
        s, ops, batch = self.shape, self.ops, batches[0]
        hidden = self.embed.index_select(0, batch.tokens)
        if s.embed_scale != 1:
            hidden = hidden * s.embed_scale
        step = self._step(batches, pools, recurrent)
        for i, layer in enumerate(self.layers):
            last = i == len(self.layers) - 1 and not batch.all_rows
            rows = batch.logit_rows if last else None
            hidden = layer.mixer(ops.rms_norm(hidden, layer.mixer_norm, s.norm_eps), hidden, step,
                                 rows)
            hidden = layer.mlp.add(ops.rms_norm(hidden, layer.mlp_norm, s.norm_eps), hidden)
        return hidden

    def _step(self, batches: Sequence[ForwardBatch], pools: Sequence[PagePool],
              recurrent: Recurrent | None) -> Step:
        s = self.shape
        groups = [GroupStep(own.kv_index, pool.layers, plan_attention(
                      own, pool.page_size, group.window, s.attention_scale, self.attention_ops))
                  for own, pool, group in zip(batches, pools, s.groups, strict=True)]
        ropes = [rope_rows(table, batches[0].positions) for table in self.ropes]
        if recurrent is None or s.recurrence is None:
            return Step(ropes, groups, None, [])
        states = StatePlan(recurrent.rows, s.recurrence.width, self.device)
        return Step(ropes, groups, states, recurrent.pool.layers)

    def logits(self, rows: Tensor) -> Tensor:
        """Final norm and head. rows: [R, hidden] -> f32[R, vocab]."""
        return self.head_logits(self.norm_rows(rows))

    def norm_rows(self, rows: Tensor) -> Tensor:
        """The final norm alone: [R, hidden]."""
        return self.ops.rms_norm(rows, self.norm, self.shape.norm_eps)

    def head_logits(self, normed: Tensor) -> Tensor:
        """The head alone. normed: [R, hidden] -> f32[R, vocab]."""
        wide = self.head.wide(normed)
        return wide if self.shape.logit_scale == 1 else wide.mul_(self.shape.logit_scale)


def _at(i: int) -> str:
    return f"model.layers.{i}."
