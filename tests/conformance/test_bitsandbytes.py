"""What bitsandbytes itself stores of weights is worth what it says."""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers_models import CPU
from helpers_tables import bnb_8bit

from actorium.gpu.families.stored_weights import StoredWeight
from actorium.gpu.weights.table_codes import TableModule
from actorium.kernels.grouped_rows import dequantise_grouped, unpack_rows

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_itself(kind: str, nested: bool) -> None:
    """What its quantiser stores, as its dequantisation has it; in codes of 8
    bits each number is off by half a unit at most."""
    functional = importlib.import_module("bitsandbytes").functional
    for shape in ((96, 192), (50, 72), (300, 192)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
        packed, state = functional.quantize_4bit(weight, quant_type=kind,
                                                 compress_statistics=nested)
        parts = {"weight": packed, **{f"weight.{end}": part for end, part in
                                      state.as_dict(packed=True).items()}}
        how = StoredWeight(f"bnb-{kind}", 4, 64, True)
        own = TableModule("m", how, parts, shape, CPU)
        want = functional.dequantize_4bit(packed, state)
        assert torch.allclose(own.dense(torch.float32), want, rtol=1e-6, atol=1e-7)
        assert own.even == (shape[1] % 64 == 0)
        if own.even:
            held = unpack_rows(own.rows())
            away = (dequantise_grouped(held, torch.float32) - want).abs().unflatten(-1, (-1, 64))
            most = held.scales.unsqueeze(-1)  # a unit
            assert bool((away <= most * (0.625 if kind == "fp4" else 0.5)).all())


def test_bitsandbytes_in_8_bits_itself() -> None:
    functional = importlib.import_module("bitsandbytes").functional
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(5))
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    made, meant = bnb_8bit(weight.half())
    assert torch.equal(made["weight"], codes) and torch.allclose(made["SCB"], largest)
    assert torch.allclose(meant, functional.int8_vectorwise_dequant(codes, largest))
