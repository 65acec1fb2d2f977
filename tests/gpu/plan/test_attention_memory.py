"""What attention takes, beside the plan's figure, which grows with what it grows with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_memory import most_held
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, MemoryConfig, ModelConfig
from actorium.gpu.attention.attention_backend import NativeAttention, TorchAttention
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan import non_cache_memory
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.non_cache_memory import attention_bytes, torch_attends
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference import attention_blocks, paged_attention
from actorium.tools.cli.plan_command import PlanOptions, make_report, plan_text

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
    "dtype": "float32"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8,
          "fp8_e4m3": torch.float8_e4m3fn}


def shape_of(**changed: Any) -> ModelShape:
    return shape_from_config(RAW | changed, Path("config.json"))


class Chunk:
    """Of a prompt, which ends where the longest sequence does."""

    def __init__(self, shape: ModelShape, count: int) -> None:
        self.start, self.count = shape.max_model_len - count, count
        self.pages = torch.arange(shape.max_model_len // 16, dtype=torch.int32)


def pages_for(shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    layer = torch.zeros((shape.max_model_len, *shape.kv_row), dtype=dtype)
    return layer, torch.ones(layer.shape[:2], dtype=torch.bfloat16) \
        if dtype is torch.int8 else None


def took(shape: ModelShape, demand: Demand, dtype: str, kept: str, backend: Any) -> int:
    """Of a chunk, then of decodes, as all sequences are at their longest."""
    layer, scales = pages_for(shape, DTYPES[kept])
    row = (shape.heads, shape.head_dim)
    queries = torch.zeros((demand.chunk, *row), dtype=DTYPES[dtype])
    chunk = Chunk(shape, demand.chunk)
    prompt = most_held(lambda: backend.extend([chunk], 16, 0, 0.1)(queries, layer, None, scales))
    tables = chunk.pages.expand(demand.max_num_seqs, -1).contiguous()
    lens = torch.full((demand.max_num_seqs,), shape.max_model_len, dtype=torch.int32)
    last = queries[:1].expand(demand.max_num_seqs, -1, -1).contiguous()
    decode = most_held(lambda: backend.decode(tables, lens, shape.max_model_len, 1, 16, 0, 0.1)(
        last, layer, None, scales))
    return max(prompt - 2 * queries.nbytes, decode - 2 * last.nbytes)


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_on_a_cpu_takes_no_more_than_the_plan_says(
    dtype: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((non_cache_memory, "BLOCKS"), (paged_attention, "BYTES")):
        monkeypatch.setattr(module, name, 8 << 20)
    shape = replace(shape_of(), dtype=dtype)
    for demand in (Demand(2, chunk=256, kv_dtype=kept), Demand(40, chunk=16, kv_dtype=kept)):
        planned = attention_bytes(shape, demand, "cpu", True)
        assert planned / 6 < took(shape, demand, dtype, kept, TorchAttention()) <= planned


def test_pages_in_fp8_are_widened_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    lib, shape = library(), replace(shape_of(), dtype="bfloat16")
    if lib is None or not lib.extend_ready():
        pytest.skip("its kernels cannot be built")
    layer, _ = pages_for(shape, DTYPES["fp8_e4m3"])
    q = torch.zeros((16, 4, 32), dtype=torch.bfloat16)
    attend = NativeAttention(lib, 1).extend([Chunk(shape, 16)], 16, 0, 0.1)
    took = most_held(lambda: attend(q, layer)) - q.nbytes
    planned = attention_bytes(shape, Demand(4, kv_dtype="fp8_e4m3"), "cpu", False)
    assert planned <= took + 4096 and took <= planned + 4096
    assert attention_bytes(shape, Demand(4), "cpu", False) == 0


def test_on_cuda_nothing_grows_with_the_prefix() -> None:
    shape = shape_of()
    for by_torch in (False, True):
        found = {attention_bytes(replace(shape, max_model_len=n), Demand(8), "cuda", by_torch)
                 for n in (4096, 1 << 20)}
        assert len(found) == 1
    assert attention_bytes(shape, Demand(8), "cuda", True) == attention_blocks.BYTES
    assert attention_bytes(replace(shape, attention_cap=2.0), Demand(8), "cpu",
                           True) == attention_blocks.BYTES
    assert non_cache_memory.BLOCKS == attention_blocks.BYTES
    assert non_cache_memory.COPIES == attention_blocks.COPIES


def test_the_plan_has_room_for_parts_of_prompts() -> None:
    """Of whatever chunks, on any device."""
    pytest.importorskip("triton")
    from actorium.kernels.triton.extend import MOST_SPLITS, ExtendLaunch, splits_of

    assert non_cache_memory.SPLITS == MOST_SPLITS
    shape = shape_of()
    for rows in (16, 64, 128):
        for chunk in (1, 5, 40, 300, 2048):
            programs = shape.kv_heads * -(-chunk // (rows // 2))
            for sms in (58, 132, 160):
                splits = splits_of(programs, 10**6, ExtendLaunch(rows, 64, 4, 3), sms)
                parts = splits * chunk * shape.heads * 4 * (shape.head_dim + 1)
                planned = attention_bytes(shape, Demand(8, chunk=chunk), "cuda", False)
                assert splits == 1 or parts <= planned


@pytest.mark.parametrize(("dtype", "device", "own", "torchs"), [
    ("bfloat16", "cpu", {}, False), ("float32", "cpu", {}, True), ("float32", "cuda", {}, False),
    ("bfloat16", "cuda", {"attention_backend": "torch"}, True),
    ("bfloat16", "cpu", {"decode_attention_backend": "torch"}, True),
    ("bfloat16", "cuda", {"kernels": "torch"}, True),
    ("bfloat16", "cpu", {"native_kernels": False}, True)])
def test_where_torch_attends(dtype: str, device: str, own: dict[str, Any], torchs: bool) -> None:
    config = Config(device=DeviceConfig(**own))
    assert torch_attends(config, replace(shape_of(), dtype=dtype), device) == torchs
    wide = Config(memory=MemoryConfig(kv_cache_dtype="float16"))
    assert torch_attends(wide, shape_of(dtype="bfloat16"), "cpu"), "C reads no such pages"


def test_the_command_shows_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    config = Config(model=ModelConfig(model=str(tmp_path)),
                    device=DeviceConfig(attention_backend="torch"))
    text = plan_text(make_report(config, PlanOptions(gpu_memory="80GB")))
    assert f"{attention_blocks.BYTES:,} of it for attention behind 8,192" in text
