"""Drafting: the layer of a checkpoint that predicts the token after the next (multi-token
prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2), in DeepSeek's and in Qwen's form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actorium.gpu.attention.attention_plan import plan_attention
from actorium.gpu.families.architectures import mtp_names
from actorium.gpu.models.decoder import Decoder, Layer, LayerRun
from actorium.gpu.models.forward_context import ForwardContext, GroupContext
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.weights.lazy_tensors import WeightTensors
from actorium.kernels.inputs import settled
from actorium.kernels.linear import Linear


@dataclass(slots=True)
class MtpDrafter:
    """A `Drafter`: its own weights, beside the model's embedding, ropes and head."""

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
        """See `Drafter`."""
        return self.layer.mlp.waits

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pool: KVPagePool,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `Drafter`."""
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
        """See `Drafter`."""
        return self.model.head_logits(hidden)

    def _step(self, batch: ForwardBatch, pool: KVPagePool, rows: Tensor | None) -> ForwardContext:
        m = self.model
        if batch.extends and rows is not None:  # only then does the plan look at them
            batch = replace(batch, all_rows=False, logit_rows=rows)
        plan = plan_attention(batch, pool.page_size, 0, m.shape.attention_scale, m.attention)
        return ForwardContext(m.ropes_at(batch.turned_to)[:1],
                    [GroupContext(batch.kv_index, pool.layers, plan, pool.scales)], None, [])


def load_drafter(model: Decoder, tensors: WeightTensors) -> MtpDrafter | None:
    """The drafter of these tensors, which are taken out of the dict; None where the shape has
    none."""
    s = model.shape
    names, whole = mtp_names(s), LayerWeights(tensors, "", model.ops, s.norm_plus_one, model.group)
    if names is None:
        return None
    return MtpDrafter(
        model, whole.norm(names.token_norm), whole.norm(names.hidden_norm),
        whole.joined(names.join), model.load_layer(whole.under(names.layer), s.layers),
        whole.norm(names.norm))
