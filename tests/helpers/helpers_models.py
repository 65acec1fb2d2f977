"""Tiny random checkpoints written by transformers, and steps over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadModel
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pools import make_pools

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                 "Gemma3ForCausalLM")
PLUS_ONE = ("Gemma2", "Gemma3F", "VaultGemma", "Gemma3C")
"""Families whose norms multiply by 1 + weight."""
CPU = torch.device("cpu")


def tiny_config(architecture: str = "Qwen3ForCausalLM", **options: Any) -> Any:
    """A transformers config of a tiny model; options override its fields."""
    import transformers

    base: dict[str, Any] = {
        "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "head_dim": 16,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    }
    if architecture.startswith("Falcon"):
        del base["head_dim"]  # which follows there
    if architecture.startswith("Mistral"):
        base["sliding_window"] = None
    name = architecture.replace("LMHeadModel", "ForCausalLM").replace("ForCausalLM", "Config")
    for family in ("Gemma3", "Gemma3n", "Gemma4", "Llama4"):
        name = name.replace(f"{family}C", f"{family}TextC")
    config = getattr(transformers, name)(**{**base, **options})
    config.architectures = [architecture]
    return config


def tiny_model(architecture: str = "Qwen3ForCausalLM", seed: int = 0, **options: Any) -> Any:
    """A random transformers model, fp32, in eval mode; every parameter (biases and norms too) is
    random, so that none can be left out unnoticed."""
    import transformers

    config = tiny_config(architecture, **options)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            around_one = "norm" in name or name.endswith("scale")
            p.normal_(1.0 if around_one and not architecture.startswith(PLUS_ONE) else 0.0, 0.15)
            if "q_norm" in name and architecture.startswith(("Gemma3n", "Gemma4")):
                p.mul_(0.25)  # whose scores nothing else scales
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    return model


def write_checkpoint(
    path: Path, architecture: str = "Qwen3ForCausalLM", seed: int = 0,
    max_shard_size: str = "5GB", dtype: torch.dtype = torch.float32, **options: Any,
) -> Any:
    """Save a tiny random checkpoint in HF format at `path`; returns the transformers model."""
    model = tiny_model(architecture, seed, **options).to(dtype)
    model.save_pretrained(str(path), max_shard_size=max_shard_size)
    return model


def load(path: Path, native: bool = True, **model: Any) -> Decoder:
    """Our model of the checkpoint at `path`, on the CPU."""
    config = Config(model=ModelConfig(**model), device=DeviceConfig(native_kernels=native))
    return load_model(path, config, CPU, lambda *_: None)


def why_refused(path: Path, fields: dict[str, Any]) -> str:
    """The line that says why a config.json of these fields is not served."""
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(BadModel) as caught:
        read_shape(path, Config())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def oracle_logits(oracle: Any, ids: list[int]) -> Tensor:
    """[len(ids), vocab]: of a transformers model."""
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits


def generated(oracle: Any, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens by transformers' own decode path, which no eos token ends."""
    ids = torch.tensor([prompt])
    full = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                           max_new_tokens=new, min_new_tokens=new, eos_token_id=None,
                           pad_token_id=0)
    found: list[int] = full[0, len(prompt):].tolist()
    return found


def assert_greedy(oracle: Any, prompt: list[int], tokens: list[int], new: int) -> None:
    """They are the `new` tokens that transformers' model would choose after the prompt, each after
    those before: one forward pass instead of one a token."""
    assert len(tokens) == new
    logits = oracle_logits(oracle, [*prompt, *tokens[:-1]])[len(prompt) - 1:]
    assert logits.argmax(-1).tolist() == list(tokens)


def same_logits(got: Tensor, want: Tensor, bf16: bool = False) -> bool:
    """Whether two models with the same weights gave them: up to the last bits, since a library's
    products may depend on where in memory a weight lies."""
    return torch.allclose(got, want, rtol=0, atol=0.03 if bf16 else 2e-5)


@dataclass
class Seq:
    """A sequence as a test drives it: its tokens, how many are in the pages, its page table."""

    tokens: list[int]
    done: int = 0
    pages: list[int] = field(default_factory=list)


