"""EAGLE-3 heads: tiny checkpoints, and the head as its paper describes it (arXiv 2503.01840), in
plain torch."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers_worker import CPU
from safetensors.torch import load_file, save_file
from torch import Tensor

from actorium.actors.config.tree import Config, ModelConfig, SpeculationConfig
from actorium.gpu.families.eagle_config import read_eagle
from actorium.gpu.models.eagle_head import load_eagle
from actorium.gpu.models.registry import load_model

DRAFTED = 60
"""Tokens of the drafts' vocabulary."""
LOUD = 2.0
"""Times that embeddings are made larger, beside what random layers add to them."""


def eagle_config(target: Path, **fields: Any) -> dict[str, Any]:
    """The config of a head for the model at `target`."""
    raw = json.loads((target / "config.json").read_text())
    raw = raw.get("text_config", raw)
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
            "hidden_size": raw["hidden_size"], "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "rms_norm_eps": 1e-5, "rope_theta": 5e4, "max_position_embeddings": 64,
            "vocab_size": raw["vocab_size"], "draft_vocab_size": DRAFTED,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "tie_word_embeddings": False, **fields}


def write_eagle(path: Path, target: Path, seed: int = 3, layer: str = "midlayer.",
                **fields: Any) -> None:
    """A random head for the model at `target`; layer: what its layer's tensors are called."""
    raw = eagle_config(target, **fields)
    own, gen = {**raw, **raw.get("transformer_layer_config", {})}, torch.Generator().manual_seed(
        seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    size, width = own["hidden_size"], own.get("target_hidden_size", own["hidden_size"])
    heads, kv = (own[name] * own["head_dim"] for name in ("num_attention_heads",
                                                         "num_key_value_heads"))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen) * shape[-1] ** -0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=gen)

    tokens, vocab = own["draft_vocab_size"], own["vocab_size"]
    targets = torch.randperm(vocab, generator=gen)[:tokens].sort().values
    tensors = {
        "fc.weight": drawn(size, 3 * width), "norm.weight": norm(),
        "lm_head.weight": drawn(tokens, size), "d2t": targets - torch.arange(tokens),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, targets, True),
        f"{layer}self_attn.q_proj.weight": 2 * drawn(heads, 2 * size),
        f"{layer}self_attn.k_proj.weight": 2 * drawn(kv, 2 * size),
        f"{layer}self_attn.v_proj.weight": drawn(kv, 2 * size),
        f"{layer}self_attn.o_proj.weight": drawn(size, heads),
        f"{layer}mlp.gate_proj.weight": drawn(own["intermediate_size"], size),
        f"{layer}mlp.up_proj.weight": drawn(own["intermediate_size"], size),
        f"{layer}mlp.down_proj.weight": drawn(size, own["intermediate_size"]),
        **{f"{layer}{name}.weight": norm() for name in (
            "input_layernorm", "hidden_norm", "post_attention_layernorm")}}
    if width != size:
        tensors["embed_tokens.weight"] = torch.randn((vocab, size), generator=gen)
    save_file(tensors, str(path / "model.safetensors"))


def load_with_head(target: Path, head: Path | None, drafts: int = 3, **model: Any) -> Any:
    """The model at `target`, on the CPU, with a head that drafts for it."""
    config = Config(model=ModelConfig(**{"max_model_len": 96, **model}), speculation=(
        SpeculationConfig(speculative=f"eagle3:{drafts},fixed", speculative_model=str(head))
        if head else SpeculationConfig(speculative="off")))
    return load_model(target, config, CPU, lambda *_: None)


