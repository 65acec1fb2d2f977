"""What images bring to the stream between two layers, in each form that it may have."""

from __future__ import annotations

import pytest
import torch
from helpers_configs import CONFIGS, name_of, shape_of

from actorium.gpu.parallel.rank_slices import rank_faults
from actorium.gpu.step.batch import ImageRows, with_deepstack, with_embeddings
from actorium.kernels.inputs import settled

BF16 = torch.bfloat16
ROWS = ImageRows(torch.tensor([1, 3]), torch.full((2, 4), 7.0, dtype=BF16),
                 (torch.full((2, 4), 10.0, dtype=BF16),))


def test_rows_take_the_place_of_embeddings() -> None:
    got = with_embeddings(ROWS, torch.zeros(5, 4, dtype=BF16))
    assert got[:, 0].tolist() == [0, 7, 0, 7, 0]
    assert with_embeddings(None, got) is got


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deep_rows_are_added_once(ranks: int) -> None:
    """Also where the sum over the ranks is still to be made, of parts in another dtype."""
    whole, residual = torch.randn(5, 4), torch.randn(5, 4).to(BF16)
    parts = [whole / ranks for _ in range(ranks)]
    given = [with_deepstack(ROWS, 0, (part, residual)) for part in parts]
    streams = [own for own in given if isinstance(own, tuple)]
    assert len(streams) == ranks and all(own[1].dtype is BF16 for own in streams)
    total = sum(own[0] for own in streams) + streams[0][1].float()
    want = whole + residual.float()
    want[ROWS.places] += 10
    torch.testing.assert_close(total, want, atol=0.05, rtol=0)
    plain = with_deepstack(ROWS, 0, settled((whole.to(BF16), residual)))
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(plain.float(), want, atol=0.1, rtol=0)
    assert with_deepstack(ROWS, 1, plain) is plain and with_deepstack(None, 0, plain) is plain


def test_that_several_ranks_round_them_otherwise_is_known() -> None:
    """Of models with DeepStack alone, and with their tower."""
    told = {name_of(config): [why for why in rank_faults(shape_of(config), 2) if "DeepStack" in why]
            for config in CONFIGS if "VL" in name_of(config)}
    assert len(told) == 3 and [name for name, why in told.items() if not why] == [
        "Qwen2_5_VLForConditionalGeneration"]
