"""Weights of AWQ, GPTQ and compressed-tensors, opened: as the formats' descriptions have them, and
as the library that writes them does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_stored import Kind, stored, tensors_of
from torch import Tensor

from actorium.actors.errors import BadModel
from actorium.gpu.families.stored_weights import StoredWeight
from actorium.gpu.weights.stored_codes import StoredModule
from actorium.kernels.grouped_rows import dequantise_grouped, row_format, unpack_rows

CPU = torch.device("cpu")
KINDS = [
    Kind("awq"), Kind("awq", group=128), Kind("awq", group=-1), Kind("awq", symmetric=True),
    Kind("awq", group=256),
    *(Kind(layout, bits, group, symmetric, ordered and group > 0)
      for layout in ("gptq", "gptq_v2", "pack-quantized") for bits in (4, 8)
      for group in (32, 128, -1) for symmetric in (False, True) for ordered in (False, True)
      if group > 0 or not ordered),
    Kind("hqq"), Kind("hqq", group=-1), Kind("hqq", 8, 64), Kind("hqq", 8, 256),
    *(Kind("int-quantized", bits, group, symmetric) for bits in (4, 8) for group in (-1, 64)
      for symmetric in (False, True)),
]


def how_of(kind: Kind) -> StoredWeight:
    return StoredWeight(kind.layout, kind.bits, max(0, kind.group), kind.symmetric, kind.ordered)


def weight(rows: int = 24, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.05


def opened(kind: Kind, parts: dict[str, Tensor], shape: tuple[int, int] = (24, 256)
           ) -> StoredModule:
    return StoredModule("m.q_proj", how_of(kind), parts, shape, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_is_stored(kind: Kind) -> None:
    own = stored(weight(), kind)
    module = opened(kind, tensors_of(own, kind))
    assert torch.equal(module.dense(torch.float32), own.meant)
    rows = module.rows()
    held = how_of(kind).held
    assert row_format(rows)[:3] == (held.bits, held.group, held.mins)
    assert (module.order is not None) == kind.ordered
    meant = own.meant if module.order is None else own.meant[:, module.order]
    # A min is rounded once.
    torch.testing.assert_close(dequantise_grouped(unpack_rows(rows), torch.float32), meant,
                               rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS[::7])
def test_rows_on_a_device(kind: Kind) -> None:
    parts = tensors_of(stored(weight(), kind), kind)
    there = StoredModule("m", how_of(kind), parts, (24, 256), torch.device("cuda")).rows()
    assert there.is_cuda and torch.equal(there.cpu(), opened(kind, parts).rows())


def test_zeros_of_gptq_that_borrow() -> None:
    """A zero of 0, less 1, borrows from its neighbour in the word; the largest is left alone."""
    kind = Kind("gptq")
    own = stored(weight(), kind)
    own.zeros[::3], own.zeros[1::3] = 0, 15
    parts = tensors_of(own, kind)
    whole = tensors_of(own, kind._replace(layout="gptq_v2"))["qzeros"]
    parts["qzeros"] = whole - 0x11111111
    assert torch.equal(opened(kind, parts).dense(torch.float32), own.meant)


def test_columns_that_are_no_whole_groups_are_dequantised() -> None:
    for kind in (Kind("gptq", group=128), Kind("gptq", group=32, ordered=True)):
        own = stored(weight(columns=208), kind)
        module = opened(kind, tensors_of(own, kind), (24, 208))
        assert not module.even
        assert torch.equal(module.dense(torch.float32), own.meant)


def test_groups_that_are_in_order_are_not_reordered() -> None:
    kind = Kind("gptq")
    parts = tensors_of(stored(weight(), kind), kind)
    assert opened(kind._replace(ordered=True), parts).order is None
    packed = Kind("pack-quantized", ordered=True)
    parts = tensors_of(stored(weight(), packed._replace(ordered=False)), packed)
    parts["weight_g_idx"] = torch.full((256,), -1, dtype=torch.int32)
    assert opened(packed, parts).order is None


@pytest.mark.parametrize("columns", [256, 200])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 128), (8, -1), (4, -1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_as_compressed_tensors_packs(columns: int, bits: int, group: int, symmetric: bool) -> None:
    """Where the library is installed: it writes, we read."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for layout in ("pack-quantized", "int-quantized"):
        if columns % group:
            continue
        kind = Kind(layout, bits, group, symmetric)
        own, half = stored(weight(columns=columns), kind), 2 ** (bits - 1)
        args = QuantizationArgs(**{k: v for k, v in kind.scheme()["weights"].items()
                                   if k != "actorder"})
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        given: dict[str, Any] = {"weight": own.meant,
                                 "weight_scale": torch.from_numpy(own.scales).float()}
        if not symmetric:
            given["weight_zero_point"] = torch.from_numpy(own.zeros - half).to(torch.int8)
        library = BaseCompressor.load_from_registry(layout)
        parts = library.compress(given, scheme)
        assert (f"{layout.split('-')[0]}" == "pack") == ("weight_packed" in parts)
        want = library.decompress(parts, scheme)["weight"].float()
        assert torch.equal(want, own.meant)
        module = opened(kind, parts, (24, columns))
        assert torch.equal(module.dense(torch.float32), want)