@dataclass
class EagleOracle:
    """The head of a checkpoint, over whole sequences."""

    path: Path
    embedding: Tensor
    """[V, hidden], of the model where the head has none."""
    raw: dict[str, Any] = field(init=False)
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        raw = json.loads((self.path / "config.json").read_text())
        self.raw = {**raw, **raw.get("transformer_layer_config", {})}
        self.tensors = {name.replace("midlayer.", "layers.0."): tensor.float() for name, tensor
                        in load_file(str(self.path / "model.safetensors")).items()}
        self.embedding = self.tensors.get("embed_tokens.weight", self.embedding)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).rsqrt()
        return x * self.tensors[f"{name}.weight"]

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _heads(self, x: Tensor, name: str, turn: bool = True) -> Tensor:
        """[heads, n, dim], of the projection, rotated by position."""
        dim = self.raw["head_dim"]
        y = self._product(x, f"layers.0.self_attn.{name}_proj").unflatten(1, (-1, dim))
        y = y.transpose(0, 1)
        if not turn:
            return y
        rates = self.raw["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.arange(len(x)).double()[:, None] * rates
        both = torch.view_as_complex(torch.stack(y.double().chunk(2, -1), -1))
        turned = torch.view_as_real(both * torch.polar(torch.ones_like(angles), angles))
        return torch.cat((turned[..., 0], turned[..., 1]), -1).float()

    def joined(self, states: list[Tensor]) -> Tensor:
        """[n, hidden] of the model's hidden states, [n, width] each."""
        return self._product(torch.cat(states, -1), "fc")

    def forward(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """[n, hidden]: what the layer gives; tokens: that after each row's; hidden: [n, hidden]."""
        at, n = "layers.0.", len(hidden)
        normed = self._norm(hidden, f"{at}hidden_norm")
        residual = normed if self.raw.get("norm_before_residual") else hidden
        x = torch.cat((self._norm(self.embedding[tokens], f"{at}input_layernorm"), normed), -1)
        q, k, v = self._heads(x, "q"), self._heads(x, "k"), self._heads(x, "v", False)
        k, v = (own.repeat_interleave(len(q) // len(own), 0) for own in (k, v))
        scores = q @ k.mT * self.raw["head_dim"] ** -0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        hidden = residual + self._product(mixed, f"{at}self_attn.o_proj")
        x = self._norm(hidden, f"{at}post_attention_layernorm")
        gate = F.silu(self._product(x, f"{at}mlp.gate_proj"))
        return hidden + self._product(gate * self._product(x, f"{at}mlp.up_proj"),
                                      f"{at}mlp.down_proj")

    def logits(self, out: Tensor) -> Tensor:
        """What `forward` gave, [n, hidden] -> [n, drafts' vocabulary]."""
        return self._product(self._norm(out, "norm"), "lm_head")

    def chain(self, ids: list[int], hidden: Tensor, drafts: int) -> list[int]:
        """The drafts after `ids`; hidden: [n - 1, hidden], joined, of all but the last of them."""
        ids = list(ids)
        for _ in range(drafts):
            out = self.forward(ids[1:], hidden)
            draft = int(self.logits(out[-1:]).argmax())
            ids.append(draft + int(self.tensors["d2t"][draft]))
            hidden = torch.cat((hidden, out[-1:]))
        return ids[-drafts:]


def follow_tokens_by_head(target: Path, head: Path, seed: int = 2) -> None:
    """Give both an embedding and heads by which each token has a likeliest successor, of the
    drafts' vocabulary; what else they say is random, so that drafts are right often, not always."""
    random = torch.Generator().manual_seed(seed)
    own, drafts = (load_file(str(path / "model.safetensors")) for path in (target, head))
    (name,) = (name for name in own if name.endswith("embed_tokens.weight"))
    vocab, size = own[name].shape
    targets = drafts["d2t"] + torch.arange(DRAFTED)
    successor = targets[torch.randint(DRAFTED, (vocab,), generator=random)]
    embedding = torch.randn(vocab, size, generator=random)
    rows = torch.zeros(vocab, size).index_add_(0, successor, embedding / size ** 0.5)
    own[name], own["lm_head.weight"] = LOUD * embedding, rows
    save_file(own, str(target / "model.safetensors"), metadata={"format": "pt"})
    _follow(head, rows)


def _follow(head: Path, rows: Tensor) -> None:
    """Let a head say what the embedding of the token before says by these rows, [V, hidden], of a
    model's head: each row attends to itself, mostly, and takes its token's embedding from there."""
    random, file = torch.Generator().manual_seed(7), str(head / "model.safetensors")
    drafts, at, size = load_file(file), "midlayer.self_attn.", rows.shape[1]
    nothing = torch.zeros(32, size)
    keys, values = torch.randn(2, 32, size, generator=random) / size ** 0.5
    by_head = [part.repeat_interleave(2, 0).flatten(0, 1) for part in (
        keys.view(2, 16, size), values.view(2, 16, size))]
    drafts |= {
        f"{at}q_proj.weight": torch.cat((2 * by_head[0], torch.zeros(64, size)), 1),
        f"{at}k_proj.weight": torch.cat((2 * keys, nothing), 1),
        f"{at}v_proj.weight": torch.cat((values, nothing), 1),
        f"{at}o_proj.weight": by_head[1].T.contiguous(),
        "lm_head.weight": rows[drafts["d2t"] + torch.arange(len(drafts["d2t"]))],
        "fc.weight": 0.1 / LOUD * drafts["fc.weight"],
        "midlayer.mlp.down_proj.weight": 0.1 * drafts["midlayer.mlp.down_proj.weight"]}
    save_file(drafts, file, metadata={"format": "pt"})


@torch.inference_mode()
def with_head(model: Any, folder: Path) -> Any:
    """The loaded model, of which each token has a likeliest successor (`follow_tokens`), with a
    head that often drafts it; its checkpoint is written to `folder`."""
    shape, embedding = model.shape, model.embeddings(torch.arange(model.shape.vocab_size))
    successor = model.head_logits(embedding).argmax(1)
    rows = torch.zeros_like(embedding).index_add_(0, successor, embedding / shape.hidden ** 0.5)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": shape.hidden,
                                                    "vocab_size": shape.vocab_size}))
    write_eagle(folder, folder, draft_vocab_size=shape.vocab_size // 2)
    _follow(folder, rows)
    config = Config(speculation=SpeculationConfig(speculative="eagle3",
                                                  speculative_model=str(folder)))
    made = copy.copy(model)
    made.shape = replace(shape, eagle=read_eagle(shape, config))
    made.eagle = load_eagle(made.shape.eagle, config, CPU, lambda *_: None, model.ops,
                            model.embeddings, shape.vocab_size, 3)
    return made