class Stepper:
    """Runs steps of a model over sequences, with a shuffled page allocator."""

    def __init__(self, model: Decoder, pages: int = 256, page_size: int = 16, seed: int = 0,
                 kv_dtype: torch.dtype | None = None) -> None:
        self.model, self.page_size = model, page_size
        dtype = kv_dtype or model.dtype
        self.pages, groups = pages, len(model.shape.groups)
        self.pools = make_pools(model.shape, [pages] * groups, page_size, dtype, model.device)
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free = order.tolist()

    def step(
        self, extends: Sequence[tuple[Seq, int]], decodes: Sequence[Seq] = (),
        q_len: int = 1, every_row: bool = False,
    ) -> Tensor:
        """One step: (sequence, count) chunks, then sequences whose last q_len tokens are new.

        Returns f32 logits: of the last row of each chunk, then of every decode row; with
        `every_row`, of all rows.
        """
        rows = [(seq, count) for seq, count in extends] + [(seq, q_len) for seq in decodes]
        for seq, count in rows:
            self._grow(seq, seq.done + count)
        batches = [self._batch(rows, len(extends), q_len, every_row, g)
                   for g in range(len(self.pools))]
        for seq, count in rows:
            seq.done += count
        return self.model.logits(self.model.forward(batches, self.pools))

    def _grow(self, seq: Seq, length: int) -> None:
        while len(seq.pages) * self.page_size < length:
            seq.pages.append(self.free.pop())

    def _table(self, seq: Seq, group: int) -> list[int]:
        """Its pages, which differ from group to group."""
        return [1 + (page - 1 + group) % (self.pages - 1) for page in seq.pages]

    def _batch(
        self, rows: list[tuple[Seq, int]], extends: int, q_len: int, every_row: bool, group: int
    ) -> ForwardBatch:
        tokens: list[int] = []
        positions: list[int] = []
        index: list[int] = []
        last: list[int] = []
        for seq, count in rows:
            places, table = range(seq.done, seq.done + count), self._table(seq, group)
            tokens += [seq.tokens[p] for p in places]
            positions += places
            index += [table[p // self.page_size] * self.page_size + p % self.page_size
                      for p in places]
            last.append(len(tokens) - 1)
        extend_tokens = sum(count for _, count in rows[:extends])
        wanted = last[:extends] + list(range(extend_tokens, len(tokens)))
        decodes = [seq for seq, _ in rows[extends:]]
        lens = [seq.done + q_len for seq in decodes]
        width = max((len(seq.pages) for seq in decodes), default=0)
        tables = [self._table(seq, group) + [0] * (width - len(seq.pages)) for seq in decodes]
        device = self.model.device
        return ForwardBatch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            kv_index=torch.tensor(index, device=device),
            extends=[ExtendRow(i + 1, seq.done, count,
                               torch.tensor(self._table(seq, group), dtype=torch.int32,
                                            device=device))
                     for i, (seq, count) in enumerate(rows[:extends])],
            extend_tokens=extend_tokens,
            decode_rows=len(decodes),
            decode_pages=(torch.tensor(tables, dtype=torch.int32, device=device)
                          if decodes else None),
            decode_kv_lens=(torch.tensor(lens, dtype=torch.int32, device=device)
                            if decodes else None),
            max_kv_len=max(lens, default=0),
            logit_rows=torch.tensor(list(range(len(tokens))) if every_row else wanted,
                                    device=device),
            decode_q_len=q_len,
        )


def generate(
    stepper: Stepper, prompts: list[list[int]], new: int, chunk: int = 512, budget: int = 64
) -> list[list[int]]:
    """Greedy tokens of every prompt, continuously batched: decodes mixed with chunks of prompts."""
    seqs = [Seq(list(p)) for p in prompts]
    goal = [len(p) + new for p in prompts]
    while any(len(s.tokens) < g for s, g in zip(seqs, goal, strict=True)):
        decodes = [s for s, p, g in zip(seqs, prompts, goal, strict=True)
                   if len(s.tokens) > len(p) and len(s.tokens) < g]
        left, extends = budget - len(decodes), []
        for s, p in zip(seqs, prompts, strict=True):
            count = min(len(p) - s.done, chunk, left)
            if len(s.tokens) == len(p) and count > 0:
                extends.append((s, count))
                left -= count
        ids = stepper.step(extends, decodes).argmax(-1).tolist()
        for (s, _), token in zip(extends, ids, strict=False):
            if s.done == len(s.tokens):
                s.tokens.append(token)
        for s, token in zip(decodes, ids[len(extends):], strict=True):
            s.tokens.append(token)
    return [s.tokens[len(p):] for s, p in zip(seqs, prompts, strict=True)]
