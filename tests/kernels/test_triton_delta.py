"""GatedDeltaNet in Triton: steps and windows against the reference, in the interpreter and, at the
sizes of real models, against fp64 on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from helpers_delayed import Speculation, check, delta
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.state_rows import NOBODY
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.triton.triton_ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT, HALF = torch.float32, torch.bfloat16
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
SHAPES = [(Heads(2, 6, 16, 8), 4), (Heads(1, 1, 8, 40), 2), (Heads(3, 3, 12, 12), 3)]


class Window:
    """A random layer, its pools, which are NaN but for the rows of a batch, and a window. Some rows
    of the batch are padding, which has none in the pools: at -1, NaN lies before them."""

    def __init__(self, heads: Heads, taps: int, batch: int, new: int, most: int,
                 dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device,
                 seed: int = 0, padding: int = 0) -> None:
        """new: tokens; most: drafts there is room for; padding: rows of the batch."""
        gen = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=gen).to(device)

        inputs = heads.channels + 2 * heads.values
        self.batch, self.new = batch, new
        self.layer = DeltaLayer(heads, normal(taps, heads.channels), normal(heads.values).square(),
                                normal(heads.values))
        self.rows = torch.randperm(batch + 3, generator=gen)[:batch].to(device)
        self.rows[torch.randperm(batch, generator=gen)[:padding].to(device)] = NOBODY
        self.real = self.rows >= 0
        self.accepted = torch.randint(most + 1, (batch,), generator=gen).to(device)
        slots = batch + 5
        self.states = torch.full((slots, heads.values, heads.value_dim, heads.key_dim), torch.nan,
                                 dtype=state_dtype, device=device)
        self.columns = torch.full((slots, taps - 1, heads.channels), torch.nan, dtype=dtype,
                                  device=device)
        self.pending = torch.full((slots, most, inputs), torch.nan, dtype=dtype, device=device)
        own = self.rows[self.real]
        for pool in (self.states, self.columns):
            pool[own] = normal(batch, *pool.shape[1:]).to(pool.dtype)[self.real]
        waiting = normal(batch, most, inputs).to(dtype)
        waiting[torch.arange(most, device=device) >= self.accepted[:, None]] = torch.nan
        self.pending[own] = waiting[self.real]
        self.accepted[~self.real] = 1 << 40  # what padding says of drafts is rubbish
        gap = heads.values * heads.value_dim
        p = torch.full((batch * new, inputs + gap), torch.nan, dtype=dtype, device=device)
        p[:, :heads.channels] = normal(batch * new, heads.channels).to(dtype)
        p[:, -2 * heads.values:] = normal(batch * new, 2 * heads.values).to(dtype)
        self.p = p

    def run(self, ops: TorchOps, wide: bool = False) -> list[Tensor]:
        """What a window gives, and what it leaves in the pools, which begin in the middle of their
        memory; wide: all in fp64."""
        def contiguous_part(x: Tensor) -> Tensor:
            return x.double() if wide else x.clone()

        layer = self.layer._replace(**{name: contiguous_part(getattr(self.layer, name))
                                       for name in ("conv", "decay", "bias")})
        whole = [torch.cat((torch.full_like(pool, torch.nan), contiguous_part(pool)))
                 for pool in (self.states, self.columns, self.pending)]
        pools = [pool[len(pool) // 2:] for pool in whole]
        p = contiguous_part(self.p)
        if self.pending.shape[1]:
            out = ops.delta_window(p, *pools, self.rows, self.accepted, layer)
        else:
            out = ops.delta_step(p, *pools[:2], self.rows, layer)
        assert all(pool[:len(pool) // 2].isnan().all() for pool in whole)
        assert out.isfinite().all(), "of padding, too"
        return [out.unflatten(0, (self.batch, self.new))[self.real], *pools]


def compare(case: Window, got: list[Tensor], want: list[Tensor], most: float) -> None:
    """Columns and drafts are copies, states and outputs are within `most` of a right one's size."""
    for mine, right in zip(got[2:], want[2:], strict=True):
        assert torch.equal(mine.nan_to_num(7.5), right.to(mine.dtype).nan_to_num(7.5))
    others = torch.ones(len(got[1]), dtype=torch.bool, device=got[1].device)
    own = case.rows[case.real]
    others[own] = False
    assert got[1][others].isnan().all(), "a state of nobody's"
    for mine, right in ((got[0], want[0]), (got[1][own], want[1][own])):
        assert mine.shape == right.shape and mine.isfinite().all()
        error = (mine.double() - right.double()).norm() / (right.double().norm() + 1e-30)
        assert error < most


