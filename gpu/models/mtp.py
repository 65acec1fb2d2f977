"""Drafting: the layer of a checkpoint that predicts the token after the next (multi-token
prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2), in DeepSeek's and in Qwen's form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.plan import GroupStep, Step, plan_attention
from actorium.gpu.models.weights import Weights
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.weights.loader import Fused, Want
from actorium.kernels.inputs import settled
from actorium.kernels.linear import Linear
from actorium.kernels.reference.rope import rope_rows

if TYPE_CHECKING:
    from actorium.gpu.models.decoder import Decoder, Layer


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


class DraftNames(NamedTuple):
    """Where checkpoints have the layer; one whose config tells of several has the first there."""

    layer: str
    """What the names of its decoder layer's tensors begin with."""
    join: str
    """The projection of token and hidden together."""
    token_norm: str
    hidden_norm: str
    norm: str
    """Of what the layer gives."""


def deepseek_names(s: ModelShape) -> DraftNames:
    """DeepSeek-V3: a layer behind the others. The copies of embedding and head that it may have are
    not read."""
    at = f"model.layers.{s.layers}."
    return DraftNames(at, f"{at}eh_proj", f"{at}enorm", f"{at}hnorm", f"{at}shared_head.norm")


def qwen_names(_: ModelShape) -> DraftNames:
    """Qwen3-Next and Qwen3.5."""
    return DraftNames("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding",
                      "mtp.pre_fc_norm_hidden", "mtp.norm")


def draft_wants(kind: type[Decoder], s: ModelShape) -> list[Want]:
    """Tensors of the layer; none where the shape has none."""
    names = kind.draft_names(s) if s.mtp_layers else None
    if names is None:
        return []
    return [*kind.layer_wants(s, s.layers, names.layer),
            Want(f"{names.join}.weight", (s.hidden, 2 * s.hidden)),
            *(Want(f"{name}.weight", (s.hidden,)) for name in names[2:])]


def draft_fused(kind: type[Decoder], s: ModelShape) -> list[Fused]:
    """Other forms in which checkpoints have some of them."""
    names = kind.draft_names(s) if s.mtp_layers else None
    return kind.layer_fused(s, s.layers, names.layer) if names else []


@dataclass(slots=True)
class MtpDrafter:
    """A `Drafter`: its own weights, beside the model's embedding, ropes and head."""

    model: Decoder
    token_norm: Tensor
    hidden_norm: Tensor
    join: Linear
    layer: Layer
    norm: Tensor

    @property
    def waits(self) -> bool:
        """See `Drafter`."""
        return self.layer.mlp.waits

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pool: KVPagePool,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `Drafter`."""
        m, layer = self.model, self.layer
        ops, eps = m.ops, m.shape.norm_eps
        token = ops.rms_norm(m.embed.index_select(0, tokens), self.token_norm, eps)
        hidden = self.join(torch.cat((token, ops.rms_norm(hidden, self.hidden_norm, eps)), -1))
        step = self._step(batch, pool, rows)
        last = m.feed(layer, m.mix(layer, hidden, step, rows))
        return ops.rms_norm(settled(last), self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Drafter`."""
        return self.model.head_logits(hidden)

    def _step(self, batch: ForwardBatch, pool: KVPagePool, rows: Tensor | None) -> Step:
        m = self.model
        if batch.extends and rows is not None:  # only then does the plan look at them
            batch = replace(batch, all_rows=False, logit_rows=rows)
        plan = plan_attention(batch, pool.page_size, 0, m.shape.attention_scale, m.attention_ops)
        return Step([rope_rows(m.ropes[0], batch.positions)],
                    [GroupStep(batch.kv_index, pool.layers, plan)], None, [])


def load_drafter(model: Decoder, whole: Weights) -> MtpDrafter | None:
    """The drafter of these weights; None where the shape has none."""
    s = model.shape
    names = model.draft_names(s) if s.mtp_layers else None
    if names is None:
        return None
    return MtpDrafter(
        model, whole.norm(names.token_norm), whole.norm(names.hidden_norm),
        whole.linear(False, names.join), model.load_layer(whole.under(names.layer), s.layers),
        whole.norm(names.norm))
