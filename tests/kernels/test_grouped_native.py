"""Products in C with weights in 4 to 8 bits, against the reference of integers."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_builds import built
from helpers_gguf import stored
from helpers_pairs import pairs
from torch import Tensor

from actorium.gpu.families.weight_formats import WeightFormat
from actorium.gpu.weights.gguf_blocks import FORMATS as BLOCK_FORMATS
from actorium.gpu.weights.gguf_blocks import NATIVE_ROWS, NUMBERS, grouped
from actorium.kernels.cpu import native_library
from actorium.kernels.cpu.grouped_native import (
    GroupedMemory,
    NativeGrouped,
    NativeGroupedGated,
    can_group,
    layout_bytes,
)
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.grouped_rows import (
    BITS,
    FP4,
    GROUPS,
    BlockPart,
    BlockRows,
    Grouped,
    RowFormat,
    dequantise_grouped,
    grouped_mm,
    pack_rows,
    quantise_grouped,
)

pytestmark = pytest.mark.usefixtures("all_threads")
BF16 = torch.bfloat16
ROWS = (1, 2, 3, 7, 8, 31, 32, 33, 200)
SUMMED = 4e-6
"""How far sums in f32 may be off, as a share of the absolute values summed."""
FORMATS = [RowFormat(bits, group, mins, 0 if mins else 1 << bits - 1)
           for bits, group, mins in product(BITS, (0, *GROUPS), (False, True))] + [FP4]
PROCESSORS = ("this", "avx2", "avx_vnni", "any")
PLAIN = ("-O1",)
"""Of a library without instructions of any one processor: what loops of plain C are unrolled to for
speed takes the compiler four times as long, and is run by tests alone."""
HEADERS = ("common.h", "lanes.h", "packed.h", "job.h", "program.h", "tiles.h", "tiles_amx.h",
           "tiles_vector.h")


def sources(folder: Path) -> None:
    """The sources of these products and their packing alone; all other functions do nothing."""
    own = [*native_library.SOURCES.glob("grouped*"), *native_library.SOURCES.glob("gguf*"),
           *map(native_library.SOURCES.joinpath, HEADERS)]
    for source in own:
        (folder / source.name).write_bytes(source.read_bytes())
    defined = "".join(source.read_text() for source in own if source.suffix == ".c")
    names = [name for name in native_library.SIGNATURES if f"\nvoid {name}(" not in defined]
    (folder / "stub.c").write_text("".join([
        f"int actorium_version(void) {{ return {native_library.VERSION}; }}\n",
        "int tiles_fast(void) { return 0; }\nint extend_ready(void) { return 0; }\n",
        *(f"void {name}(void) {{}}\n" for name in names)]))


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("this", "any")))
    for name in PROCESSORS])
def lib(request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """Built for this processor, for laptops', and in plain C."""
    if request.param != "any":
        yield built(request.param)
        return
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sources")
        sources(folder)
        patch.setattr(native_library, "SOURCES", folder)
        found = native_library.library(None, PLAIN)
    if found is None:
        pytest.skip("no C compiler, or torch with another OpenMP")
    yield found


@pytest.fixture(scope="module")
def memory() -> GroupedMemory:
    return GroupedMemory()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(outs: int, ins: int, form: RowFormat) -> Grouped:
    """A weight whose scales are exact in f16."""
    own = quantise_grouped(rand(outs, ins) * 0.02, form)
    if not form.group:
        return own
    return own._replace(scales=own.scales.half().float(),
                        mins=None if own.mins is None else own.mins.half().float())


def terms(x: Tensor, own: Grouped) -> Tensor:
    """The absolute values of what is summed, [T, N]: codes and mins apart."""
    count, x = own.scales.shape[-1], x.float().abs()
    codes = own._replace(mins=None, scales=own.scales.abs(), format=own.format._replace(zero=0))
    whole = x @ dequantise_grouped(codes, torch.float32).abs().t()
    if own.mins is not None:
        whole += x.unflatten(1, (count, -1)).sum(-1) @ own.mins.abs().t()
    return whole + 1e-30


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_format_by_reference(lib: ctypes.CDLL, memory: GroupedMemory,
                                   form: RowFormat) -> None:
    own = drawn(40, 256, form)
    linear = NativeGrouped(pack_rows(own), None, lib, 2, memory)
    for rows in (1, 6, 13):
        x = rand(rows, 256, seed=rows).to(BF16)
        error = (linear.wide(x) - grouped_mm(x.float(), own)).abs()
        assert (error <= SUMMED * terms(x, own)).all()
    ids = torch.tensor([39, 0, 17])
    want = dequantise_grouped(own, torch.float32)[ids]
    assert torch.allclose(linear.rows(ids, torch.float32), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("rows", "outs", "ins"), pairs(
    ROWS, [(1, 32), (16, 64), (33, 96), (250, 512)]))
@pytest.mark.parametrize("form", [RowFormat(4, 32, True), RowFormat(8, 0, False, 128), FP4],
                         ids=str)
