"""A whole tiny model under `--exact on` with a device's kernels, in the interpreter: what it says
of a token has the same bits in a prompt, in chunks, decoded, verified, alone and among others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_attention import INTERPRETED
from helpers_exact_ways import Way, said, tiny

from actorium.actors.errors import BadConfig
from actorium.gpu.worker.exactness import departures, require_exact

pytest.importorskip("triton")
pytestmark = INTERPRETED
WAYS = [(1, [((22,), 0, 1), ((5, 17), 1, 1)]),
        pytest.param(4, [((36,), 0, 1), ((36,), 3, 1), ((20, 16), 1, 1), ((1, 35), 0, 1),
                         ((36,), 0, 4), ((36,), 2, 2), ((7, 33), 0, 1)], marks=pytest.mark.slow)]
"""How many of a prompt's last tokens are compared, and ways to ask."""


@pytest.mark.parametrize(("last", "ways"), WAYS)
def test_what_a_model_says_does_not_depend_on_how_it_is_asked(tmp_path: Path, last: int,
                                                              ways: list[Way]) -> None:
    model = tiny(tmp_path, "on")
    assert departures(model, "on") == []
    prompt = list(range(3, 43 if last > 1 else 26))
    want = said(model, prompt, last, ((len(prompt),), 0, 1))
    assert want.shape[0] == last and want.isfinite().all()
    for way in ways:
        assert torch.equal(said(model, prompt, last, way), want), way


@pytest.mark.slow
def test_so_do_experts(tmp_path: Path) -> None:
    model = tiny(tmp_path, "on", architecture="Qwen3MoeForCausalLM", moe_intermediate_size=32,
                 num_experts=4, num_experts_per_tok=2)
    assert departures(model, "on") == []
    prompt = list(range(3, 26))
    want = said(model, prompt, 1, ((23,), 0, 1))
    for way in (((22,), 0, 1), ((5, 17), 1, 1), ((22,), 3, 1)):
        assert torch.equal(said(model, prompt, 1, way), want), way


def test_what_is_exact_is_served_and_what_is_not_is_refused_by_name(tmp_path: Path) -> None:
    require_exact(tiny(tmp_path / "a", "on"), "on")
    model = tiny(tmp_path / "b", "on", dtype="float32", head_dim=24)
    found = ["products of weights in float32 by torch",
             "attention by triton, whose tiles and splits follow the step",
             "norms of 24 numbers (exact are multiples of 16)"]
    assert departures(model, "on") == found
    with pytest.raises(BadConfig, match="exact: on was asked for") as refused:
        require_exact(model, "on")
    assert all(words in str(refused.value) for words in found)


def test_auto_stays_as_fast_as_it_is_and_says_what_it_is_not(tmp_path: Path) -> None:
    model = tiny(tmp_path, "auto")
    assert type(model.ops).__name__ == "TritonOps"
    assert departures(model, "auto") == [
        "products, whose kernels follow the number of rows",
        "attention by triton, whose tiles and splits follow the step"]
    require_exact(model, "auto")