@interpreted
@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "taps"), SHAPES)
def test_windows_against_the_reference(heads: Heads, taps: int, state_dtype: torch.dtype) -> None:
    @settings(max_examples=6, deadline=None)
    @given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 4), st.integers(0, 99),
           st.integers(0, 2))
    def run(batch: int, new: int, most: int, seed: int, padding: int) -> None:
        most = max(most, new - 1)
        case = Window(heads, taps, batch, new, most, FLOAT, state_dtype, CPU, seed, padding)
        if batch:
            # The interpreter cuts off what bf16 does not hold, the reference rounds.
            most_error = 1e-5 if state_dtype is FLOAT else 2e-2
            compare(case, case.run(TritonOps()), case.run(TorchOps()), most_error)
        else:
            assert case.run(TritonOps())[0].shape == (0, new, heads.values, heads.value_dim)

    run()


@interpreted
def test_a_bf16_model_keeps_beta_in_fp32() -> None:
    case = Window(SHAPES[0][0], 4, 3, 2, 1, HALF, FLOAT, CPU)
    compare(case, case.run(TritonOps()), case.run(TorchOps(), wide=True), 1e-5)


@pytest.mark.parametrize("ops", [TorchOps(), pytest.param(TritonOps(), marks=interpreted)])
@pytest.mark.parametrize(("new", "most"), [(1, 0), (3, 2)])
def test_padding_has_no_state(ops: TorchOps, new: int, most: int) -> None:
    """Nothing is written for it, and the others' states, drafts and outputs are, to the bit, those
    of a batch without it."""
    case = Window(SHAPES[0][0], 4, 5, new, most, FLOAT, FLOAT, CPU, padding=2)
    got = case.run(ops)
    own = case.real.repeat_interleave(new)
    case.p, case.accepted, case.rows = case.p[own], case.accepted[case.real], case.rows[case.real]
    case.batch, case.real = 3, case.real[case.real]
    for one, other in zip(got, case.run(ops), strict=True):
        assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    nobody = Window(SHAPES[0][0], 4, 3, new, most, FLOAT, FLOAT, CPU, padding=3)
    assert all(pool.isnan().all() for pool in nobody.run(ops)[1:])


@interpreted
@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
def test_windows_equal_steps(state_dtype: torch.dtype) -> None:
    case = delta(SHAPES[0][0], 4, FLOAT, state_dtype, ops=TritonOps())
    check(Speculation(case), [(2, [3, 1, 2]), (0, [1, 1, 1]), (1, [2, 1, 2])])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "new", "most"), [(1, 1, 0), (33, 1, 0), (1, 3, 2), (64, 3, 4)])
@pytest.mark.parametrize("heads", [Heads(16, 32, 128, 128), Heads(16, 48, 128, 128),
                                   Heads(3, 6, 96, 80)])
def test_on_the_device(heads: Heads, batch: int, new: int, most: int, dtype: torch.dtype,
                       state_dtype: torch.dtype) -> None:
    case = Window(heads, 4, batch, new, most, dtype, state_dtype, CUDA, padding=batch // 4)
    want = case.run(TorchOps(), wide=True)
    compare(case, case.run(TritonOps()), want, 1e-5 if state_dtype is FLOAT else 1e-2)
    first = case.run(TritonOps())
    for _ in range(3):  # an error that moves is a race
        for one, other in zip(first, case.run(TritonOps()), strict=True):
            assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