@pytest.mark.parametrize(("kind", "change", "words"), [
    (Kind("awq"), {"qzeros": None}, "m.q_proj.qzeros is missing"),
    (Kind("gptq"), {"scales": None}, "m.q_proj.scales is missing"),
    (Kind("hqq"), {"zero": None}, "m.q_proj.zero is missing"),
    (Kind("hqq"), {"nbits": torch.tensor(8)}, "m.q_proj.nbits is [8], the config asks for [4]"),
    (Kind("hqq"), {"axis": torch.tensor(0)}, "axis is [0], the config asks for [1]"),
    (Kind("hqq"), {"shape": torch.tensor([24, 128])}, "shape is [24, 128], the config asks"),
    (Kind("hqq"), {"W_q": torch.zeros(24, dtype=torch.uint8)}, "asks for 3072 numbers of 8 bits"),
    (Kind("hqq"), {"scale": torch.zeros(192, 1).int()}, "asks for 192 numbers in a float type"),
    (Kind("gptq"), {"qweight": torch.zeros(32, 24)}, "qweight is torch.float32, not torch.int32"),
    (Kind("gptq"), {"qweight": torch.zeros(16, 24, dtype=torch.int32)}, "qweight has shape"),
    (Kind("gptq"), {"scales": torch.zeros(8, 24, dtype=torch.int32)}, "not a float type"),
    (Kind("gptq"), {"g_idx": torch.arange(256).int()}, "g_idx names groups beyond 8"),
    (Kind("pack-quantized"), {"weight_shape": torch.tensor([24, 255])}, "weight_shape is [24"),
    (Kind("pack-quantized"), {"weight_scale": torch.zeros(24, 4)}, "weight_scale has shape"),
    (Kind("int-quantized", 8, -1), {"weight": torch.zeros(24, 256)}, "weight is torch.float32"),
])
def test_what_is_wrong_is_named(kind: Kind, change: dict[str, Any], words: str) -> None:
    parts = {**tensors_of(stored(weight(), kind), kind), **change}
    with pytest.raises(BadModel) as caught:
        opened(kind, {end: own for end, own in parts.items() if own is not None})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "change", "words"), [
    (Kind("gptq", symmetric=True), {"qzeros": torch.zeros(8, 3, dtype=torch.int32)},
     "qzeros holds zero-points"),
    (Kind("awq"), {"scales": torch.full((8, 24), torch.inf)}, "scales holds a scale that is not"),
    (Kind("int-quantized", 4, -1), {"weight": torch.full((24, 256), 8, dtype=torch.int8)},
     "weight holds numbers of more than 4 bits"),
])
def test_numbers_that_are_wrong_are_named(kind: Kind, change: dict[str, Any], words: str) -> None:
    module = opened(kind, {**tensors_of(stored(weight(), kind), kind), **change})
    with pytest.raises(BadModel) as caught:
        module.rows()
    assert f"m.q_proj.{words}" in str(caught.value)
