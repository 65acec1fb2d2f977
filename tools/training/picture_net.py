"""The model of pictures in training: transformers' Qwen3-VL, tiny.

All items of a batch have pictures of the same sizes, in front of all text, so that positions and
placeholders are the same for all of them.

The tower's learned positions are those of rows alone: all of a row are one. So rows are encoded by
the learned positions as well, columns by rope alone, and a fault of either costs answers.

First the tower alone is trained: what it makes of a cell is aligned with the embeddings of the
words that say what is in it, which takes a minute. Then the loss is that of answers, beside that of
the alignment, which fades. 2.7 minutes (347 steps) gave 47 of the 100 held-out items.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from actorium.actors.config.tree import Config
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.vision.grids import Grid, Medium, rope_positions
from actorium.tools.training.picture_batches import (
    ASIDE,
    CHAT_TEMPLATE,
    PROCESSING,
    WORDS_SEEN,
    PictureBatch,
    PictureSource,
    build_tokenizer,
    spaced_words,
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

TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None, "dtype": "bfloat16", "head_dim": 32, "hidden_act": "silu",
    "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 256,
    "max_position_embeddings": 1024, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    # Fast frequencies separate cells, slow ones match equal ones over a distance.
    "rope_theta": 1000.0,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5],
                     "rope_type": "default"},
    "tie_word_embeddings": True, "use_cache": True}
TOWER: dict[str, Any] = {
    "model_type": "qwen3_vl", "depth": 3, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 64,
    "intermediate_size": 128, "num_heads": 2, "in_channels": 3, "out_hidden_size": 128,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
"""Fields of config.json: the decoder, without token ids, and the tower."""
GAINS = {"visual.blocks.attn.proj": 0.3, "visual.blocks.mlp.linear_fc2": 0.3,
         "visual.merger.linear_fc2": 0.5, "visual.deepstack_merger_list.linear_fc2": 0.1,
         "language_model.layers.mlp.down_proj": 0.2}
"""Products that do not keep the scale of their input -> what they make of it at first."""
PROBED = 1
"""The layer of the decoder behind which cells are to know what is around them."""
_ROWS = 8
"""Conversations of a batch, of which a step has two, in each process."""
_MATRIX_RATE = 3e-3
_TURNS = 10
"""Questions of a conversation."""


def config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    end, turn = token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, END_OF_TURN)
    marks = {f"{name}_token_id": token_id(tokenizer, f"<|{token}|>") for name, token in (
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
        ("vision_end", "vision_end"))}
    return {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
            "dtype": "bfloat16", "tie_word_embeddings": True, **marks, "vision_config": TOWER,
            "text_config": {**TEXT, "eos_token_id": turn, "pad_token_id": end,
                            "vocab_size": padded_vocabulary(tokenizer)}}


class Grown(nn.Module):
    """A weight in the form of another one, which is what is trained."""

    def __init__(self, grow: Callable[[Tensor], Tensor], shrink: Callable[[Tensor], Tensor]
                 ) -> None:
        super().__init__()
        self.forward, self.right_inverse = grow, shrink


class PictureNet(nn.Module):
    def __init__(self, net: Qwen3VLForConditionalGeneration, shape: VisionShape) -> None:
        super().__init__()
        self.visual, self.language_model = net.model.visual, net.model.language_model
        self.language_model.embed_tokens.padding_idx = None
        self.head, self.shape = net.lm_head, shape
        patches, side = self.visual.patch_embed.proj, shape.positions
        parametrize.register_parametrization(  # the optimizer of matrices wants a matrix
            patches, "weight", Grown(lambda flat, form=patches.weight.shape: flat.view(form),
                                     lambda weight: weight.flatten(1)))
        parametrize.register_parametrization(
            self.visual.pos_embed, "weight", Grown(
                lambda rows: rows.repeat_interleave(side, 0), lambda weight: weight[::side]))

    def rows(self, pixels: list[Tensor], grids: list[Grid]) -> list[Tensor]:
        """[B, rows of all pictures, hidden] of each level; pixels: [B, patches, pixels] each."""
        each = []
        for own, grid in zip(pixels, grids, strict=True):
            found = self.visual(own.flatten(0, 1), torch.tensor([grid] * len(own)))
            each.append([level.unflatten(0, (len(own), -1))
                         for level in (found.pooler_output, *found.deepstack_features)])
        return [torch.cat(level, 1) for level in zip(*each, strict=True)]

    def logits(self, ids: Tensor, rows: list[Tensor], grids: list[Grid], where: Tensor,
               turns: tuple[int, int] | None = None) -> Tensor:
        """[N, vocab] at the N flat positions `where` of ids [B, T], whose placeholders are in the
        same places in every row. turns: (tokens in front of them, tokens of each) of turns that do
        not see one another, and are where the first one is."""
        return self.looked_through(ids, rows, grids, where, turns)[0]

    def looked_through(self, ids: Tensor, rows: list[Tensor], grids: list[Grid], where: Tensor,
                       turns: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """(logits, the placeholders' [B, rows, hidden] behind layer `PROBED`)."""
        found = rope_positions(ids[0].numpy(), [Medium(grid) for grid in grids], self.shape)
        at, seen = torch.from_numpy(np.ascontiguousarray(found.axes)), None
        if turns:
            before, length = turns
            index = torch.arange(ids.shape[1])
            of = torch.where(index < before, -1, (index - before) // length)
            at = at[:, torch.where(of < 0, index, before + (index - before) % length)]
            seen = ((index[:, None] >= index) & ((of[:, None] == of) | (of < 0)))[None, None]
        place, body, inputs = torch.from_numpy(found.places), self.language_model, []
        x = body.embed_tokens(ids).index_copy(1, place, rows[0])
        hook = body.layers[PROBED + 1].register_forward_pre_hook(
            lambda _, given: inputs.append(given[0]))
        with hook:
            done = body(inputs_embeds=x, position_ids=at[:, None].expand(3, len(ids), -1),
                        attention_mask=seen, use_cache=False,
                        visual_pos_masks=torch.isin(torch.arange(ids.shape[1]), place).expand(
                            ids.shape), deepstack_visual_embeds=[row.flatten(0, 1)
                                                                 for row in rows[1:]])
        return self.head(done.last_hidden_state.flatten(0, 1)[where]), inputs[0][:, place]


def new_net(tokenizer: Tokenizer) -> PictureNet:
    """One that has learned nothing; products keep the scale of their input, but for `GAINS`."""
    net = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config_of(tokenizer))).float()
    made = PictureNet(net, shape_of(tokenizer))
    with torch.no_grad():
        for name, module in made.named_modules():
            plain = ".".join(part for part in name.split(".") if not part.isdigit())
            if isinstance(module, nn.Linear) and plain != "head":
                nn.init.normal_(module.weight, std=GAINS.get(plain, 1.0) * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif plain.endswith(("q_norm", "k_norm")):
                module.weight.fill_(1.5)
        made.language_model.norm.weight.fill_(0.5)
        nn.init.normal_(made.language_model.embed_tokens.weight, std=0.1)
        patches = made.visual.patch_embed.proj
        nn.init.zeros_(patches.bias)
        for module, std in ((patches, made.shape.pixels**-0.5), (made.visual.pos_embed, 0.5)):
            nn.init.normal_(module.parametrizations.weight.original, std=std)
    return made


def shape_of(tokenizer: Tokenizer) -> VisionShape:
    v = TOWER
    return VisionShape(
        depth=v["depth"], hidden=v["hidden_size"], intermediate=v["intermediate_size"],
        heads=v["num_heads"], patch=v["patch_size"], frames=v["temporal_patch_size"],
        merge=v["spatial_merge_size"], out_hidden=v["out_hidden_size"], positions=6,
        image_token=token_id(tokenizer, "<|image_pad|>"),
        video_token=token_id(tokenizer, "<|video_pad|>"),
        deepstack=tuple(v["deepstack_visual_indexes"]))


# --- what is trained ------------------------------------------------------------------------------

class Probed(nn.Module):
    """A model with what tells, in training alone, whether cells know what is around them."""

    def __init__(self, model: PictureNet) -> None:
        super().__init__()
        self.model = model
        self.probe = nn.Linear(TEXT["hidden_size"], sum(ASIDE), bias=False)
        nn.init.normal_(self.probe.weight, std=TEXT["hidden_size"]**-0.5)

    def around(self, cells: Tensor, known: Tensor) -> Tensor:
        """Mean cross-entropy of what is around cells [B, R, hidden]; known: i64[B, R, of ASIDE]."""
        scores = self.probe(F.rms_norm(cells, cells.shape[-1:])).split(ASIDE, -1)
        return torch.stack([F.cross_entropy(own.flatten(0, 1), known[..., i].flatten())
                            for i, own in enumerate(scores)]).mean()


def picture_loss(probed: Probed, batch: PictureBatch, team: Team) -> Tensor:
    """Cross-entropy of the answers, added up over the batch, and the fading ones of rows with words
    and of what is around them in proportion to it; this process's share."""
    model = probed.model
    rows, total = model.rows(batch.pixels, batch.grids), batch.weights.sum()
    seen = batch.words[..., :WORDS_SEEN]
    if batch.alone:
        return total * alignment(model, rows[0], seen) / team.size
    logits, cells = model.looked_through(batch.ids, rows, batch.grids, batch.where, batch.turns)
    loss = (F.cross_entropy(logits, batch.targets, reduction="none") * batch.weights).sum()
    if batch.align:
        loss = loss + batch.align * total * (
            alignment(model, rows[0], seen) + alignment(model, cells, batch.words)
            + 0.5 * probed.around(cells, batch.around))
    return loss / team.size


def alignment(model: PictureNet, rows: Tensor, words: Tensor) -> Tensor:
    """How little the rows say of the words of their cells: mean of the log-probabilities' negatives
    over the words, each beside those of no other cell's. rows: [B, R, hidden]; words: i64[B, R, W],
    -1 for none."""
    normed = F.rms_norm(rows, rows.shape[-1:])
    known = words[words >= 0].unique()
    scores = F.linear(normed, model.language_model.embed_tokens.weight[known].detach())
    own = (words.unsqueeze(-1) == known).any(2).to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, own, pos_weight=torch.tensor(4.0))


