"""Kimi Delta Attention in torch, Triton and C against one token after the other in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_compile import compiled
from torch import Tensor

pytest.importorskip("triton")

from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.delta_native import plan_runs
from actorium.kernels.cpu.mamba_native import NativeKda
from actorium.kernels.cpu.native_library import library
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.kda import KdaInputs
from actorium.kernels.reference.state_rows import NOBODY
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.triton.triton_ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT, HALF = torch.float32, torch.bfloat16
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
RUNS = [ExtendRun(3, 21, ((4, 9), (21, 10))), ExtendRun(1, 1), ExtendRun(7, 9, ((1, 11),))]
TOKENS, ROWS = 31, 12


class Layer:
    """Random inputs; rows of states that nobody holds are NaN."""

    def __init__(self, heads: int, dim: int, state_dtype: torch.dtype = FLOAT,
                 device: torch.device = CPU) -> None:
        gen = torch.Generator().manual_seed(heads + dim)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=gen).to(device)

        self.heads, self.dim, inner = heads, dim, heads * dim
        self.f, self.b = normal(TOKENS, inner).bfloat16(), normal(TOKENS, heads).bfloat16()
        self.decay, self.bias = normal(heads).exp(), normal(inner)
        g = F.softplus(self.f.float() + self.bias).view(TOKENS, heads, dim) * -self.decay[:, None]
        self.inputs = KdaInputs(normal(TOKENS, 3 * inner), g.flatten(1), self.b.float().sigmoid())
        self.states = torch.full((ROWS, heads, dim, dim), math.nan, dtype=state_dtype,
                                 device=device)
        self.states[[3, 1, 7]] = normal(3, heads, dim, dim).to(state_dtype)

    def one_by_one(self, row: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """(outputs, state) of a sequence's tokens, by the definition."""
        size = (TOKENS, self.heads, self.dim)
        q, k, v = (part.reshape(size).double() for part in self.inputs.qkv.chunk(3, 1))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g, beta = self.inputs.g.view(size).double(), self.inputs.beta.double()
        state, outs = self.states[row].double(), []
        for t in range(start, start + count):
            state = state * g[t].exp()[:, None, :]
            delta = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t, :, None]
            state = state + torch.einsum("hv,hk->hvk", delta, k[t])
            outs.append(torch.einsum("hvk,hk->hv", state, q[t]) * self.dim**-0.5)
        return torch.stack(outs).float(), state.float()

    def check(self, out: Tensor, states: Tensor) -> None:
        """What came of `RUNS`."""
        at, touched = 0, set()
        for run in RUNS:
            for tokens, row in [*run.saves, (run.length, run.row)]:
                want, state = self.one_by_one(run.row, at, tokens)
                torch.testing.assert_close(out[at:at + tokens], want, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(states[row].float(), state, atol=1e-4, rtol=1e-4)
                touched.add(row)
            at += run.length
        assert states[[row for row in range(ROWS) if row not in touched]].isnan().all()


def check_extend(ops: TorchOps, heads: int, dim: int, device: torch.device = CPU) -> None:
    layer = Layer(heads, dim, device=device)
    states = layer.states.clone()
    layer.check(ops.kda_extend(layer.inputs, states, plan_ragged(RUNS, 4, device)), states)


def check_steps(ops: TorchOps, heads: int, dim: int, state_dtype: torch.dtype,
                device: torch.device = CPU) -> None:
    """Each of two rows by a token, and two of padding."""
    layer = Layer(heads, dim, state_dtype, device)
    whole = torch.cat((torch.full_like(layer.states, math.nan), layer.states))
    rows = torch.tensor([NOBODY, 7, 1, NOBODY], device=device)
    out = ops.kda_step(KdaInputs(*(part[:4] for part in layer.inputs)), whole[ROWS:], rows)
    assert out.isfinite().all() and whole[:ROWS].isnan().all()
    for at, row in ((1, 7), (2, 1)):
        want, state = layer.one_by_one(row, at, 1)
        torch.testing.assert_close(out[at:at + 1], want, atol=1e-4, rtol=1e-4)
        most = 1e-5 if state_dtype is FLOAT else 2e-2
        torch.testing.assert_close(whole[ROWS + row].float(), state, atol=most, rtol=most)


@pytest.mark.parametrize("ops", [TorchOps(), pytest.param(TritonOps(), marks=interpreted)],
                         ids=["torch", "triton"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 20)])
def test_as_the_definition(ops: TorchOps, heads: int, dim: int) -> None:
    check_extend(ops, heads, dim)
    for state_dtype in (FLOAT, HALF):
        check_steps(ops, heads, dim, state_dtype)


@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 21)])
def test_the_c_kernel(heads: int, dim: int) -> None:
    """As the definition; and its chunks, and single tokens, have the same bits."""
    lib = library()
    if lib is None:
        pytest.skip("no C kernels here")
    layer = Layer(heads, dim)
    inputs = (layer.inputs.qkv, layer.f, layer.b)
    states, steps = layer.states.clone(), layer.states.clone()
    native = NativeKda(lib, 2, layer.decay, layer.bias)
    out = native.extend(inputs, states, plan_runs(RUNS))
    layer.check(out, states)
    at = 0
    for run in RUNS:
        for t in range(at, at + run.length):
            one = native.step([part[t:t + 1] for part in inputs], steps, torch.tensor([run.row]))
            assert torch.equal(one[0], out[t])
        assert torch.equal(steps[run.row], states[run.row])
        at += run.length
    assert not native.step([part[:1] for part in inputs], steps, torch.tensor([NOBODY])).any()


CODE = """
import torch
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.kda import KdaInputs
from actorium.kernels.triton.triton_ops import TritonOps
inputs = KdaInputs(torch.empty(3, 12288), torch.empty(3, 4096), torch.empty(3, 32))
states = torch.empty(9, 32, 128, 128)
TritonOps().kda_extend(inputs, states, plan_ragged([ExtendRun(1, 3)], 4, inputs.g.device))
TritonOps().kda_step(inputs, states, torch.zeros(3, dtype=torch.int64))
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_kda", "_kda_step"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_extend(TritonOps(), 32, 128, CUDA)
    check_steps(TritonOps(), 32, 128, HALF, CUDA)
