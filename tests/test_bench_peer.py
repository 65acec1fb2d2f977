"""The transformers peer of the benchmark has the weights that the engine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_hybrid import DENSE, MOE, NEXT, SPARSE, HybridDriver, hybrid_config, hybrid_runner
from helpers_models import load, tiny_config
from torch import Tensor

from actorium.actors.config import Config, DeviceConfig, ModelConfig
from actorium.gpu.loader import Fused
from actorium.tools.bench import peer
from actorium.tools.bench.works import Work

PROMPT = [3, 14, 159, 26, 5, 35, 89, 79, 32, 38, 46]
WORK = Work("W", 2, 7, 3, "output_tok_s")


def cut(whole: Tensor) -> list[tuple[str, Tensor]]:
    """Rows by turns to two tensors, the second one transposed."""
    return [("a", whole[::2]), ("b", whole[1::2].T)]


def test_fusing_is_the_inverse_of_cutting() -> None:
    whole = torch.randn(6, 5)
    weights = {name: part.clone() for name, part in cut(whole)} | {"other": torch.ones(2)}
    lonely = {"a": torch.ones(3, 5)}
    for own in (weights, lonely):
        peer.fuse(own, [Fused("ab", (6, 5), cut)])
    assert set(weights) == {"ab", "other"} and torch.equal(weights["ab"], whole)
    assert set(lonely) == {"a"}, "half of it is not enough"


@pytest.mark.parametrize(("architecture", "config"), [
    ("Qwen3ForCausalLM", tiny_config), ("Gemma3ForCausalLM", tiny_config),
    (NEXT, hybrid_config), (DENSE, hybrid_config), (SPARSE, hybrid_config), (MOE, hybrid_config)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_peer_has_our_random_weights(architecture: str, config: Callable[..., Any],
                                         tied: bool, tmp_path: Path) -> None:
    config(architecture, tie_word_embeddings=tied, initializer_range=0.5).save_pretrained(tmp_path)
    model, device = peer._model(Config(
        model=ModelConfig(model=str(tmp_path), load_format="dummy", dtype="float32", seed=4),
        device=DeviceConfig(device="cpu")))
    assert device == "cpu" and model.config._attn_implementation == "sdpa"
    driver = HybridDriver(hybrid_runner(load(tmp_path, load_format="dummy", dtype="float32",
                                             seed=4)), 64)
    ours = driver.admit(PROMPT, len(PROMPT) + 9)
    driver.run()
    with torch.no_grad():
        theirs = model(torch.tensor([ours.tokens])).logits[0]
    for length, logits in ours.logits.items():
        torch.testing.assert_close(logits, theirs[length - 1], atol=1e-5, rtol=0)
        assert float(logits.std()) > 0.01, "logits that tell weights apart"
    job = peer.Job(Config(), [WORK], vocab=199, runs=1, threads=1)
    assert [len(tokens) for tokens in peer._measure(model, device, WORK, job).tokens] == [3, 3]
