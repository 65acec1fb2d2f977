"""An EAGLE-3 head (arXiv 2503.01840) as torch trains it, for a model that transformers runs.

In training the drafts of all positions are made at once, in streams, as those of the demo model's
MTP layer (`demo_drafts.py`): stream 1 makes every first draft, stream 2 every second one, from what
stream 1 gave, and so on."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from actorium.tools.training.demo_drafts import Entries, attend
from actorium.tools.training.eagle_texts import WrittenConversation

TRAINED_DRAFTS = 3
"""Streams that a training step makes."""
LENGTH, ROWS = 256, 16
"""Tokens of a row at most, and rows of a batch."""
_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
           "rms_norm_eps", "vocab_size")


class EagleBatch(NamedTuple):
    """Rows of conversations."""

    ids: Tensor
    """i64[B, T], right-padded."""
    weights: Tensor
    """f32[B, T]: 1 where the next token is one of the conversation's."""
    states: Tensor
    """[B, T, 3 * hidden]: what goes into three of the model's layers, side by side."""
    last: Tensor
    """[B, T, hidden]: of the model, after its final norm."""
    likeliest: Tensor
    """i64[B, T]: what the model says is the next token."""


class EagleAttention(nn.Module):
    """Attention over a token's embedding and a hidden state, side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, self.dim = config.hidden_size, config.head_dim
        rows = {"q": config.num_attention_heads, "k": config.num_key_value_heads,
                "v": config.num_key_value_heads}
        for name, heads in rows.items():
            setattr(self, f"{name}_proj", nn.Linear(2 * size, heads * self.dim, bias=False))
        self.o_proj = nn.Linear(config.num_attention_heads * self.dim, size, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], earlier: list[Entries]) -> Tensor:
        """x: [B, T, 2 * hidden] -> [B, T, hidden]; turn, earlier: see `demo_drafts.Mtp`."""
        q, k, v = (own(x).unflatten(2, (-1, self.dim)).transpose(1, 2)
                   for own in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *turn)
        earlier.append(Entries(k, v))
        return self.o_proj(attend(q, earlier).transpose(1, 2).flatten(2))


class EagleLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn, self.mlp = EagleAttention(config), LlamaMLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor],
                earlier: list[Entries]) -> Tensor:
        """embedded: of the token after each row's; both [B, T, hidden] -> the same."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(x, turn, earlier)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleNet(nn.Module):
    """The head; its parameters have the names that checkpoints have."""

    def __init__(self, config: LlamaConfig, drafted: int, taps: int) -> None:
        """drafted: tokens of the drafts' vocabulary; taps: layers it takes the input of."""
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.midlayer, self.norm = EagleLayer(config), LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, drafted, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def streams(self, embedded: Tensor, states: Tensor, count: int) -> Iterator[Tensor]:
        """Yields logits of every first draft, every second one, ...: [B, T, drafted] each, of the
        token two after each position's."""
        hidden, earlier, t = self.fc(states), list[Entries](), embedded.shape[1]
        turn = self.rotary(hidden, torch.arange(t)[None])
        for _ in range(count):
            out = self.midlayer(embedded, hidden, turn, earlier)
            yield self.lm_head(self.norm(out))
            hidden = F.pad(out, (0, 0, 1, 0))[:, :t]


