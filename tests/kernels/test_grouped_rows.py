"""Rows of weights in 4 to 8 bits: packed, opened, stacked, and what they stand for."""

from __future__ import annotations

import pytest
import torch

from actorium.kernels.grouped_rows import (
    BITS,
    Grouped,
    GroupedLinear,
    RowFormat,
    columns_of,
    dequantise_grouped,
    grouped_mm,
    is_grouped,
    pack_rows,
    quantise_grouped,
    row_format,
    unpack_rows,
)

FORMATS = [RowFormat(bits, group, mins, 0 if mins else 1 << bits - 1)
           for bits in BITS for group in (0, 16, 32, 128) for mins in (False, True)]


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 0.02


@pytest.mark.parametrize("form", FORMATS)
def test_rows_hold_what_was_packed(form: RowFormat) -> None:
    own = quantise_grouped(_weight(6, 256), form)
    rows = pack_rows(own)
    assert is_grouped(rows) and row_format(rows) == form and columns_of(rows) == 256
    again = unpack_rows(torch.cat((rows[3:], rows[:3])))
    assert torch.equal(again.codes, own.codes.roll(3, 0))
    assert torch.equal(again.scales, own.scales.roll(3, 0))
    assert (again.mins is None) == (own.mins is None)


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_values_are_close(form: RowFormat) -> None:
    weight = _weight(6, 256)
    own = quantise_grouped(weight, form)
    step = own.scales.abs().repeat_interleave(256 // own.scales.shape[1], -1)
    # The end of a range that the other sign has may be a whole step away.
    assert ((dequantise_grouped(own, torch.float32) - weight).abs() <= step * 1.001).all()
    assert int(own.codes.max()) < 1 << form.bits


def test_products_of_integers_are_near_those_of_the_weight() -> None:
    x, form = _weight(5, 256) * 50, RowFormat(4, 32, True)
    own = quantise_grouped(_weight(24, 256), form)
    exact = x @ dequantise_grouped(own, torch.float32).t()
    assert (grouped_mm(x, own) - exact).norm() < 0.01 * exact.norm()
    linear = GroupedLinear(pack_rows(own), torch.ones(24))
    assert torch.allclose(linear(x), exact + 1, atol=1e-6)
    ids = torch.tensor([3, 3, 17])
    assert torch.equal(linear.rows(ids, torch.float32),
                       dequantise_grouped(own, torch.float32)[ids])


def test_scales_of_any_stride() -> None:
    own = quantise_grouped(_weight(6, 64), RowFormat(8, 0, False, 128))
    turned = own._replace(scales=own.scales.t().contiguous().t())
    assert torch.equal(pack_rows(turned), pack_rows(own))


def test_rows_that_disagree_with_their_format_are_refused() -> None:
    own = quantise_grouped(_weight(2, 64), RowFormat(4, 32, False, 8))
    for wrong in (own._replace(mins=own.scales), own._replace(scales=own.scales[:, :1]),
                  own._replace(format=RowFormat(4, 128, False, 8)),
                  own._replace(format=RowFormat(3, 32, False, 4))):
        with pytest.raises(ValueError):
            pack_rows(Grouped(*wrong))
