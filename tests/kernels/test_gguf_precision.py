"""Products with each type of GGUF are no further from exact ones than llama.cpp's, whose rounding
of inputs is computed here: 8 bits with a scale for each 256 columns (`quantize_row_q8_K` of ggml,
for K, IQ and ternary types) or each 32 (`quantize_row_q8_0`, whose scale is in f16). Both sum
whole numbers; what differs is the input."""

from __future__ import annotations

import pytest
import torch
from helpers_gguf import KINDS, stored
from torch import Tensor

from actorium.gpu.weights.gguf_blocks import FORMATS, grouped
from actorium.kernels.cpu.grouped_native import GroupedMemory, NativeGrouped
from actorium.kernels.cpu.native_library import library
from actorium.kernels.grouped_rows import pack_rows

ROWS, OUTS, INS = 24, 48, 1024
BY_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")
"""Types whose inputs ggml gives a scale for each 32 columns."""
CODES = [kind for kind in KINDS if kind in FORMATS]


def as_llama_cpp(x: Tensor, kind: str) -> Tensor:
    """Inputs as ggml's products with this type take them."""
    columns = 32 if kind in BY_32 else 256
    parts = x.unflatten(-1, (-1, columns))
    at = parts.abs().argmax(-1, keepdim=True)
    largest = parts.gather(-1, at)
    scales = (largest.abs() / 127).half().float() if columns == 32 else -largest / 127
    codes = (parts * torch.where(largest == 0, 0, 127 / largest.abs() if columns == 32
                                 else -127 / largest)).round().clamp(max=127)
    return (codes * scales).flatten(-2)


@pytest.mark.parametrize("massive", [1.0, 300.0], ids=["even", "a massive column"])
@pytest.mark.parametrize("kind", CODES)
def test_no_less_precise_than_llama_cpp(kind: str, massive: float) -> None:
    """massive: times which one column of the input is the others', as in a hidden state whose
    token the others attend to."""
    lib = library()
    if lib is None:
        pytest.skip("no C compiler")
    made = torch.Generator().manual_seed(5)
    raw, worth = stored(torch.randn((OUTS, INS), generator=made) * 0.02, kind)
    x = torch.randn((ROWS, INS), generator=made)
    x[:, 507] *= massive
    x = x.to(torch.bfloat16)
    rows = pack_rows(grouped(kind, torch.from_numpy(raw)))
    product = NativeGrouped(rows, None, lib, 1, GroupedMemory())
    exact = x.double() @ worth.double().t()
    ours = (product.wide(x).double() - exact).norm()
    theirs = (as_llama_cpp(x.float(), kind).double() @ worth.double().t() - exact).norm()
    assert ours <= theirs
    assert theirs < 0.1 * exact.norm()
