"""What Triton's compiler makes of the kernels of `--exact on`, without a device: few rows and many
have the same instruction of the tensor cores, decodes and prompts the same kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_compile import compiled

pytest.importorskip("triton")
BEGIN = """
import re
import torch
from actorium.gpu.step.batch import ExtendRow

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)

def instructions(kernel):
    return set(re.findall(r"(?:wgmma|mma)\\S*sync\\S*m\\d+n\\d+k\\d+\\S*", kernel.asm["ptx"]))

def contracted(kernel):
    return re.findall(r"fma\\S*f32|mul\\.f32|add\\.f32|sub\\.f32", kernel.asm["ptx"])
"""
PRODUCTS = """
from actorium.kernels.triton.exact_product import MANY, exact_product
for outs in (6144, 28672):
    before = len(hopper.kernels)
    for rows in (1, 64, MANY - 1, MANY, 5000):
        exact_product(empty(rows, 4096), empty(outs, 4096), empty(outs), empty(rows, outs))
    own = hopper.kernels[before:]
    assert len({kernel.hash for kernel in own}) == 2
    assert len(instructions(own[0])) == 1 and not any(map(contracted, own))
    assert all(instructions(kernel) == instructions(own[0]) for kernel in own)
"""
ATTENTION = """
from actorium.gpu.attention.attention_backend import TritonAttention
attention = TritonAttention(exact_for=8192)
for heads, kv, dim, window in ((32, 8, 128, 0), (8, 2, 64, 512)):
    before, layer, i32 = len(hopper.kernels), empty(160, 2 * kv, dim), torch.int32
    for q_len, count in ((1, 3), (3, 64), (1, 1000)):
        pages, lens = torch.zeros(count, 512, dtype=i32), torch.ones(count, dtype=i32)
        attention.decode(pages, lens, 8192, q_len, 16, window, 0.1)(
            empty(count * q_len, heads, dim), layer)
    for start, count in ((0, 2048), (8000, 1), (8000, 40)):
        own = [ExtendRow(0, start, count, torch.zeros(600, dtype=i32))]
        attention.extend(own, 16, window, 0.1)(empty(count, heads, dim), layer)
    own = [kernel for kernel in hopper.kernels[before:] if kernel.metadata.name == "_exact"]
    assert len(own) == 6 and len({kernel.hash for kernel in own}) == 1
    for kernel in hopper.kernels[before:]:
        assert kernel.metadata.name == "_pieces" or not contracted(kernel), kernel.metadata.name
"""


@pytest.mark.slow
def test_few_rows_and_many_have_one_instruction(tmp_path: Path) -> None:
    assert set(compiled(BEGIN + PRODUCTS, tmp_path)) == {"_exact_product"}


@pytest.mark.slow
def test_decodes_and_prompts_have_one_kernel(tmp_path: Path) -> None:
    names = compiled(BEGIN + ATTENTION, tmp_path)
    assert set(names) == {"_exact", "_fold_parts", "_pieces"}
