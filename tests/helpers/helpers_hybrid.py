"""Tiny random hybrid checkpoints, and a driver that makes its own plans over them.

Rows of the state pool that nobody holds are full of NaN, as are the pages: whatever is read that is
not the sequence's own shows in its logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_worker import CPU
from torch import Tensor

from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.plan.sizes import page_table_width
from actorium.gpu.step.pools import make_pools
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import HostArrays
from actorium.gpu.step.states import StatePool
from actorium.gpu.step.tables import SlotTables

NEXT, DENSE, SPARSE, MOE = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
                            "Qwen3MoeForCausalLM")
BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "head_dim": 16, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-4,
}
OWN = {NEXT: "Qwen3NextConfig", DENSE: "Qwen3_5TextConfig", SPARSE: "Qwen3_5MoeTextConfig",
       MOE: "Qwen3MoeConfig"}
ONLY_EXPERTS = {"moe_intermediate_size", "shared_expert_intermediate_size", "num_experts",
                "num_experts_per_tok"}


def hybrid_config(architecture: str, **options: Any) -> Any:
    """A transformers config of a tiny model; options override its fields."""
    import transformers

    fields = {**BASE, **options}
    fields = {name: value for name, value in fields.items()
              if not (architecture == DENSE and name in ONLY_EXPERTS)
              and not (architecture == SPARSE and name == "intermediate_size")
              and not (architecture == MOE and name.startswith(("linear_", "shared_")))}
    config = getattr(transformers, OWN[architecture])(**fields)
    config.architectures = [architecture]
    return config


def hybrid_model(architecture: str, seed: int = 0, **options: Any) -> Any:
    """A random transformers model, fp32, in eval mode, with every parameter random: states that
    neither vanish nor stay, norms near their working point.

    Smaller epsilons and larger weights put transformers' own fp32 logits 1e-4 and more off those
    of fp64: where a query hardly sees the state, the norm after it scales up what is all rounding.
    """
    import transformers

    config = hybrid_config(architecture, **options)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    zero_based = architecture != MOE
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-4.0, 0.5)
            elif "norm" in name:
                p.normal_(0.0 if zero_based and "linear_attn.norm" not in name else 1.0, 0.15)
            else:
                p.normal_(0.0, 1.0 if "conv1d" in name else 0.08)
    return model


def write_hybrid(path: Path, architecture: str, seed: int = 0,
                 dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save a tiny random checkpoint in HF format at `path`; returns the transformers model."""
    model = hybrid_model(architecture, seed, **options).to(dtype)
    model.save_pretrained(str(path))
    return model


def hybrid_runner(model: Decoder, slots: int = 9, checkpoints: int = 4, pages: int = 400,
                  page_size: int = 16, state_dtype: torch.dtype = torch.float32) -> ModelRunner:
    """A runner over a loaded model; pages and states are full of NaN."""
    shape = model.shape
    tables = SlotTables(HostArrays(CPU), slots, page_table_width(shape.max_model_len, page_size),
                        page_size, shape.vocab_size, shape.max_model_len)
    pools, states = make_pools(shape, [pages], page_size, model.dtype, CPU), None
    for layer in pools[0].layers:
        layer.fill_(math.nan)
    if shape.state is not None:
        states = StatePool(shape.state, len(shape.recurrent), slots, checkpoints, state_dtype,
                           model.dtype, CPU)
        for own in states.layers:
            own.state.fill_(math.nan)
            own.columns.fill_(math.nan)
    return ModelRunner(model, pools, tables, states)


