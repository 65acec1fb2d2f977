"""Experts of `--exact on`: chosen, run and summed with the same bits alone and among others."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import INTERPRETED

from actorium.kernels.reference.experts import StackedExperts, route

pytest.importorskip("triton")
pytestmark = INTERPRETED
BF16, EXPERTS, CHOSEN = torch.bfloat16, 6, 3


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("normalised", [True, False])
def test_tokens_depend_on_themselves_alone(normalised: bool) -> None:
    from actorium.kernels.triton.exact_experts import ExactExperts
    from actorium.kernels.triton.experts import GroupedExperts

    gate_up, down = drawn(EXPERTS, 64, 48, seed=1) * 0.2, drawn(EXPERTS, 48, 32, seed=2) * 0.2
    own = ExactExperts(GroupedExperts(gate_up, down))
    x, logits = drawn(33, 48), drawn(33, EXPERTS + 1, seed=3)
    logits = logits[:, :EXPERTS]  # a shared expert's gate lies behind them
    weights, chosen = own.choose(logits, CHOSEN, normalised)
    want, experts = route(logits, CHOSEN, normalised)
    assert torch.allclose(weights.float().sort(1)[0], want.float().sort(1)[0], atol=4e-3)
    assert (chosen.sort(1)[0] == experts.sort(1)[0]).float().mean() > 0.97  # bf16 logits tie
    y = own(x, weights, chosen)
    error = (y.float() - StackedExperts(gate_up, down)(x, weights, chosen).float()).abs().max()
    assert float(error) < 0.02 * float(y.abs().max())
    for rows in (1, 2, 3, 17):
        for first in (0, 33 - rows):
            part = slice(first, first + rows)
            few = own.choose(logits[part], CHOSEN, normalised)
            assert torch.equal(few[0], weights[part]) and torch.equal(few[1], chosen[part])
            assert torch.equal(own(x[part], *few), y[part]), (rows, first)


def test_equal_experts_are_taken_in_their_order_and_nan_is_some_expert() -> None:
    from actorium.kernels.triton.exact_experts import choose_experts

    logits = torch.zeros(2, EXPERTS, dtype=BF16)
    logits[1] = torch.nan
    weights, chosen = choose_experts(logits, CHOSEN, True)
    assert chosen[0].tolist() == [0, 1, 2] and torch.allclose(weights[0].float(),
                                                              torch.tensor(1 / 3), atol=2e-3)
    assert int(chosen.max()) < EXPERTS and weights[1].isnan().all()
