"""The demo model in training: transformers' small hybrid Qwen3.5, begun so that it soon copies.

Parameters are in fp32, products in bf16 by autocast; logits are made only where they carry a loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet

from actorium.tools.training.demo_batches import (
    CHAT_TEMPLATE,
    TextSource,
    TrainingBatch,
    build_tokenizer,
    part_of,
)
from actorium.tools.training.trainer import (
    END_OF_TEXT,
    END_OF_TURN,
    Team,
    Trainer,
    padded_vocabulary,
    save_model,
    save_tokenizer,
    token_id,
)

DELTA, ATTENTION = "linear_attention", "full_attention"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None, "dtype": "bfloat16", "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 768,
    "layer_types": [DELTA, ATTENTION, DELTA, ATTENTION], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 64, "max_position_embeddings": 4096, "model_type": "qwen3_5_text",
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0,
                        "rope_type": "default"},
    "tie_word_embeddings": True, "use_cache": True, "vocab_size": 2048}
"""Fields of config.json without token counts and what `save` adds."""
MTP = "mtp."
"""Beginning of the names of the MTP layer's weights, which a checkpoint may have."""


def new_model(**changes: Any) -> Qwen3_5ForCausalLM:
    """One of `CONFIG` with changes, whose layers add nothing to the tokens at first."""
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG | changes)).float()
    model.model.embed_tokens.padding_idx = None  # the token ends texts, too
    with torch.no_grad():
        nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
        model.model.norm.weight.fill_(-0.5)
        for layer in model.model.layers:
            init_layer(layer)
    return model


@torch.no_grad()
def init_layer(layer: nn.Module) -> None:
    """Products keep the scale of their input, but for the last ones, which are nought."""
    for name, own in layer.named_modules():
        if isinstance(own, nn.Linear):
            last = name.endswith(("o_proj", "out_proj", "down_proj"))
            nn.init.normal_(own.weight, std=0.0 if last else own.in_features**-0.5)
    if layer.block_type == ATTENTION:  # gates begin half open
        own = layer.self_attn
        own.q_proj.weight.unflatten(0, (-1, 2, own.head_dim))[:, 1].zero_()
        return
    delta, taps = layer.linear_attn, layer.linear_attn.conv1d.weight
    # Each channel begins with one of the last few tokens: what copying starts from.
    nn.init.normal_(taps, std=1 / taps.shape[-1])
    taps[torch.arange(len(taps)), 0, torch.randint(taps.shape[-1], (len(taps),))] += 1.0
    # Heads begin with memories of about 1, 10, 80 and 600 tokens.
    span = torch.logspace(0.5, -2.8, delta.num_v_heads)
    delta.dt_bias.copy_(span + (-(-span).expm1()).log())
    delta.A_log.zero_()


def hidden(model: Qwen3_5ForCausalLM, ids: Tensor) -> Tensor:
    """[B, T, hidden] after the final norm of ids [B, T]."""
    return model.model(ids, use_cache=False).last_hidden_state


def logits_at(model: Qwen3_5ForCausalLM, ids: Tensor, where: Tensor) -> Tensor:
    """fp32 [N, vocab] at the N flat positions `where` of ids [B, T]."""
    return model.lm_head(hidden(model, ids).flatten(0, 1)[where]).float()


def model_loss(model: Qwen3_5ForCausalLM, batch: TrainingBatch) -> Tensor:
    """Cross-entropy with the batch's targets, added up over its weights."""
    losses = F.cross_entropy(logits_at(model, batch.ids, batch.where), batch.targets,
                             reduction="none")
    return (losses * batch.weights).sum()


def of_part(loss: Callable[[TrainingBatch], Tensor], team: Team
            ) -> Callable[[TrainingBatch], Tensor]:
    """The same of this process's rows of a batch, in bf16."""
    def local_loss(batch: TrainingBatch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(part_of(batch, *team))

    return local_loss


def begin(out: Path, seed: int, share: float, team: Team
          ) -> tuple[Trainer[TrainingBatch], Callable[[], None]]:
    """A new model, or where `share` of the schedule is over that in `out`; and what writes it."""
    if share:
        tokenizer, (model, more) = Tokenizer.from_file(f"{out}/tokenizer.json"), load(out)
    else:
        tokenizer, more = build_tokenizer(seed), {}
        model = new_model(vocab_size=padded_vocabulary(tokenizer))
        init_copying(model)
        save_tokenizer(tokenizer, out, CONFIG["max_position_embeddings"], CHAT_TEMPLATE)
    source = TextSource(tokenizer, seed + int(1000 * share))
    trainer = Trainer(model, of_part(lambda batch: model_loss(model, batch), team), source.step,
                      team)
    return trainer, lambda: save(model, more, out, end_tokens(tokenizer))


# --- checkpoints ----------------------------------------------------------------------------------

def end_tokens(tokenizer: Tokenizer) -> list[int]:
    """The token that ends a turn, then the one that ends a text."""
    return [token_id(tokenizer, END_OF_TURN), token_id(tokenizer, END_OF_TEXT)]


def save(model: Qwen3_5ForCausalLM, mtp: Mapping[str, Tensor], folder: Path, eos: list[int]
         ) -> None:
    """Writes weights and both config files. mtp: the MTP layer's, or none."""
    ours = {name: getattr(model.config, name) for name in CONFIG
            if name not in ("architectures", "dtype", "use_cache")}
    config = CONFIG | ours | {"eos_token_id": eos[0], "pad_token_id": eos[-1],
                              "mtp_num_hidden_layers": int(bool(mtp))}
    generation = {"do_sample": True, "eos_token_id": eos, "pad_token_id": eos[-1],
                  "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    save_model(folder, {**dict(model.named_parameters()),
                        **{MTP + name: p for name, p in mtp.items()}},
               config=dict(sorted(config.items())), generation_config=generation)


