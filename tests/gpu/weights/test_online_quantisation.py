"""Weights that are quantised when a layer takes them: how near they come, and what is held of them
meanwhile."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from actorium.gpu.families.architectures import model_tensors, shape_from_config
from actorium.gpu.families.weight_formats import WeightFormat
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.weights import online_quantisation
from actorium.gpu.weights.online_quantisation import quantise, quantised_rows, row_format_of
from actorium.kernels.grouped_rows import dequantise_grouped, quantise_grouped

CPU = torch.device("cpu")
INT4 = [WeightFormat(4, group, mins) for group in (32, 64, 128) for mins in (False, True)]


def off(weight: Tensor, got: Any) -> float:
    """Share of a weight's size that it is off."""
    wide = dequantise_grouped(got, torch.float32)
    return float((wide - weight.float()).norm() / weight.float().norm())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_fitted_codes_are_nearer_than_rounded_ones(group: int) -> None:
    torch.manual_seed(1)
    own = row_format_of(WeightFormat(4, group, True))
    for weight in (torch.randn(64, 256), torch.randn(64, 256) ** 3, torch.rand(64, 256) + 1):
        rounded = off(weight, quantise_grouped(weight, own))
        assert off(weight, quantise(weight, own)) < 0.99 * rounded


@pytest.mark.parametrize("form", [*INT4, WeightFormat(8, 32, False), WeightFormat(8, 0, False)],
                         ids=str)
@pytest.mark.parametrize("number", [0.0, 1.0, -3.0, 1e-30, 60000.0])
def test_equal_numbers_are_kept(form: WeightFormat, number: float) -> None:
    weight = torch.full((2, 128), number)
    got = dequantise_grouped(quantise(weight, row_format_of(form)), torch.float32)
    torch.testing.assert_close(got, weight, rtol=0.005, atol=0)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(INT4), st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 5.0]))
def test_every_code_is_the_nearest(form: WeightFormat, seed: int, shift: float) -> None:
    """Where a number lies within what a group's codes span, it is rounded to the nearest."""
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 128, generator=gen) + shift
    got = quantise(weight, row_format_of(form))
    away = (dequantise_grouped(got, torch.float32) - weight).abs()
    step = got.scales.abs().repeat_interleave(form.group, 1)
    inside = (got.codes > 0) & (got.codes < 15)
    assert bool(inside.any()) and bool((away[inside] <= 0.5001 * step[inside] + 1e-6).all())


@pytest.mark.parametrize("form", [INT4[0], INT4[1], WeightFormat(8, 0, False)], ids=str)
def test_rows_do_not_depend_on_how_many_are_made_at_once(form: WeightFormat,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    weight = torch.randn(37, 64).bfloat16()
    whole = quantised_rows(weight, form, CPU)
    monkeypatch.setattr(online_quantisation, "AT_ONCE", 5 * 64)
    assert torch.equal(quantised_rows(weight, form, CPU), whole)


PEAK = """
import sys
from pathlib import Path
import torch
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.gpu.models.registry import load_model

def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

config = Config(model=ModelConfig(quantization=sys.argv[2]))
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
before = held("VmRSS:")
load_model(Path(sys.argv[1]), config, torch.device("cpu"), lambda *_: None)
print(held("VmHWM:") - before)
"""
MEDIUM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 8000,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_loading_holds_little_beside_what_is_made(tmp_path: Path, quantization: str) -> None:
    """At its peak no more than 1.15 times the weights as they are held, and what a library takes;
    the file is mapped, and its pages are let go."""
    shape = shape_from_config(MEDIUM, tmp_path, quantization=quantization)
    block = torch.randn(1 << 23).bfloat16()
    save_file({spec.name: block[:math.prod(spec.shape)].view(spec.shape).clone()
               for spec in model_tensors(shape)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MEDIUM))
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path), quantization],
                          capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.15 * weight_bytes(shape) + (48 << 20)
