"""LoRA adapters as PEFT writes them, models with an adapter merged into their weights, and steps of
sequences that have adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers_models import oracle_logits
from safetensors.torch import save_file
from torch import Tensor, nn

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig, SchedulerConfig
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.models.adapter_files import read_adapter
from actorium.actors.params import ResolvedParams
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.worker.device import OpenedDevice, open_device

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
UNSERVED = (
    "embed", "wte", "wpe", "lm_head", "mlp.gate.", "mixer.gate.", "feed_forward.gate.", "router",
    "shared_expert_gate", "kv_b_proj", "q_b_proj", "f_b_proj", "g_b_proj", "dt_proj", "x_proj",
    "indexer.wq_b", "altup", "per_layer_model", "visual", "vision_tower", "vision_model",
    "multi_modal_projector", "q_norm", "k_norm")
"""Parts of the names of modules that cannot have adapters; a dot behind one is the name's end."""
PROMPTS = [[5, 9, 100, 3, 77, 20], [8, 9, 10], [5, 9, 100, 3, 77, 20, 11, 12], [64, 2, 31, 7, 90]]
EPOCH = 1


class ToyAdapter(NamedTuple):
    """A random adapter."""

    matrices: dict[str, tuple[Tensor, Tensor]]
    """A [rank, K] and B [N, rank] of each module."""
    scale: float


def toy_adapter(oracle: nn.Module, path: Path, rank: int = 4, seed: int = 0, alpha: float = 8.0,
                targets: Iterable[str] = LINEAR, dtype: torch.dtype = torch.float32,
                skip: Sequence[str] = (), **config: Any) -> ToyAdapter:
    """Writes a random adapter of a transformers model to `path`, as PEFT does. targets: ends of
    names of modules; skip: parts of those that are left out."""
    generator = torch.Generator().manual_seed(seed)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in oracle.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith(tuple(targets)) and weight is not None and weight.dim() == 2 and not any(
                part in f"{name}." for part in skip):
            outs, ins = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]
            a, b = (torch.randn(size, generator=generator) * 0.2
                    for size in ((rank, ins), (outs, rank)))
            matrices[name] = a.to(dtype), b.to(dtype)
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": list(targets), **config}))
    tensors = {f"base_model.model.{name}.lora_{side}.weight": own.contiguous()
               for name, pair in matrices.items() for side, own in zip("AB", pair, strict=True)}
    save_file(tensors, path / "adapter_model.safetensors")
    by = rank ** 0.5 if config.get("use_rslora") else rank
    return ToyAdapter(matrices, alpha / by)


def merged(oracle: Any, adapter: ToyAdapter) -> Any:
    """A copy of a transformers model, W + scale * B A in the place of each W."""
    own = copy.deepcopy(oracle)
    with torch.no_grad():
        for name, (a, b) in adapter.matrices.items():
            module = own.get_submodule(name)
            added = adapter.scale * (b.float() @ a.float())
            module.weight += (added if isinstance(module, nn.Linear) else added.t()).to(
                module.weight.dtype)
    return own


def with_adapters(path: Path, slots: int = 2, rank: int = 16, seqs: int = 8,
                  model: dict[str, Any] | None = None, **device: Any) -> Config:
    """The configuration of a worker that serves adapters of the model at `path`."""
    settings = {"passes": "all", "device": "cpu", **device}
    return Config(
        model=ModelConfig(model=str(path), **(model or {})), device=DeviceConfig(**settings),
        scheduler=SchedulerConfig(max_num_seqs=seqs),
        adapters=AdapterConfig(enable_lora=True, max_loras=slots, max_lora_rank=rank))


def open_with_adapters(path: Path, group: RankGroup = LoneRank(), **asked: Any) -> OpenedDevice:
    """Its device; asked: see `with_adapters`."""
    return open_device(with_adapters(path, **asked), 1, lambda *_: None, {}, group)


class AdapterDriver:
    """Runs plans over sequences with adapters."""

    def __init__(self, opened: OpenedDevice, pages: int = 4) -> None:
        """pages: of each sequence."""
        assert opened.reader is not None and opened.runner.adapters is not None
        self.reader, self.runner, self.each = opened.reader, opened.runner, pages
        self.slots = opened.runner.adapters
        self.seen: list[Tensor] = []
        """Logits of every step."""
        logits = self.runner.model.logits

        def kept(rows: Tensor) -> Tensor:
            self.seen.append(logits(rows).float().clone())
            return self.seen[-1]

        self.runner.model.logits = kept  # type: ignore[method-assign]

    def load(self, number: int, path: Path) -> None:
        """Reads an adapter, which plans know by this number from then on."""
        self.slots.known[EPOCH, number] = self.reader.read(read_adapter(path, 64))

    def admit(self, slot: int, prompt: Sequence[int], adapter: int, new: int,
              logprobs: int = -1) -> Admit:
        """A sequence's admission, greedy."""
        t = self.runner.tables
        pages = np.arange(1 + (slot - 1) * self.each, 1 + slot * self.each, dtype=np.int32)
        self._pages = t.groups
        self.appends = [[slot, i, *[int(page)] * t.groups] for i, page in enumerate(pages)]
        return Admit(slot, np.array(prompt, np.int32).tobytes(), len(prompt), 0, b"",
                     ResolvedParams(max_tokens=new, temperature=0.0, logprobs=logprobs), 1,
                     adapter=adapter)

    def generate(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int], new: int
                 ) -> list[list[int]]:
        """Greedy tokens of prompts, all in the same steps; adapters: numbers, 0 for none."""
        self.seen.clear()
        admits, appends, extends = [], [], []
        for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            admits.append(self.admit(i + 1, prompt, adapter, new))
            appends += self.appends
            extends.append([i + 1, len(prompt)])
        slots = np.arange(1, 1 + len(prompts), dtype=np.int32)
        first = StepPlan(EPOCH, 1, admit=admits, page_appends=np.array(appends, np.int32).tobytes(),
                         extend=np.array(extends, np.int32).tobytes())
        rows = [np.frombuffer(self.runner.run(first).tokens, np.int32)]
        for step in range(2, new + 1):
            plan = StepPlan(EPOCH, step, decode=slots.tobytes())
            rows.append(np.frombuffer(self.runner.run(plan).tokens, np.int32))
        self.runner.run(StepPlan(EPOCH, new + 1, release=slots.tobytes()))
        return [list(map(int, own)) for own in np.stack(rows, 1)]


def check_adapted(driver: AdapterDriver, oracle: Any, adapter: ToyAdapter, atol: float = 2e-5
                  ) -> None:
    """The logits of a sequence with adapter 1, and of one without, in the same steps."""
    tokens = driver.generate(PROMPTS[:2], [1, 0], 3)
    for i, model in enumerate((merged(oracle, adapter), oracle)):
        want = oracle_logits(model, PROMPTS[i] + tokens[i][:2])[len(PROMPTS[i]) - 1:]
        found = torch.stack([step[i] for step in driver.seen])
        assert float((found - want).abs().max()) <= atol * float(want.abs().max())
