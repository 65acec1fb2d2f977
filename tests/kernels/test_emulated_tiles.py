"""AMX's tiles in memory do what their description says, and what they do where there are any."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from numpy.typing import NDArray

from actorium.kernels.cpu.native_library import SOURCES
from actorium.tools.as_processor import PROCESSORS, missing

SOURCE = """
#include "tiles.h"
/* c: f32[rows, 16] += a: bf16[rows, 32] times pairs of b: bf16[16, 32]. */
int dot(int rows, const void *a, const void *b, void *c) {
    if (!tiles_permitted()) return 1;
    tiles_shape((const uint8_t[8]){rows, 16, 16, 16, rows, 16, 16, 16});
    TILE_SUMS(0, c, 64);
    TILE_LOAD(4, a, 64);
    TILE_LOAD(6, b, 64);
    TILE_DOT(0, 4, 6);
    TILE_STORE(0, c, 64);
    tiles_release();
    return 0;
}
void without_shapes(void) { TILE_ZERO(0); }
"""
FLAGS = PROCESSORS["amx"].flags
AMX = tuple(flag for flag in FLAGS if flag != "-DEMULATED_TILES")
Bits = NDArray[numpy.uint16]
Floats = NDArray[numpy.float32]


def tiles(folder: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    source = folder / "dot.c"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-fassociative-math", "-fno-signed-zeros",
                    "-fno-trapping-math", *flags, "-I", str(SOURCES), "-o",
                    str(folder / "dot.so"), str(source)], check=True)
    return ctypes.CDLL(str(folder / "dot.so"))


@pytest.fixture
def emulated(tmp_path: Path) -> ctypes.CDLL:
    if lacks := missing("amx"):
        pytest.skip(f"this processor has no {lacks}")
    return tiles(tmp_path, FLAGS)


def dot(lib: ctypes.CDLL, a: Bits, b: Bits, c: Floats) -> Floats:
    sums = c.copy()
    assert lib.dot(len(a), *(ctypes.c_void_p(x.ctypes.data) for x in (a, b, sums))) == 0
    return sums


def random_pairs(rows: int, seed: int) -> tuple[Bits, Bits, Floats]:
    """Numbers of exponents near each other: sums of their products are exact in f64."""
    draw = numpy.random.default_rng(seed)

    def bf16(*shape: int) -> Bits:
        x = draw.normal(size=shape).astype(numpy.float32) + numpy.float32(0.01)
        high: Bits = (x.view(numpy.uint32) >> 16).astype(numpy.uint16)
        return high

    return bf16(rows, 32), bf16(16, 32), draw.normal(size=(rows, 16)).astype(numpy.float32)


def wide(x: Bits) -> Floats:
    wide: Floats = (x.astype(numpy.uint32) << 16).view(numpy.float32)
    return wide


def nearest(x: Fraction) -> Fraction:
    """The f32 next to it, ties to even; normal numbers alone."""
    if not x:
        return x
    exponent = 0
    while abs(x) * Fraction(2) ** -exponent >= 2 ** 24:
        exponent += 1
    while abs(x) * Fraction(2) ** -exponent < 2 ** 23:
        exponent -= 1
    return Fraction(round(x * Fraction(2) ** -exponent)) * Fraction(2) ** exponent


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_pairs_are_summed_as_described(rows: int, emulated: ctypes.CDLL) -> None:
    a, b, c = random_pairs(rows, rows)
    left, right = wide(a), wide(b)
    wanted = numpy.empty_like(c)
    for m in range(rows):
        for n in range(16):
            halves = []
            for part in range(2):
                own = Fraction(0)
                for p in range(16):
                    own = nearest(own + Fraction(float(left[m, 2 * p + part]))
                                  * Fraction(float(right[p, 2 * n + part])))
                halves.append(own)
            wanted[m, n] = float(nearest(Fraction(float(c[m, n])) + nearest(halves[0] + halves[1])))
    assert numpy.array_equal(dot(emulated, a, b, c), wanted)
    assert not numpy.array_equal(c + (left.reshape(rows, 32) @ right.reshape(
        16, 16, 2).swapaxes(1, 2).reshape(32, 16)), wanted)  # the order shows


def test_subnormal_numbers_are_zeros(emulated: ctypes.CDLL) -> None:
    a, b = numpy.zeros((1, 32), numpy.uint16), numpy.zeros((16, 32), numpy.uint16)
    a[0, :4] = 0x0001, 0x1f80, 0x3f80, 0x3f80  # subnormal, 2 ** -64, 1, 1
    b[0, :2] = 0x7f00, 0x1f80  # 2 ** 127; 2 ** -64
    b[1, :2] = 0x0001, 0x3f80  # subnormal; 1
    b[0, 3] = 0x1f80  # column 1: 2 ** -128 alone, a subnormal product
    b[1, 4] = 0x0001  # column 2: a subnormal number times 1
    b[1, 6] = 0x8080  # column 3: -2 ** -126, to which 1.5 times 2 ** -126 are added
    before = numpy.zeros((1, 16), numpy.float32)
    before[0, 3] = 1.5 * 2.0 ** -126
    sums = dot(emulated, a, b, before)
    assert sums[0, 0] == 1 and not sums[0, 1:].any()


def test_a_row_is_its_own(emulated: ctypes.CDLL) -> None:
    a, b, c = random_pairs(16, 3)
    whole = dot(emulated, a, b, c)
    for m in range(16):
        assert numpy.array_equal(dot(emulated, a[m:m + 1].copy(), b, c[m:m + 1]), whole[m:m + 1])


def test_what_the_processor_refuses_ends_the_process(emulated: ctypes.CDLL) -> None:
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).without_shapes()"
    done = subprocess.run([sys.executable, "-c", code, emulated._name], capture_output=True,
                          text=True)
    assert done.returncode < 0 and "a tile without a shape" in done.stderr


def test_the_instructions_do_the_same(emulated: ctypes.CDLL, tmp_path: Path) -> None:
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor has no AMX")
    (tmp_path / "amx").mkdir()
    real = tiles(tmp_path / "amx", AMX)
    for seed in range(200):
        a, b, c = random_pairs(1 + seed % 16, seed)
        assert numpy.array_equal(dot(emulated, a, b, c), dot(real, a, b, c)), seed