@dataclass
class Held:
    """A sequence under the driver."""

    slot: int
    tokens: list[int]
    goal: int
    """Tokens, prompt and completion together."""
    extended: int = 0
    """Tokens it was admitted with."""
    done: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    """Of the pages, how many belong to a donor."""
    saves: dict[int, int] = field(default_factory=dict)
    """Checkpoint to keep by length."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """f32[vocab] by the length of what they follow."""
    finished: bool = False


class HybridDriver:
    """Plans of its own over a runner: chunks of `chunk` tokens, decodes beside them, and over-run
    decodes of sequences that have ended."""

    def __init__(self, runner: ModelRunner, chunk: int) -> None:
        self.runner, self.chunk, self.step = runner, chunk, 0
        self.size = runner.tables.page_size
        self.free_pages = list(range(1, runner.pools[0].pages))
        self.free_slots = list(range(1, runner.tables.slots))
        self.running: list[Held] = []
        self.over: list[Held] = []
        self.admits: list[Admit] = []
        self.appends: list[list[int]] = []
        self.releases: list[int] = []
        self._rows: Tensor | None = None
        inner = runner.model.logits

        def spy(rows: Tensor) -> Tensor:
            self._rows = inner(rows)
            return self._rows

        runner.model.logits = spy  # type: ignore[method-assign]

    def admit(self, tokens: Sequence[int], goal: int, donor: Held | None = None,
              cached: int = 0, checkpoint: int = 0, saves: dict[int, int] | None = None,
              prompt: int = 0) -> Held:
        """A sequence, whose first `cached` tokens are the donor's, with the state of `checkpoint`.
        prompt: tokens that are the prompt (default: all)."""
        shared = list(donor.pages[:cached // self.size]) if donor else []
        s = Held(self.free_slots.pop(0), list(tokens), goal, len(tokens), cached, shared,
                      len(shared), dict(saves or {}))
        length = prompt or len(tokens)
        params = ResolvedParams(max_tokens=goal - length, temperature=0.0)
        self.running.append(s)
        self.admits.append(Admit(s.slot, _i4(tokens), length, cached, _i4(shared), params, 7,
                                 checkpoint))
        return s

    def release(self, s: Held) -> None:
        """Give up slot and pages; both are the next ones taken."""
        if s in self.running:
            self.running.remove(s)
        if s in self.over:
            self.over.remove(s)
        self.releases.append(s.slot)
        self.free_slots.insert(0, s.slot)
        self.free_pages = s.pages[s.shared:] + self.free_pages

    def run(self, steps: int = 1_000_000) -> None:
        """So many steps, or all to their ends and one beyond."""
        for _ in range(steps):
            if not any(not s.finished for s in self.running) and not self.over:
                return
            self._one()

    def _one(self) -> None:
        extends, left = [], self.chunk
        for s in self.running:
            count = min(s.extended - s.done, left)
            if count > 0:
                extends.append((s, count))
                left -= count
        decodes = [s for s in self.running if s.done >= s.extended and not s.finished]
        saves = [[s.slot, number, at - s.done] for s, count in extends
                 for at, number in s.saves.items() if s.done < at <= s.done + count]
        for s, count in [*extends, *((s, 1) for s in decodes)]:
            self._cover(s, s.done + count)
        self.step += 1
        plan = StepPlan(1, self.step, release=_i4(self.releases), admit=self.admits,
                        page_appends=_i4(self.appends),
                        extend=_i4([(s.slot, n) for s, n in extends]),
                        decode=_i4([s.slot for s in decodes + self.over]),
                        checkpoints=_i4(saves))
        self.releases, self.admits, self.appends = [], [], []
        result = self.runner.run(plan)
        for s, count in [*extends, *((s, 1) for s in decodes)]:
            s.done += count
        sampled = [s for s, _ in extends if s.done == s.extended] + decodes
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        assert list(result.counts) == [1] * len(sampled) + [0] * len(self.over)
        for i, s in enumerate(sampled):
            assert self._rows is not None
            s.logits[len(s.tokens)] = self._rows[i].clone()
            s.tokens.append(next(tokens))
            s.finished = len(s.tokens) == s.goal
        self.over = [s for s in decodes if s.finished]

    def _cover(self, s: Held, length: int) -> None:
        while len(s.pages) * self.size < length:
            page = self.free_pages.pop(0)
            self.appends.append([s.slot, len(s.pages), page])
            s.pages.append(page)


def _i4(values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()
