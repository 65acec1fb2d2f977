"""Products of few rows on a CUDA device: right at the sizes of models, and chosen by measuring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actorium.kernels.inputs import Unnormed
from actorium.kernels.reference.activation import silu_mul
from actorium.kernels.reference.norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("rows", [1, 5, 16, 30, 64, 200])
@pytest.mark.parametrize(("outs", "width"), [(6144, 4096), (4096, 14336), (3848, 2560)])
def test_products_are_those_of_the_reference(rows: int, outs: int, width: int) -> None:
    from actorium.kernels.triton.skinny import configs_of, skinny

    x, norm, w = drawn(rows, width), drawn(width, seed=1).abs() + 0.5, drawn(outs, width, seed=2)
    for config in configs_of(rows):
        normed = rms_norm(x, norm, 1e-5).double()
        close(skinny(x, w, config, None, norm, 1e-5), normed @ w.double().t())
        if config.gated:
            close(skinny(x, w, config, None, norm, 1e-5, "silu"),
                  silu_mul(normed @ w.double().t()))
        residual = drawn(rows, outs, seed=3)
        want = residual.double() + x.double() @ w.double().t()
        close(skinny(x, w, config, residual=residual), want)


def close(got: Tensor, want: Tensor) -> None:
    assert float((got.double() - want).abs().max()) <= 0.015 * float(want.abs().max())


def test_products_are_measured_and_replayed() -> None:
    """Whatever is chosen gives the same, in a graph too."""
    from actorium.kernels.triton.skinny_linear import Products, SkinnyLinear, replayed_seconds

    products = Products()
    own = [SkinnyLinear(drawn(6144, 4096, seed=i), None, products) for i in range(8)]
    for each in own:
        assert each.form.norms is not None and not each.form.norms(1)
    products.tune(replayed_seconds)
    x, norm = drawn(1, 4096, seed=9), drawn(4096, seed=10).abs() + 0.5
    want = rms_norm(x, norm, 1e-5).double() @ own[3].weight.double().t()
    norms = own[3].form.norms
    assert norms is not None and not norms(257)
    given = Unnormed(x, norm, 1e-5) if norms(1) else rms_norm(x, norm, 1e-5)
    own[3](given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = own[3](given)
    graph.replay()
    close(out, want)
    assert 0 < replayed_seconds(lambda: [each(given) for each in own]) < 0.1
