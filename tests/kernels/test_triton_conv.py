"""The convolution of extend steps in Triton against the reference: in the interpreter, compiled for
Hopper, and on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_compile import compiled
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from actorium.kernels.backends import triton_fault
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.state_rows import NOBODY
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.triton.triton_ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


def check(runs: list[ExtendRun], channels: int, taps: int, biased: bool, dtype: torch.dtype,
          device: torch.device = CPU, most: float = 2e-6, activate: bool = True) -> None:
    """Outputs of the tokens, by both functions, and columns, of both; what is nobody's is NaN, and
    stays so."""
    gen = torch.Generator().manual_seed(len(runs) + channels)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen).to(device)

    tokens = sum(run.length for run in runs)
    x = torch.full((tokens, channels + 7), torch.nan, dtype=dtype, device=device)
    x[:, :channels] = normal(tokens, channels).to(dtype)
    columns = torch.full((40, taps - 1, channels), torch.nan, dtype=dtype, device=device)
    for run in runs:
        columns[run.row] = normal(taps - 1, channels).to(dtype)
    weight, bias = normal(taps, channels), normal(channels) if biased else None
    found = []
    for ops in (TorchOps(), TritonOps()):
        plan, own = plan_ragged(runs, taps, device), columns.clone()
        for _ in range(2):  # what is made of a plan once serves the next layer
            own.copy_(columns)
            out = ops.conv_extend(x[:, :channels], own, weight, plan, bias, activate)
        assert out.shape == (tokens + (len(runs) - 1) * (taps - 1), channels)
        starts = torch.tensor([0, *(run.length + taps - 1 for run in runs)]).cumsum(0)
        outs = [out[at:at + run.length] for at, run in zip(starts.tolist(), runs, strict=False)]
        found.append((torch.cat(outs), own))
        again = columns.clone()
        alone = ops.conv_tokens(x[:, :channels], again, weight, plan, torch.float32, bias, activate)
        assert torch.equal(alone, found[-1][0])
        assert torch.equal(again.nan_to_num(7.5), own.nan_to_num(7.5))
    (want, kept), (got, mine) = found
    assert got.dtype is torch.float32
    assert torch.allclose(got, want, rtol=most, atol=10 * most)
    assert torch.equal(mine.nan_to_num(7.5), kept.nan_to_num(7.5))


@st.composite
def steps(draw: st.DrawFn) -> list[ExtendRun]:
    """Sequences as short as one token, and as long as some blocks; states kept on the way."""
    runs, free = [], iter(range(20, 40))
    for row in draw(st.lists(st.integers(1, 19), min_size=1, max_size=5, unique=True)):
        length = draw(st.one_of(st.integers(1, 5), st.integers(1, 50)))
        at = draw(st.lists(st.integers(1, length), max_size=2))
        runs.append(ExtendRun(row, length, tuple((tokens, next(free)) for tokens in sorted(at))))
    return runs


@interpreted
@settings(max_examples=12, deadline=None)
@given(runs=steps(), channels=st.sampled_from([1, 40, 130, 300]), taps=st.integers(2, 5),
       biased=st.booleans(), wide=st.booleans(), activate=st.booleans())
def test_as_the_reference(runs: list[ExtendRun], channels: int, taps: int, biased: bool,
                          wide: bool, activate: bool) -> None:
    check(runs, channels, taps, biased, torch.float32 if wide else torch.bfloat16,
          activate=activate)


def check_one(batch: int, channels: int, taps: int, biased: bool, dtype: torch.dtype,
              device: torch.device = CPU, most: float = 2e-6, activate: bool = True) -> None:
    """A token of each row, and two of padding; what is nobody's is NaN, and stays so."""
    gen = torch.Generator().manual_seed(batch + channels)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen).to(device)

    x = torch.full((batch + 2, channels + 7), torch.nan, dtype=dtype, device=device)
    x[:, :channels] = normal(batch + 2, channels).to(dtype)
    rows = torch.randperm(batch + 4, generator=gen)[:batch].to(device)
    columns = torch.full((2 * batch + 8, taps - 1, channels), torch.nan, dtype=dtype, device=device)
    columns[batch + 4 + rows] = normal(batch, taps - 1, channels).to(dtype)
    rows = torch.cat((rows.new_tensor([NOBODY]), rows, rows.new_tensor([NOBODY])))
    weight, bias = normal(taps, channels), normal(channels) if biased else None
    found = []
    for ops in (TorchOps(), TritonOps()):
        own = columns.clone()
        out = ops.conv_step(x[:, :channels], own[batch + 4:], rows, weight, bias, activate)
        assert out.dtype is torch.float32 and out.isfinite().all()
        found.append((out[1:-1], own))
    (want, kept), (got, mine) = found
    assert torch.allclose(got, want, rtol=most, atol=10 * most)
    assert torch.equal(mine.nan_to_num(7.5), kept.nan_to_num(7.5))
    assert kept[:batch + 4].isnan().all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "channels", "taps"), [(1, 300, 4), (5, 40, 2), (3, 1, 5)])
def test_one_token_of_each_row(batch: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    for biased in (False, True):
        check_one(batch, channels, taps, biased, dtype, activate=biased)


CODE = """
import torch
from actorium.kernels.triton.triton_ops import TritonOps
from actorium.kernels.ragged import ExtendRun, plan_ragged
channels = 8192
x = torch.empty(130, channels + 4160, dtype=torch.bfloat16)[:, :channels]
plan = plan_ragged([ExtendRun(1, 100, ((64, 3),)), ExtendRun(2, 30)], 4, x.device)
columns = torch.empty(9, 3, channels, dtype=torch.bfloat16)
for bias in (None, torch.empty(channels)):
    TritonOps().conv_extend(x, columns, torch.empty(4, channels), plan, bias)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_conv", "_keep"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_the_device(dtype: torch.dtype) -> None:
    runs = [ExtendRun(3, 700, ((64, 21), (64, 22), (512, 23))), ExtendRun(1, 2, ((1, 24),)),
            ExtendRun(9, 1), ExtendRun(2, 1300)]
    for channels, biased in ((8192, False), (3000, True)):
        for _ in range(3):  # an error that moves is a race
            check(runs, channels, 4, biased, dtype, CUDA, 1e-5)
            check_one(33, channels, 4, biased, dtype, CUDA, 1e-5)
