"""The scan of Mamba in torch, Triton and C against one token after the other in float64: in the
interpreter, compiled for Hopper, and on a CUDA device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_compile import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.delta_native import plan_runs
from actorium.kernels.cpu.mamba_native import NativeScan
from actorium.kernels.cpu.native_library import library
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.selective_scan import ScanInputs
from actorium.kernels.reference.ssd import time_steps
from actorium.kernels.reference.state_rows import NOBODY
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.triton.triton_ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT, HALF = torch.float32, torch.bfloat16
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
RUNS = [ExtendRun(3, 21, ((4, 9), (21, 10))), ExtendRun(1, 1), ExtendRun(7, 9, ((1, 11),))]
TOKENS, ROWS = 31, 12


class Scan:
    """Random inputs; rows of states that nobody holds are NaN."""

    def __init__(self, channels: int, dims: int, state_dtype: torch.dtype = FLOAT,
                 device: torch.device = CPU, rows: tuple[int, ...] = (3, 1, 7),
                 tokens: int = TOKENS) -> None:
        gen = torch.Generator().manual_seed(channels + dims)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=gen).to(device)

        self.raw = [normal(tokens, width).bfloat16() for width in (channels, channels, dims, dims)]
        x, dt, b, c = self.raw
        self.bias, self.a, self.skip = normal(channels), -normal(channels, dims).exp(), normal(
            channels)
        wide = torch.cat((b, c), 1).float()
        self.inputs = ScanInputs(x.float(), time_steps(dt, self.bias, (0.0, math.inf)),
                                 *wide.split(dims, 1))
        self.states = torch.full((ROWS, 1, channels, dims), math.nan, dtype=state_dtype,
                                 device=device)
        self.states[list(rows)] = normal(len(rows), 1, channels, dims).to(state_dtype)

    def one_by_one(self, row: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """(outputs, state) of a sequence's tokens, by the definition."""
        x, dt, b, c = (part[start:start + count].double() for part in self.inputs)
        state, outs = self.states[row, 0].double(), []
        for t in range(count):
            state = (dt[t, :, None] * self.a).exp() * state + (dt[t] * x[t])[:, None] * b[t]
            outs.append(state @ c[t] + self.skip * x[t])
        return torch.stack(outs).float(), state.float()

    def check(self, out: Tensor, states: Tensor, most: float = 1e-4) -> None:
        """What came of `RUNS`."""
        at, touched = 0, set()
        for run in RUNS:
            for tokens, row in [*run.saves, (run.length, run.row)]:
                want, state = self.one_by_one(run.row, at, tokens)
                torch.testing.assert_close(out[at:at + tokens], want, atol=most, rtol=most)
                torch.testing.assert_close(states[row, 0].float(), state, atol=most, rtol=most)
                touched.add(row)
            at += run.length
        others = [row for row in range(ROWS) if row not in touched]
        assert states[others].isnan().all()


def check_extend(ops: TorchOps, channels: int, dims: int, device: torch.device = CPU) -> None:
    scan = Scan(channels, dims, device=device)
    states = scan.states.clone()
    out = ops.scan_extend(scan.inputs, states, plan_ragged(RUNS, 4, device), scan.a, scan.skip)
    scan.check(out, states)


def check_steps(ops: TorchOps, channels: int, dims: int, state_dtype: torch.dtype,
                device: torch.device = CPU) -> None:
    """Each of two rows by a token, and two of padding."""
    scan = Scan(channels, dims, state_dtype, device, (2, 5), 4)
    whole = torch.cat((torch.full_like(scan.states, math.nan), scan.states))
    rows = torch.tensor([NOBODY, 5, 2, NOBODY], device=device)
    out = ops.scan_step(scan.inputs, whole[ROWS:], rows, scan.a, scan.skip)
    assert out.isfinite().all() and whole[:ROWS].isnan().all()
    for at, row in ((1, 5), (2, 2)):
        want, state = scan.one_by_one(row, at, 1)
        torch.testing.assert_close(out[at:at + 1], want, atol=1e-4, rtol=1e-4)
        most = 1e-5 if state_dtype is FLOAT else 2e-2
        torch.testing.assert_close(whole[ROWS + row, 0].float(), state, atol=most, rtol=most)


@pytest.mark.parametrize("ops", [TorchOps(), pytest.param(TritonOps(), marks=interpreted)],
                         ids=["torch", "triton"])
@pytest.mark.parametrize(("channels", "dims"), [(40, 16), (5, 7)])
def test_as_the_definition(ops: TorchOps, channels: int, dims: int) -> None:
    check_extend(ops, channels, dims)
    for state_dtype in (FLOAT, HALF):
        check_steps(ops, channels, dims, state_dtype)


@settings(max_examples=8, deadline=None)
@given(channels=st.integers(1, 70), dims=st.integers(1, 40))
def test_the_c_kernel(channels: int, dims: int) -> None:
    """As the definition; and its chunks, and single tokens, have the same bits."""
    lib = library()
    if lib is None:
        pytest.skip("no C kernels here")
    scan = Scan(channels, dims)
    states, steps = scan.states.clone(), scan.states.clone()
    native = NativeScan(lib, 2, scan.a, scan.skip, scan.bias)
    out = native.extend(scan.raw, states, plan_runs(RUNS))
    scan.check(out, states, 1e-3)
    at = 0
    for run in RUNS:
        for t in range(at, at + run.length):
            one = native.step([part[t:t + 1] for part in scan.raw], steps, torch.tensor([run.row]))
            assert torch.equal(one[0], out[t])
        assert torch.equal(steps[run.row], states[run.row])
        at += run.length
    assert not native.step([part[:1] for part in scan.raw], steps, torch.tensor([NOBODY])).any()


def test_steps_large_and_small() -> None:
    """dt of 1e3 forgets all, one near 0 changes nothing: no NaN on the way, in C neither."""
    scan = Scan(6, 16)
    scan.raw[1][:10], scan.raw[1][10:20] = 1e3, -60.0
    scan.inputs = scan.inputs._replace(dt=F.softplus(scan.raw[1].float() + scan.bias))
    check = scan.states.clone()
    out = TorchOps().scan_extend(scan.inputs, check, plan_ragged(RUNS, 4, CPU), scan.a, scan.skip)
    scan.check(out, check, 1e-3)
    if (lib := library()) is not None:
        check = scan.states.clone()
        native = NativeScan(lib, 1, scan.a, scan.skip, scan.bias)
        scan.check(native.extend(scan.raw, check, plan_runs(RUNS)), check, 1e-3)


CODE = """
import torch
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.selective_scan import ScanInputs
from actorium.kernels.triton.triton_ops import TritonOps
x, wide, rows = torch.empty(3, 8192), torch.empty(3, 32), torch.zeros(3, dtype=torch.int64)
inputs, a = ScanInputs(x, x, *wide.split(16, 1)), torch.empty(8192, 16)
states = torch.empty(9, 1, 8192, 16)
plan = plan_ragged([ExtendRun(1, 3)], 4, x.device)
TritonOps().scan_extend(inputs, states, plan, a, torch.empty(8192))
TritonOps().scan_step(inputs, states, rows, a, torch.empty(8192))
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_scan", "_scan_step"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_extend(TritonOps(), 8192, 16, CUDA)
    check_steps(TritonOps(), 8192, 16, HALF, CUDA)
