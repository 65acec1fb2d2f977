"""The row-wise kernels and those of GatedDeltaNet compile for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_compile import compiled

pytest.importorskip("triton")
ROWS = """
import torch
from actorium.kernels.reference.apply_plan import table_addresses
from actorium.kernels.triton.triton_ops import TritonOps
from actorium.kernels.triton.norm import add_rms_norm

BF16, ops = torch.bfloat16, TritonOps()
x = torch.empty(3, 4096, dtype=BF16)
ops.rms_norm(x, x[0], 1e-5)
ops.rms_norm(x[:, :1001], x[0, :1001], 1e-5)
add_rms_norm(x, x, x[0], 1e-5)
ops.rms_norm_add(x, x[0], 1e-5, x)
ops.silu_mul(x)
ops.gelu_mul(x)
ops.gated_norm(torch.empty(3, 32, 128), torch.empty(128), x.unflatten(-1, (32, 128)), 1e-5)
ops.norm_gated(torch.empty(3, 4096), torch.empty(4096), x, 1e-5, 8)
for dim, dtype in ((128, BF16), (80, torch.float8_e4m3fn)):
    qkv, norm = torch.empty(3, 48, dim, dtype=BF16), torch.empty(40, dim, dtype=BF16)
    ops.rotate_write(qkv, 32, norm, 1e-5, torch.empty(3, 2, 1, dim, dtype=BF16),
                     torch.empty(9, 16, dim, dtype=dtype), torch.zeros(3, dtype=torch.int64))
table = torch.zeros(5, 12, dtype=torch.int32)
ops.apply_plan([table], table_addresses([table]), torch.zeros(3, 40, dtype=torch.int32))
"""
DELTA = """
import torch
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.triton.triton_ops import TritonOps
from actorium.kernels.ragged import ExtendRun, plan_ragged

heads, ops = Heads(16, 48, 128, 128), TritonOps()
layer = DeltaLayer(heads, torch.empty(4, heads.channels), torch.empty(48), torch.empty(48))
columns = torch.empty(9, 3, heads.channels, dtype=torch.bfloat16)
p = torch.empty(6, heads.channels + 48 * 130, dtype=torch.bfloat16)
pending = torch.empty(9, 2, heads.channels + 96, dtype=torch.bfloat16)
rows = torch.zeros(2, dtype=torch.int64)
states = torch.empty(9, 48, 128, 128)
plan = plan_ragged([ExtendRun(1, 5), ExtendRun(2, 1)], 4, p.device)
ops.delta_extend(p, states, columns, plan, layer)
ops.delta_step(p[:2], states, columns, rows, layer)
ops.delta_window(p, states.bfloat16(), columns, pending, rows, rows, layer)
"""


@pytest.mark.slow
def test_row_wise_kernels(tmp_path: Path) -> None:
    assert compiled(ROWS, tmp_path) == [*["_norm"] * 4, *["_gate"] * 2, *["_gated"] * 2,
                                        *["_rotate"] * 2, "_apply"]


@pytest.mark.slow
def test_gated_delta(tmp_path: Path) -> None:
    names = ["_conv", "_keep", "_prepare", "_walk", *["_inputs", "_rule"] * 2]
    assert compiled(DELTA, tmp_path) == names