def begin(out: Path, seed: int, share: float, team: Team
          ) -> tuple[Trainer[PictureBatch], Callable[[], None]]:
    """A new model, or where `share` of the schedule is over that in `out`; and what writes it."""
    if share:
        tokenizer, model = Tokenizer.from_file(f"{out}/tokenizer.json"), load(out)
    else:
        tokenizer = build_tokenizer()
        model = new_net(tokenizer)
        init_looking(model, spaced_words(tokenizer))
        save_tokenizer(tokenizer, out, TEXT["max_position_embeddings"], CHAT_TEMPLATE)
    source = PictureSource(tokenizer, f"{seed}-{share}-{team.rank}", _ROWS, _TURNS)
    probed = Probed(model)
    trainer = Trainer(probed, lambda batch: picture_loss(probed, batch, team), source.step, team,
                      _MATRIX_RATE)
    return trainer, lambda: save(model, tokenizer, out)


# --- checkpoints ----------------------------------------------------------------------------------

def save(model: PictureNet, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights and the config files; the tokenizer's are not touched."""
    p, eos = PROCESSING, [token_id(tokenizer, each) for each in (END_OF_TURN, END_OF_TEXT)]
    named = {name: own for name, own in model.named_parameters()
             if "parametrizations" not in name}
    named |= {f"visual.{name}.weight": model.visual.get_submodule(name).weight
              for name in ("patch_embed.proj", "pos_embed")}
    save_model(
        folder, {f"model.{name}": own for name, own in named.items()}, config=config_of(tokenizer),
        generation_config={"do_sample": False, "eos_token_id": eos, "pad_token_id": eos[1]},
        preprocessor_config={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor", "patch_size": p.patch_size,
            "temporal_patch_size": p.temporal_patch_size, "merge_size": p.merge_size,
            "image_mean": list(p.image_mean), "image_std": list(p.image_std),
            "size": {"shortest_edge": p.min_pixels, "longest_edge": p.max_pixels}})


def load(folder: Path) -> PictureNet:
    """Reads a folder written by `save`, in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    net = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config)).float()
    state = load_file(str(folder / "model.safetensors"))
    net.load_state_dict(
        state | {"lm_head.weight": state["model.language_model.embed_tokens.weight"]})
    shape = read_shape(folder, Config()).vision
    assert shape is not None
    return PictureNet(net, shape)


# --- where training starts ------------------------------------------------------------------------

_PREVIOUS_PAIRS = 9
"""Pairs of a head, of the fast ones, that find the token before."""


@torch.no_grad()
def init_looking(model: PictureNet, words: Tensor) -> None:
    """Sets the attention of a new decoder to a rough form of looking things up, which a small model
    learns last (compare `init_copying` of the demo model's training).

    - All heads copy what they attend to, as those of trained models nearly do (Trockman and Kolter,
      2023, arXiv 2305.09828).
    - Half of the first layer's heads attend to the token before, by rope: every embedding has a
      part that is the same for all, and queries and keys are made of it.
    - In the other layers a question's words attend to the cells that they name. A word begins with
      a space in a question and without one in an answer; rows of cells are aligned with both. The
      second is the first, rotated, and queries rotate alike: so a word looks for its answers' form,
      and does not find itself.

    words: i64[words, 2]: tokens with a space, and without one.
    """
    body, table = model.language_model, model.language_model.embed_tokens.weight
    hidden, half = table.shape[1], TEXT["head_dim"] // 2
    turn = nn.init.orthogonal_(torch.empty(hidden, hidden))
    table[words[:, 1]] = table[words[:, 0]] @ turn.T
    common = torch.randn(hidden).sign()
    table.add_(0.05 * common)
    for i, layer in enumerate(body.layers):
        own = layer.self_attn
        nn.init.orthogonal_(own.v_proj.weight)
        own.o_proj.weight.copy_(0.5 * _for_heads(own, own.v_proj.weight).T)
        if i:
            nn.init.orthogonal_(own.k_proj.weight)
            own.q_proj.weight.copy_(_for_heads(own, own.k_proj.weight @ turn))
            for norm in (own.q_norm, own.k_norm):
                norm.weight.fill_(2.0)
    first = body.layers[0].self_attn
    fast, pad = body.rotary_emb.inv_freq[:_PREVIOUS_PAIRS], torch.zeros(half - _PREVIOUS_PAIRS)
    keys = torch.cat((fast.cos(), pad, fast.sin(), pad))
    queries = torch.cat((torch.ones(_PREVIOUS_PAIRS), pad, torch.zeros(half)))
    for weight, made, heads in ((first.q_proj.weight, queries, first.num_key_value_groups),
                                (first.k_proj.weight, keys, 1)):
        rows = weight[:heads * 2 * half]
        rows.mul_(0.2).add_(made.repeat(heads)[:, None] * common / hidden**0.5)
    for norm in (first.q_norm, first.k_norm):
        norm.weight.fill_(2.5)


def _for_heads(attention: nn.Module, weight: Tensor) -> Tensor:
    """Weights of keys or values, once for each head of a group."""
    return weight.unflatten(0, (-1, attention.head_dim)).repeat_interleave(
        attention.num_key_value_groups, 0).flatten(0, 1)
