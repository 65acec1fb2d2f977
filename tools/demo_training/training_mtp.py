"""The demo model's MTP layer: drafts the token after the next one, and those that follow.

As in Qwen3.5, x = fc(cat[norm(embedding of token t + 1), norm(h_t)]) goes through one attention
layer, a norm and the model's own output projection; h_t is what the model's final norm gives for
token t. The next draft takes the layer's own output, after its norm, for h.

In training the drafts of all positions are made at once, in streams: stream 1 makes every first
draft, stream 2 every second one. Position j of stream s takes token j + 1 and drafts token j + 2; a
second draft sees what an engine has in its cache at that time: entries of stream 1 up to j - 1,
made from the model's hidden states, and its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorium.tools.demo_training.training_data import TrainingBatch
from actorium.tools.demo_training.training_model import (
    ATTENTION,
    DemoLayer,
    DemoModel,
    DemoShape,
    Norm,
    linear,
    times,
)

TRAINED_DRAFTS = 2
"""Streams that a training step makes."""


class Entries(NamedTuple):
    """Keys and values of a stream, [B, kv heads, T, dim]."""

    k: Tensor
    v: Tensor


class Mtp(nn.Module):
    """One layer, applied again for every further draft."""

    def __init__(self, s: DemoShape) -> None:
        super().__init__()
        self.s = s
        self.pre_fc_norm_embedding = Norm(s.hidden, s.eps)
        self.pre_fc_norm_hidden = Norm(s.hidden, s.eps)
        self.fc = linear(s.hidden, 2 * s.hidden)
        with torch.no_grad():  # begins close to the sum of both, which the projection can read
            self.fc.weight.mul_(0.2).add_(torch.eye(s.hidden).repeat(1, 2), alpha=0.7)
        self.layers = nn.ModuleList([DemoLayer(s, ATTENTION)])
        self.norm = Norm(s.hidden, s.eps, -0.5)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, earlier: list[Entries]
    ) -> Tensor:
        """embedded: of token j + 1 at position j; hidden: of token j, or of the stream before at
        position j - 1; both [B, T, hidden]. earlier: of the streams before; this one's is added.

        Returns [B, T, hidden] after the norm.
        """
        layer = self.layers[0]
        assert isinstance(layer, DemoLayer)
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = times(torch.cat(parts, -1), self.fc)
        attention = layer.self_attn
        q, k, v, gate = attention.project(layer.input_layernorm(x), cos, sin)
        earlier.append(Entries(k, v))
        x = x + attention.gated(attend(q, earlier), gate)
        normed: Tensor = self.norm(layer.finish(x))
        return normed


def attend(q: Tensor, streams: list[Entries]) -> Tensor:
    """Computes attention of the last of these streams. q: [B, heads, T, dim] -> the same.

    Of n streams the first is seen up to n - 1 positions back, and the i-th one, counted from 0, at
    exactly n - 1 - i positions back.
    """
    (b, heads, t, dim), (first, *others) = q.shape, streams
    kv, back = first.k.shape[1], len(others)
    group = heads // kv
    hidden = torch.full((t, t), float("-inf"), dtype=q.dtype).triu(1 - back).repeat(group, 1)
    rows = q.reshape(b, kv, group * t, dim) * dim**-0.5
    scores = [rows @ first.k.transpose(2, 3) + hidden]
    values = []
    for i, entries in enumerate(others, 1):
        k, v = (_shifted(x, back - i).repeat(1, 1, group, 1) for x in entries)
        alone = (rows * k).sum(-1, keepdim=True)
        if back > i:
            alone = alone.masked_fill(_early(t, back - i, group), float("-inf"))
        scores.append(alone)
        values.append(v)
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :t] @ first.v
    for i, v in enumerate(values):
        out = out + weights[..., t + i, None] * v
    return out.view(b, heads, t, dim)


def _shifted(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]] if by else x


def _early(t: int, by: int, group: int) -> Tensor:
    """Returns [group * T, 1]: the positions that have nothing that far back."""
    return (torch.arange(t) < by).repeat(group).unsqueeze(-1)


def drafts(model: DemoModel, mtp: Mtp, ids: Tensor, hidden: Tensor, count: int) -> list[Tensor]:
    """The streams' outputs, each [B, T, hidden]; ids: [B, T], hidden: the model's for them.

    Position j of each drafts token j + 2 (the last two of a row and the first ones of later streams
    mean nothing); logits are the product with `model.table`.
    """
    t = ids.shape[1]
    cos, sin = model.cos[:t], model.sin[:t]
    embedded = F.embedding(F.pad(ids[:, 1:], (0, 1)), model.table)
    earlier: list[Entries] = []
    outputs: list[Tensor] = []
    for _ in range(count):
        outputs.append(mtp(embedded, hidden, cos, sin, earlier))
        hidden = F.pad(outputs[-1], (0, 0, 1, 0))[:, :t]
    return outputs


def draft_loss(model: DemoModel, mtp: Mtp, batch: TrainingBatch) -> Tensor:
    """Returns the cross-entropy of the first and second draft of the batch's tokens against the
    model's own distribution, summed over the batch's weights. The model is not trained by it."""
    with torch.no_grad():
        hidden = model.hidden(batch.ids)
        said = F.linear(hidden.flatten(0, 1)[batch.where], model.table).float().softmax(-1)
    loss, table = torch.zeros(()), model.table.detach()
    for i, output in enumerate(drafts(model, mtp, batch.ids, hidden, TRAINED_DRAFTS)):
        # The first i + 1 positions of a row are no place for this draft.
        counted = batch.weights * (batch.where % batch.ids.shape[1] > i + 1)
        logits = F.linear(output.flatten(0, 1)[(batch.where - 1).clamp_min(0)], table).float()
        loss = loss - ((said * logits.log_softmax(-1)).sum(-1) * counted).sum()
    return loss / TRAINED_DRAFTS