def test_shapes_and_what_is_added(lib: ctypes.CDLL, memory: GroupedMemory, form: RowFormat,
                                  outs: int, ins: int, rows: int) -> None:
    own, bias = drawn(outs, ins, form), rand(outs, seed=1).to(BF16)
    x, more = rand(rows, ins, seed=2).to(BF16), rand(rows, outs, seed=3).to(BF16)
    linear = NativeGrouped(pack_rows(own), bias, lib, 2, memory)
    want = grouped_mm(x.float(), own) + bias
    slack = SUMMED * (terms(x, own) + 4)
    assert ((linear.wide(x) - want).abs() <= slack).all()
    assert ((linear(x) - want).abs() <= slack + want.abs() / 256).all()
    want = want + more
    assert ((linear.add(x, more) - want).abs() <= slack + want.abs() / 256).all()


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_by_silu(lib: ctypes.CDLL, memory: GroupedMemory, rows: int, bias: bool) -> None:
    own, x = drawn(96, 128, RowFormat(4, 32, False, 8)), rand(rows, 128, seed=2).to(BF16)
    own = own._replace(scales=own.scales * 32)
    more = rand(96, seed=3).to(BF16) if bias else None
    gated = NativeGroupedGated(pack_rows(own), more, lib, 2, memory)
    gate, up = (grouped_mm(x.float(), own) + (0 if more is None else more)).chunk(2, 1)
    want = F.silu(gate) * up
    assert ((gated(x) - want).abs() <= want.abs() / 200 + 1e-4).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_row_gives_the_same_bits_in_any_batch(lib: ctypes.CDLL, memory: GroupedMemory,
                                                  form: RowFormat) -> None:
    linear = NativeGrouped(pack_rows(drawn(100, 256, form)), None, lib, 2, memory)
    x = rand(200, 256, seed=4).to(BF16)
    whole = linear.wide(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 13):
        for first in (5, 199 - count):
            assert torch.equal(linear.wide(x[first:first + count]), whole[first:first + count])


@pytest.mark.parametrize("group", [16, 32])
def test_a_large_input_coarsens_its_own_16_columns_alone(lib: ctypes.CDLL, memory: GroupedMemory,
                                                         group: int) -> None:
    own = drawn(40, 64, RowFormat(8, group, False, 128))
    own.codes[:, :16] = 128
    x = rand(5, 64, seed=7).to(BF16)
    x[:, :16] = 0
    whole = terms(x, own)
    x[:, 3] = 1000.0
    want = x.float() @ dequantise_grouped(own, torch.float32).t()
    error = NativeGrouped(pack_rows(own), None, lib, 2, memory).wide(x) - want
    assert (error.abs() <= 0.01 * whole).all()


def test_inputs_longer_than_scratch_take_several_passes(lib: ctypes.CDLL,
                                                        memory: GroupedMemory) -> None:
    rows = pack_rows(drawn(48, 512, RowFormat(4, 128, True)))
    whole, small = (NativeGrouped(rows, None, lib, 2, some)
                    for some in (memory, GroupedMemory(20000)))
    x = rand(200, 512, seed=5).to(BF16)
    assert torch.equal(whole.wide(x), small.wide(x))


def test_what_is_not_finite_stays_in_its_row(lib: ctypes.CDLL, memory: GroupedMemory) -> None:
    linear = NativeGrouped(pack_rows(drawn(48, 256, RowFormat(4, 32, False, 8))), None, lib, 2,
                           memory)
    x = rand(5, 256, seed=6).to(BF16)
    want = linear.wide(x)
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = x.clone()
        spoiled[2, 17] = bad
        got = linear.wide(spoiled)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mins", [False, True])
def test_the_largest_products_fit_their_sums(lib: ctypes.CDLL, memory: GroupedMemory, bits: int,
                                             mins: bool) -> None:
    """Where products of bytes are added up in 16 bits, none may pass their ends."""
    form = RowFormat(bits, 32, mins, 0 if mins else 1 << bits - 1)
    for code, x in product((0, 2**bits - 1), (1.0, -1.0)):
        own = Grouped(torch.full((16, 64), code, dtype=torch.uint8), torch.ones(16, 2),
                      torch.zeros(16, 2) if mins else None, form)
        inputs = torch.full((5, 64), x, dtype=BF16)
        got = NativeGrouped(pack_rows(own), None, lib, 2, memory).wide(inputs)
        assert torch.allclose(got, grouped_mm(inputs.float(), own), rtol=1e-5)