def load(folder: Path) -> tuple[Qwen3_5ForCausalLM, dict[str, Tensor]]:
    """Reads a folder written by `save`; both in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).float()
    model.model.embed_tokens.padding_idx = None
    state = load_file(str(folder / "model.safetensors"))
    mtp = {name.removeprefix(MTP): state.pop(name).float() for name in [*state]
           if name.startswith(MTP)}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model, mtp


# --- where training starts ------------------------------------------------------------------------

_COPY_GAIN = 1.0
"""How much an attention layer adds of what it attends to, which has unit elements."""
_PREVIOUS_TOKEN_GAIN = 0.07
"""How much the recurrent layer adds of the token before, likewise."""
_SHARPNESS = 3.0
"""Attention's scale of normalised queries and keys."""


@torch.no_grad()
def init_copying(model: Qwen3_5ForCausalLM) -> None:
    """Sets the weights of a new model to a rough form of copying.

    Repeating earlier text is what most tasks depend on, and what a small model learns last: it has
    to learn of all pairs of tokens which are equal. From random weights, 300 steps taught it
    nothing of that. So it begins with an induction head (Olsson et al., 2022, arXiv 2209.11895):

    - The first recurrent layer before an attention layer adds to each token the one before it,
      rotated to other directions of the hidden state.
    - That attention layer looks for tokens whose predecessor equals its own token.
    - All attention layers copy what they look at, as those of trained models nearly do (Trockman
      and Kolter, 2023, arXiv 2305.09828).

    Gates, activations and rotation blur all of that: it guesses one in seven of the 1,920 repeated
    tokens, and training sharpens it from the first step on.
    """
    mixers = [layer.self_attn if layer.block_type == ATTENTION else layer.linear_attn
              for layer in model.model.layers]
    for mixer in mixers:
        if isinstance(mixer, Qwen3_5Attention):
            _init_value_copy(mixer)
    for before, behind in pairwise(mixers):
        if isinstance(before, Qwen3_5GatedDeltaNet) and isinstance(behind, Qwen3_5Attention):
            turn = _orthogonal(model.config.hidden_size, model.config.hidden_size)
            _init_previous_token(before, turn)
            _init_matching(behind, turn)
            break


def _init_value_copy(attention: Qwen3_5Attention) -> None:
    """Makes the output projection the transpose of values, for every head of a group."""
    values = _orthogonal(*attention.v_proj.weight.shape)
    attention.v_proj.weight.copy_(values)
    heads = values.unflatten(0, (-1, attention.head_dim)).repeat_interleave(
        attention.num_key_value_groups, 0)
    attention.o_proj.weight.copy_(_COPY_GAIN * heads.flatten(0, 1).t())


def _init_previous_token(delta: Qwen3_5GatedDeltaNet, turn: Tensor) -> None:
    """Makes values the token before; a query is its own token's key, and finds that value."""
    keys, now = delta.key_dim, delta.conv_kernel_size - 1
    values = _orthogonal(delta.out_proj.in_features, delta.out_proj.out_features)
    q, k, v = delta.in_proj_qkv.weight.split((keys, keys, len(values)))
    k.copy_(q)
    v.copy_(values)
    taps = delta.conv1d.weight[:, 0]
    nn.init.normal_(taps, std=0.05)
    taps[: 2 * keys, now] += 1
    taps[2 * keys :, now - 1] += 1
    delta.in_proj_z.weight.mul_(2)  # a gate's mean over its spread grows with it
    delta.out_proj.weight.copy_(_PREVIOUS_TOKEN_GAIN * turn @ values.t())


def _init_matching(attention: Qwen3_5Attention, turn: Tensor) -> None:
    """Makes a query its own token, a key the one before it."""
    seen = _orthogonal(*attention.k_proj.weight.shape)
    attention.k_proj.weight.copy_(seen @ turn.t())
    heads = seen.unflatten(0, (-1, attention.head_dim))
    queries = attention.q_proj.weight.unflatten(0, (len(heads), -1, 2, attention.head_dim))
    queries[:, :, 0] = heads[:, None]
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(_SHARPNESS - 1)


def _orthogonal(rows: int, columns: int) -> Tensor:
    """[rows, columns]: its rows, or else its columns, are orthonormal."""
    return nn.init.orthogonal_(torch.empty(rows, columns))
