"""EAGLE-3 heads (arXiv 2503.01840): a decoder layer that drafts from a model's hidden states.

A row takes the hidden states of position p, of several of the model's layers, and token p + 1. The
hidden states become one (`join`); attention takes it, normed, beside the token's embedding, normed.
What the layer gives is normed for the head, and goes on as it is, in the place of the hidden state,
where a chain drafts the token after."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import resolve
from actorium.gpu.attention.backend_choice import StepAttention, select_attention
from actorium.gpu.families.eagle_config import (
    HIDDEN_NORM,
    IGNORED,
    JOIN,
    LAYER,
    NAMES,
    eagle_tensors,
)
from actorium.gpu.families.model_shape import EagleShape
from actorium.gpu.families.tensor_specs import ATTENTION, EMBED, FINAL_NORM
from actorium.gpu.models.attention import Attention, attention
from actorium.gpu.models.forward_context import ForwardContext, GroupContext, plan_attention
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import Dense, dense
from actorium.gpu.models.rotary import rope_tables
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.loader import Progress, read_tensors
from actorium.gpu.weights.random_weights import random_tensors
from actorium.gpu.weights.safetensors_reader import checkpoint_files
from actorium.kernels.linear import Linear
from actorium.kernels.reference.rope import rope_rows
from actorium.kernels.reference.torch_ops import TorchOps

Embed = Callable[[Tensor], Tensor]
"""i64[T], tokens -> [T, hidden]."""


@dataclass(slots=True)
class EagleHead:
    """A head with its weights, beside the model that it drafts for. Of several ranks, each has the
    whole head: the hidden states that it takes are the same on all of them, and so are the drafts.
    """

    shape: EagleShape
    ops: TorchOps
    backends: StepAttention
    embed: Embed
    join: Linear
    token_norm: Tensor
    hidden_norm: Tensor
    mlp_norm: Tensor
    norm: Tensor
    attention: Attention
    mlp: Dense
    product: Linear
    """From hidden states to logits of the drafts' vocabulary."""
    targets: Tensor | None
    """i64[drafts' vocabulary]: the model's token that each is; None: its own number."""
    rope: Tensor

    def joined(self, tapped: dict[int, Tensor]) -> Tensor:
        """[T, hidden] of the model's hidden states before layers, [T, width] each."""
        return self.join(torch.cat([tapped[i] for i in self.shape.taps], -1))

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pool: KVPagePool,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[R, hidden], before the norm, of `rows` (i64[R] of the T rows; None = all); keys and
        values of all T rows are written.

        hidden: [T, hidden], `joined`, or what this gave for each row, further on in a chain. The
        others: see `MtpDrafter.forward`.
        """
        own, ops, eps = self.attention, self.ops, self.shape.layer.norm_eps
        step = self._step(batch, pool, rows)
        normed = ops.rms_norm(hidden, self.hidden_norm, eps)
        token = ops.rms_norm(self.embed(tokens), self.token_norm, eps)
        p = own.rotate_write(own.qkv(torch.cat((token, normed), -1)), step)
        residual = normed if self.shape.norm_first else hidden
        if rows is not None:
            residual = residual.index_select(0, rows)
        hidden = own.o(own.between(p, step, rows)) + residual
        return self.mlp(ops.rms_norm(hidden, self.mlp_norm, eps)) + hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, [R, hidden] -> [R, drafts' vocabulary]."""
        return self.product.logits(
            self.ops.rms_norm(hidden, self.norm, self.shape.layer.norm_eps))

    def _step(self, batch: ForwardBatch, pool: KVPagePool, rows: Tensor | None) -> ForwardContext:
        if batch.extends and rows is not None:  # only then does the plan look at them
            batch = replace(batch, all_rows=False, logit_rows=rows)
        plan = plan_attention(batch, pool.page_size, 0, self.shape.layer.attention_scale,
                              self.backends)
        at = batch.turned_to if batch.turned_to.dim() == 1 else batch.turned_to[0]
        return ForwardContext([rope_rows(self.rope, at)],
                              [GroupContext(batch.kv_index, pool.layers, plan, pool.scales)],
                              None, [])


def load_eagle(shape: EagleShape, config: Config, device: torch.device, progress: Progress,
               ops: TorchOps, embed: Embed, vocab: int, drafts: int) -> EagleHead:
    """The head of `config`, ready on the device. ops, embed and vocab: of the model it drafts for;
    drafts: of a step, at most. Raises `BadModel` naming a tensor, and `BadConfig`."""
    layer, path = shape.layer, resolve(config.speculation.speculative_model)
    dtype, specs = TORCH_DTYPES[layer.dtype], eagle_tensors(shape)
    if config.model.load_format == "dummy":
        tensors, targets = random_tensors(specs, dtype, device, config.model.seed, progress), None
    else:
        tensors = read_tensors(path, specs, dtype, device, progress, names=NAMES,
                               ignored=re.compile(IGNORED))
        targets = read_targets(path, layer.vocab_size, vocab)
    w = LayerWeights(tensors, "", ops, False, device=device)
    own = w.under(LAYER)
    if shape.own_embedding:
        table = w.pop(EMBED)

        def embed(tokens: Tensor) -> Tensor:
            return table.index_select(0, tokens)
    (rope,) = rope_tables(layer)
    return EagleHead(
        shape, ops, select_attention(layer, config, device, drafts), embed, w.linear(False, JOIN),
        own.norm("input_layernorm"), own.norm(HIDDEN_NORM), own.norm("post_attention_layernorm"),
        w.norm(FINAL_NORM), attention(own.under(ATTENTION), layer, 0),
        dense(own.under("mlp."), layer.mlp_bias, layer.activation), w.linear(False, "lm_head"),
        None if targets is None else targets.to(device), rope.to(device))


def read_targets(path: Path, drafts: int, vocab: int) -> Tensor | None:
    """i64[drafts]: the token that each of the head's is, of the `vocab` that the model has; None
    where they have the same numbers. A checkpoint has the differences (`d2t`). Raises
    `BadConfig`."""
    differences = None
    for file in checkpoint_files(path):
        with safe_open(str(path / file), framework="pt") as shard:
            if "d2t" in shard.keys():  # noqa: SIM118
                differences = shard.get_tensor("d2t").long()
    if differences is None and drafts <= vocab:
        return None
    if differences is not None and differences.shape == (drafts,):
        targets = differences + torch.arange(drafts)
        if int(targets.min()) >= 0 and int(targets.max()) < vocab:
            return targets
    raise BadConfig(f"speculative_model: {path}: tensor d2t: must name {drafts:,} of the model's "
                    f"{vocab:,} tokens", "speculation.speculative_model")
