"""Programs of decode steps give an EAGLE-3 head the hidden states that steps give that are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_eagle import load_with_head, write_eagle
from helpers_kinds import write_bf16_kind, write_kind
from test_decode_programs import LIB, compare

from actorium.actors.config.tree import (
    AdapterConfig,
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.models.registry import _drafts
from actorium.gpu.step.eagle import EagleProposer
from actorium.gpu.worker.device import OpenedDevice, open_device

pytestmark = pytest.mark.skipif(LIB is None, reason="no compiler")


@pytest.mark.parametrize(("kind", "quantization"), [
    ("llama", "auto"), ("hybrid", "auto"), ("experts", "auto"), ("attention", "int4")])
def test_the_same_bits_with_a_head(kind: str, quantization: str, tmp_path: Path) -> None:
    """In all pages, those of the head among them."""
    write_kind(tmp_path / "model", kind)
    write_eagle(tmp_path / "head", tmp_path / "model", head_dim=32)
    model = load_with_head(tmp_path / "model", tmp_path / "head", max_model_len=128,
                           dtype="bfloat16", quantization=quantization)
    runner, _ = compare(model, drafts=2, sizes={"mtp": False}, speculative="eagle3:2,fixed")
    assert runner.segments is not None and runner.segments.replays > 20
    assert runner.served["program"] == runner.segments.replays


def opened(path: Path, speculative: str, **more: Any) -> OpenedDevice:
    config = Config(model=ModelConfig(model=str(path / "model")), memory=MemoryConfig(
        kv_cache_bytes=8 << 20), scheduler=SchedulerConfig(max_num_seqs=4,
                                                          max_num_batched_tokens=64),
        device=DeviceConfig(device="cpu", threads=1), speculation=SpeculationConfig(
            speculative=speculative, speculative_model=str(path / "head")), **more)
    return open_device(config, 1, lambda *_: None, {})


@pytest.mark.parametrize("adapters", [False, True])
def test_as_a_worker_opens_it(adapters: bool, tmp_path: Path) -> None:
    """What was planned is what there is; all drafts of the model's own layer and of the head."""
    write_bf16_kind(tmp_path / "model", "qwen35")
    write_eagle(tmp_path / "head", tmp_path / "model", head_dim=32, layer="layers.0.")
    found = opened(tmp_path, "mtp:1+eagle3:3", adapters=AdapterConfig(enable_lora=adapters))
    assert found.ready.draft_methods == {"mtp": 1, "eagle3": 3} and found.ready.drafts == 3
    assert found.footprint.measured["pages"] == found.footprint.planned["pages"]
    head, (full, mtp, own) = found.runner.proposers["eagle3"], found.runner.all_pools
    assert isinstance(head, EagleProposer) and head.pool is own
    assert full.pages == mtp.pages == own.pages
    assert found.runner.segments is not None


@pytest.mark.parametrize(("kind", "methods"), [
    ("qwen35", {"mtp": 2, "eagle3": 3}), ("llama", {"eagle3": 3})])
def test_auto_has_the_layer_of_its_own_beside_the_head(kind: str, methods: dict[str, int],
                                                       tmp_path: Path) -> None:
    """Where there is one."""
    write_bf16_kind(tmp_path / "model", kind)
    write_eagle(tmp_path / "head", tmp_path / "model", head_dim=32)
    found = opened(tmp_path, "auto+eagle3:3")
    assert found.ready.draft_methods == methods
    assert found.footprint.measured["pages"] == found.footprint.planned["pages"]


def test_auto_leaves_the_layer_out_where_graphs_would_be_lost(tmp_path: Path) -> None:
    write_bf16_kind(tmp_path / "model", "qwen35")
    write_eagle(tmp_path / "head", tmp_path / "model", head_dim=32)
    for speculative, on_cuda in (("auto+eagle3:3", False), ("mtp:2+eagle3:3", True)):
        config = Config(speculation=SpeculationConfig(
            speculative=speculative, speculative_model=str(tmp_path / "head")))
        shape = read_shape(tmp_path / "model", config)
        drafts = [_drafts(tmp_path / "model", shape, config, torch.device(device))
                  for device in ("cpu", "cuda")]
        assert drafts == [True, on_cuda]