class Teacher:
    """A model as heads are trained for it: what it says, and its hidden states."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
        raw = self.model.config.get_text_config()
        layers = raw.num_hidden_layers
        self.taps = [2, layers // 2, layers - 3]
        self.config = LlamaConfig(
            **{name: getattr(raw, name) for name in _FIELDS}, num_hidden_layers=1,
            head_dim=getattr(raw, "head_dim", None) or raw.hidden_size // raw.num_attention_heads,
            max_position_embeddings=raw.max_position_embeddings,
            rope_theta=(getattr(raw, "rope_parameters", None) or {}).get("rope_theta", 1e4))
        self.embedding = self.model.get_input_embeddings().weight.detach().float()
        self.head = self.model.get_output_embeddings().weight.detach().float()

    @torch.no_grad()
    def batches(self, texts: Sequence[WrittenConversation]) -> list[EagleBatch]:
        """Rows of the texts, about as long as each other, with hidden states, which are kept in
        bf16."""
        batches = []
        whole = sorted(([*own.prompt, *own.answer][:LENGTH] for own in texts), key=len)
        for at in range(0, len(texts), ROWS):
            rows = whole[at:at + ROWS]
            ids, weights = torch.zeros((2, len(rows), len(rows[-1])), dtype=torch.long)
            for i, row in enumerate(rows):
                ids[i, :len(row)], weights[i, :len(row) - 1] = torch.tensor(row), 1
            out = self.model(ids, output_hidden_states=True)
            states = torch.cat([out.hidden_states[i] for i in self.taps], -1)
            batches.append(EagleBatch(ids, weights.float(), states.bfloat16(),
                                      out.hidden_states[-1].bfloat16(), out.logits.argmax(-1)))
            if at // ROWS % 10 == 0:
                print(f"hidden states of {at + len(rows)} texts", flush=True)
        return batches


def frequent_tokens(texts: Sequence[WrittenConversation], count: int) -> Tensor:
    """i64[count], rising: the tokens that answers have most often; of those that none has, the
    first ones."""
    seen = Counter(token for own in texts for token in own.answer)
    chosen = {token for token, _ in seen.most_common(count)}
    rest = (token for token in range(max(seen, default=0) + 1 + count) if token not in chosen)
    return torch.tensor(sorted([*chosen, *(next(rest) for _ in range(count - len(chosen)))]))


def draft_loss(teacher: Teacher, net: EagleNet, targets: Tensor, batch: EagleBatch) -> Tensor:
    """The cross-entropy of each stream's drafts against what the model says of these tokens, summed
    over the batch's weights. Where the model's likeliest token is none of the drafts', nothing is
    learnt."""
    embedded = F.embedding(F.pad(batch.ids[:, 1:], (0, 1)), teacher.embedding)
    with torch.no_grad():
        said = (batch.last[:, 1:].float() @ teacher.head[targets].T).softmax(-1)
        weights = batch.weights[:, 1:] * torch.isin(batch.likeliest[:, 1:], targets)
    loss = torch.zeros(())
    for i, logits in enumerate(net.streams(embedded, batch.states.float(), TRAINED_DRAFTS)):
        each = -(said * logits[:, :-1].log_softmax(-1)).sum(-1) * weights
        loss = loss + each[:, i:].sum()  # a row's first positions are no place for later drafts
    return loss / TRAINED_DRAFTS


def new_net(teacher: Teacher, targets: Tensor) -> EagleNet:
    """A head that begins near its model: with rows of its head, and the last of its layers that are
    taken as the hidden state."""
    net = EagleNet(teacher.config, len(targets), len(teacher.taps))
    size = teacher.config.hidden_size
    with torch.no_grad():
        net.lm_head.weight.copy_(teacher.head[targets])
        nn.init.normal_(net.fc.weight, std=0.2 * (3 * size) ** -0.5)
        net.fc.weight[:, -size:].add_(torch.eye(size))
    return net


def shuffled(batches: Sequence[EagleBatch], seed: int) -> Callable[[float], list[EagleBatch]]:
    """Draws a batch a step, all of them before any comes again."""
    order, draw = list[int](), random.Random(seed)

    def step(progress: float) -> list[EagleBatch]:
        if not order:
            order.extend(draw.sample(range(len(batches)), len(batches)))
        return [batches[order.pop()]]

    return step


def save_head(teacher: Teacher, net: EagleNet, targets: Tensor, folder: Path) -> None:
    """Writes the head in the published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    known = torch.zeros(teacher.config.vocab_size, dtype=torch.bool)
    tensors = {name: own.detach().bfloat16() for name, own in net.named_parameters()}
    tensors |= {"d2t": targets - torch.arange(len(targets)),
                "t2d": known.index_fill_(0, targets, True)}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config: dict[str, Any] = {name: getattr(teacher.config, name) for name in (
        *_FIELDS, "head_dim", "max_position_embeddings", "hidden_act", "num_hidden_layers")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
            "rope_theta": teacher.config.rope_parameters["rope_theta"], "dtype": "bfloat16",
            "draft_vocab_size": len(targets), "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": teacher.taps}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