@pytest.mark.parametrize("mins", [False, True])
def test_small_and_large_inputs(lib: ctypes.CDLL, memory: GroupedMemory, mins: bool) -> None:
    own = drawn(48, 256, RowFormat(4, 32, mins, 0 if mins else 8))
    linear = NativeGrouped(pack_rows(own), None, lib, 2, memory)
    assert not linear.wide(torch.zeros(3, 256, dtype=BF16)).any()
    assert linear.wide(torch.full((1, 256), 1e-39, dtype=BF16)).abs().max() < 1e-36
    for power in (-100, 100):
        x = torch.ldexp(rand(3, 256, seed=7), torch.tensor(power)).to(BF16)
        error = (linear.wide(x) - grouped_mm(x.float(), own)).abs()
        assert (error <= SUMMED * terms(x, own)).all()


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scales_beyond_f16(lib: ctypes.CDLL, memory: GroupedMemory, scale: float) -> None:
    own = drawn(40, 64, RowFormat(4, 32, True))
    own = own._replace(scales=own.scales * scale, mins=own.mins * scale)
    rows = NativeGrouped(pack_rows(own), None, lib, 2, memory).rows(torch.arange(40),
                                                                     torch.float32)
    want = dequantise_grouped(own, torch.float32)
    assert ((rows - want).abs() <= own.mins.abs().max() * 2**-9).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_are_those_of_the_weight(lib: ctypes.CDLL, memory: GroupedMemory,
                                      form: RowFormat) -> None:
    own, ids = drawn(40, 256, form), torch.tensor([3, 39, 3, 0, 16])
    linear = NativeGrouped(pack_rows(own), None, lib, 2, memory)
    want = dequantise_grouped(own, torch.float32)[ids]
    assert torch.allclose(linear.rows(ids, torch.float32), want, rtol=0, atol=2e-8)
    assert torch.allclose(linear.rows(ids, BF16), want.to(BF16), rtol=2**-7, atol=2e-8)
    assert linear.rows(ids[:0], BF16).shape == (0, 256)
    with pytest.raises(IndexError):
        linear.rows(torch.tensor([40]), BF16)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_held_is_what_the_plan_counts(form: RowFormat) -> None:
    own = WeightFormat(form.bits, form.group, form.mins, form.fp4)
    for outs in (1, 16, 100):
        assert sum(layout_bytes(form, outs, 256)) == own.held_bytes(outs, 256)


def in_file(path: Path, kinds: list[str], outs: list[int], heads: int) -> BlockRows:
    """Rows of random blocks of these types in a file, one weight of each behind the other."""
    parts = []
    for kind, count in zip(kinds, outs, strict=True):
        raw, _ = stored(torch.randn(count, 1280), kind)
        blocks, start = torch.from_numpy(raw), path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(raw.tobytes())

        def read(kind: str = kind, blocks: Tensor = blocks) -> Tensor:
            rows = pack_rows(grouped(kind, blocks))
            return (rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads
                    else rows)

        parts.append(BlockPart(
            NUMBERS[kind], start, raw.shape[1], raw.shape[1], count, count // heads if heads else 0,
            lambda: os.open(path, os.O_RDONLY), EOFError, read))
    return BlockRows(BLOCK_FORMATS[kinds[0]], 1280, tuple(parts))


@pytest.mark.parametrize(("kinds", "outs", "heads"), [
    *(([kind], [37], 0) for kind in sorted(NATIVE_ROWS)), (["Q4_K", "Q4_1"], [40, 24], 0),
    (["Q6_K"] * 2, [64, 128], 2), (["Q4_0"], [128], 2)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_out_of_a_file_in_one_pass(lib: ctypes.CDLL, kinds: list[str], outs: list[int], heads: int,
                                   gated: bool, tmp_path: Path) -> None:
    """The bytes that rows which were read first are laid out in."""
    torch.manual_seed(5)
    outs, half = ([32] * len(outs), 16 * len(outs)) if gated else (outs, 0)
    rows = in_file(tmp_path / "rows", kinds, outs, heads)
    found, want = (NativeGrouped(own, None, lib, 2, GroupedMemory(), half)
                   for own in (rows, rows.rows()))
    assert found.layout.factor == want.layout.factor
    assert torch.equal(found.held, want.held)


def test_a_file_that_ends_early(lib: ctypes.CDLL, tmp_path: Path) -> None:
    rows = in_file(tmp_path / "rows", ["Q8_0", "Q8_0"], [64, 64], 0)
    os.truncate(tmp_path / "rows", rows.parts[1].start + 5)
    for _ in range(2):
        with pytest.raises(EOFError, match="it ends early"):
            NativeGrouped(rows, None, lib, 2, GroupedMemory())
        os.truncate(tmp_path / "rows", 0)


def test_weights_lie_one_behind_the_other() -> None:
    memory = GroupedMemory(4096)
    parts = [memory.take(size) for size in (100, 64, 1 << 20, 200 << 20, 10)]
    for part in parts:
        assert part.data_ptr() % 64 == 0
        part.fill_(7)
    assert parts[1].data_ptr() - parts[0].data_ptr() == 128
    assert all((part == 7).all() for part in parts[:3])


def test_ops_choose_these_kernels() -> None:
    whole = native_library.library()
    if whole is None:
        pytest.skip("no C compiler, or torch with another OpenMP")
    ops = NativeOps(whole, 2)
    rows = pack_rows(drawn(64, 64, RowFormat(4, 32, True)))
    assert isinstance(ops.linear(rows), NativeGrouped)
    assert isinstance(ops.gated(rows, None, "silu"), NativeGroupedGated)
    assert not isinstance(ops.gated(rows, None, "gelu"), NativeGroupedGated)
    narrow = pack_rows(drawn(64, 48, RowFormat(4, 16, True)))
    assert not can_group(narrow) and not isinstance(ops.linear(narrow), NativeGrouped)
