"""On a device: what `--exact on` rests on, that tensor cores give a row the same bits at any
place of a tile and beside any rows. Kernels one by one are in `make gpu-check PART=kernels`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_exact_ways import Way, said, tiny

from actorium.gpu.worker.exactness import departures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
                                                  reason="no CUDA device")]
WAYS: list[Way] = [((596,), 0, 1), ((596,), 7, 1), ((300, 296), 3, 1), ((1, 595), 0, 1),
                   ((596,), 0, 4), ((596,), 5, 2), ((7, 593), 0, 1), ((513, 83), 40, 1)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_model_says_the_same_however_it_is_asked(tmp_path: Path, head_dim: int) -> None:
    """Over more keys than one chunk has."""
    model = tiny(tmp_path, "on", "cuda", head_dim=head_dim, num_hidden_layers=2, hidden_size=256,
                 intermediate_size=512)
    assert departures(model, "on") == []
    prompt = [3 + i % 150 for i in range(600)]
    want = said(model, prompt, 4, ((600,), 0, 1))
    assert want.isfinite().all()
    for way in WAYS:
        assert torch.equal(said(model, prompt, 4, way), want), way


@pytest.mark.parametrize(("outs", "ins"), [(96, 128), (6144, 4096), (7000, 1000)])
def test_a_row_has_the_same_bits_at_any_place_of_any_batch(outs: int, ins: int) -> None:
    from actorium.kernels.triton.exact_product import exact_product

    x, weight = (torch.randn(n, ins, device="cuda", dtype=torch.bfloat16) for n in (700, outs))
    whole = exact_product(x, weight)
    alone = torch.cat([exact_product(x[i:i + 1], weight) for i in range(700)])
    assert torch.equal(alone, whole)
    for rows in (2, 3, 17, 33, 64, 100, 255, 256, 257):
        assert torch.equal(exact_product(x[-rows:].contiguous(), weight), whole[-rows:]), rows
