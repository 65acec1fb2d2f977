"""A token of Mamba-2 in Triton against the reference: in the interpreter, compiled for Hopper, on a
CUDA device, and in a whole model with drafts' windows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers_compile import compiled
from helpers_mamba import write_granite
from helpers_speculation import Work, tokens_of

pytest.importorskip("triton")

from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.registry import load_model
from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.ssd import SSDSizes, split_inputs
from actorium.kernels.reference.state_rows import NOBODY
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.triton.triton_ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT, HALF = torch.float32, torch.bfloat16
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
SMALL = [SSDSizes(8, 1, 16, 24), SSDSizes(6, 3, 40, 10), SSDSizes(4, 4, 5, 33)]


def check(batch: int, sizes: SSDSizes, state_dtype: torch.dtype,
          device: torch.device = CPU) -> None:
    """Outputs and states of both; those of other rows, and what lies before the first one, where
    padding's would be, are NaN, and stay so."""
    gen = torch.Generator().manual_seed(batch + sizes.heads)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen).to(device)

    rows = torch.randperm(batch + 3, generator=gen)[:batch].to(device)
    states = torch.full((batch + 5, sizes.heads, sizes.head_dim, sizes.state_dim), math.nan,
                        dtype=state_dtype, device=device)
    states[rows] = normal(batch, *states.shape[1:]).to(state_dtype)
    rows = torch.cat((rows.new_tensor([NOBODY]), rows, rows.new_tensor([NOBODY])))
    batch += 2
    inputs = split_inputs(normal(batch, sizes.channels), normal(batch, sizes.heads).square(), sizes)
    a, skip = -normal(sizes.heads).square(), normal(sizes.heads)
    found = []
    for ops in (TorchOps(), TritonOps()):
        whole = torch.cat((torch.full_like(states, math.nan), states))
        own = whole[len(states):]
        out = ops.ssd_step(inputs, own, rows, a, skip)
        assert out.isfinite().all() and whole[:len(states)].isnan().all()
        found.append((out[1:-1], own))
    (want, right), (got, mine) = found
    rows = rows[1:-1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    others = [row for row in range(len(states)) if row not in rows.tolist()]
    assert mine[others].isnan().all()
    # The interpreter cuts off what bf16 does not hold, the reference rounds.
    most = 1e-6 if state_dtype is FLOAT else 1e-2
    torch.testing.assert_close(mine[rows], right[rows], rtol=most, atol=most)


@interpreted
@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("batch", [1, 5])
def test_as_the_reference(batch: int, sizes: SSDSizes, state_dtype: torch.dtype) -> None:
    check(batch, sizes, state_dtype)


@interpreted
def test_no_rows() -> None:
    inputs = split_inputs(torch.empty(0, SMALL[0].channels), torch.empty(0, 8), SMALL[0])
    a, states = torch.empty(8), torch.full((2, 8, 16, 24), math.nan)
    got = TritonOps().ssd_step(inputs, states, torch.empty(0, dtype=torch.int64), a, a)
    assert got.shape == (0, 8, 16) and states.isnan().all()


@interpreted
@pytest.mark.slow
def test_a_model_speaks_as_on_torch_with_drafts_and_without(tmp_path: Path) -> None:
    write_granite(tmp_path)
    work = Work([[5, 9, 2, 41, 17] * 4, [7, 3, 3]],
                [ResolvedParams(max_tokens=5, temperature=0.0)] * 2)
    torchs, tritons = (load_model(tmp_path, Config(device=DeviceConfig(kernels=kernels)), CPU,
                                  lambda *_: None) for kernels in ("torch", "triton"))
    want = work.plain(torchs)
    assert tokens_of(work.plain(tritons)) == tokens_of(want)
    _, got = work.guessed(tritons, want, 2, lambda seed, at: at % 3 > 0)
    assert tokens_of(got) == tokens_of(want)


CODE = """
import torch
from actorium.kernels.reference.ssd import SSDSizes, split_inputs
from actorium.kernels.triton.triton_ops import TritonOps
sizes, rows = SSDSizes(48, 1, 64, 128), torch.zeros(3, dtype=torch.int64)
inputs = split_inputs(torch.empty(3, sizes.channels), torch.empty(3, 48), sizes)
for dtype in (torch.float32, torch.bfloat16):
    states = torch.empty(9, 48, 64, 128, dtype=dtype)
    TritonOps().ssd_step(inputs, states, rows, torch.empty(48), torch.empty(48))
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_step", "_step"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 64])
def test_on_the_device(batch: int, state_dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check(batch, SSDSizes(48, 1, 64, 128), state_dtype, CUDA)
    check(batch, SSDSizes(12, 4, 80, 96), state_dtype, CUDA)
