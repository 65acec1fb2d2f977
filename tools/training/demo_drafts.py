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

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    apply_rotary_pos_emb,
)

from actorium.tools.training import demo_net
from actorium.tools.training.demo_batches import TextSource, TrainingBatch
from actorium.tools.training.trainer import Team, Trainer

TRAINED_DRAFTS = 2
"""Streams that a training step makes."""
_RATE = 1e-2
"""Learning rate; the initial weights are close to the final ones."""


class Entries(NamedTuple):
    """Keys and values of a stream, [B, kv heads, T, dim]."""

    k: Tensor
    v: Tensor


class Mtp(nn.Module):
    """One layer, applied again for every further draft."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        layer = Qwen3_5DecoderLayer(config, config.layer_types.index(demo_net.ATTENTION))
        demo_net.init_layer(layer)
        self.layers = nn.ModuleList([layer])
        self.norm = Qwen3_5RMSNorm(size, eps)
        with torch.no_grad():  # begins close to the sum of both, which the projection can read
            nn.init.normal_(self.fc.weight, std=0.2 * (2 * size)**-0.5)
            self.fc.weight.add_(torch.eye(size).repeat(1, 2), alpha=0.7)
            self.norm.weight.fill_(-0.5)

    def forward(self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor],
                earlier: list[Entries]) -> Tensor:
        """embedded: of token j + 1 at position j; hidden: of token j, or of the stream before at
        position j - 1; both [B, T, hidden]. turn: cosines and sines of the positions. earlier: of
        the streams before; this one's is added.

        Returns [B, T, hidden] after the norm.
        """
        layer, own = self.layers[0], self.layers[0].self_attn
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded),
                               self.pre_fc_norm_hidden(hidden)), -1))
        normed, heads = layer.input_layernorm(x), (*x.shape[:2], -1, own.head_dim)
        q, gate = own.q_proj(normed).view(*x.shape[:2], -1, 2, own.head_dim).unbind(3)
        k, v = own.k_proj(normed).view(heads), own.v_proj(normed).view(heads).transpose(1, 2)
        q, k = apply_rotary_pos_emb(own.q_norm(q).transpose(1, 2), own.k_norm(k).transpose(1, 2),
                                    *turn)
        earlier.append(Entries(k, v))
        mixed = attend(q, earlier).transpose(1, 2) * gate.sigmoid()
        x = x + own.o_proj(mixed.flatten(2))
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


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


def drafts(model: Qwen3_5ForCausalLM, mtp: Mtp, ids: Tensor, hidden: Tensor, count: int
           ) -> list[Tensor]:
    """The streams' outputs, each [B, T, hidden]; ids: [B, T], hidden: the model's for them.

    Position j of each drafts token j + 2 (the last two of a row and the first ones of later streams
    mean nothing); logits are made by the model's head.
    """
    t = ids.shape[1]
    turn = model.model.rotary_emb(hidden, torch.arange(t).expand(3, 1, t))
    embedded = model.model.embed_tokens(F.pad(ids[:, 1:], (0, 1)))
    earlier: list[Entries] = []
    outputs: list[Tensor] = []
    for _ in range(count):
        outputs.append(mtp(embedded, hidden, turn, earlier))
        hidden = F.pad(outputs[-1], (0, 0, 1, 0))[:, :t]
    return outputs


def draft_loss(model: Qwen3_5ForCausalLM, mtp: Mtp, batch: TrainingBatch) -> Tensor:
    """Returns the cross-entropy of the first and second draft of the batch's tokens against the
    model's own distribution, summed over the batch's weights. The model is not trained by it."""
    with torch.no_grad():
        hidden = demo_net.hidden(model, batch.ids)
        said = model.lm_head(hidden.flatten(0, 1)[batch.where]).float().softmax(-1)
    loss = torch.zeros(())
    for i, output in enumerate(drafts(model, mtp, batch.ids, hidden, TRAINED_DRAFTS)):
        # The first i + 1 positions of a row are no place for this draft.
        counted = batch.weights * (batch.where % batch.ids.shape[1] > i + 1)
        logits = model.lm_head(output.flatten(0, 1)[(batch.where - 1).clamp_min(0)]).float()
        loss = loss - ((said * logits.log_softmax(-1)).sum(-1) * counted).sum()
    return loss / TRAINED_DRAFTS


def load_drafting(folder: Path) -> tuple[Qwen3_5ForCausalLM, Mtp | None]:
    """The model in a folder, and its MTP layer if it has one; both in fp32."""
    model, weights = demo_net.load(folder)
    if not weights:
        return model, None
    mtp = Mtp(model.config)
    mtp.load_state_dict(weights)
    return model, mtp


def begin(out: Path, seed: int, share: float, team: Team
          ) -> tuple[Trainer[TrainingBatch], Callable[[], None]]:
    """The MTP layer of the checkpoint in `out`, or a new one; and what writes it there."""
    tokenizer, (model, mtp) = Tokenizer.from_file(f"{out}/tokenizer.json"), load_drafting(out)
    made = mtp or Mtp(model.config)
    loss = demo_net.of_part(lambda b: draft_loss(model.requires_grad_(False), made, b), team)
    source = TextSource(tokenizer, seed + int(1000 * share))
    return Trainer(made, loss, source.drafts, team, _RATE), lambda: demo_net.save(
        model, dict(made.named_parameters()), out, demo_net.end_tokens(tokenizer))
