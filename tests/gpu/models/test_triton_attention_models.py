"""Whole models whose attention runs on the Triton kernels say what they say on torch's: prompts in
chunks, prefixes from the cache, windows that give their pages back, drafts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import Seq, Stepper, write_checkpoint
from helpers_speculation import Work, tokens_of
from helpers_worker import CPU, Ring, make_runner

from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.torch_ops import TorchOps

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": 1},
    "Qwen3ForCausalLM": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20},
    "Gemma3ForCausalLM": {"sliding_window": 8, "sliding_window_pattern": 2},
    "Gemma2ForCausalLM": {"sliding_window": 8, "attn_logit_softcapping": 2.0},
}
PROMPTS = [list(range(3, 40)), [7] * 18, list(range(3, 30))]
GREEDY = ResolvedParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.slow) if name.startswith(("Qwen3", "Llama")) else name
    for name in MODELS])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
           ) -> tuple[Decoder, Decoder]:
    """The same on torch's kernels and on Triton's."""
    path: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, request.param, seed=2, num_hidden_layers=2, **MODELS[request.param])
    return load(path, "torch"), load(path, "triton")


def load(path: Path, kernels: str) -> Decoder:
    return load_model(path, Config(device=DeviceConfig(kernels=kernels)), CPU, lambda *_: None)


def serve(model: Decoder, budget: int = 24, **ring: Any) -> list[list[int]]:
    runner = make_runner(model, 64, 16, slots=5)
    for layer in [layer for pool in runner.pools for layer in pool.layers]:
        layer.fill_(math.nan)
    play = Ring(runner, budget=budget, **ring)
    for prompt in PROMPTS:
        play.submit(prompt, GREEDY)
    return [out.tokens for out in play.run()]


def test_tokens(models: tuple[Decoder, Decoder]) -> None:
    torch_model, triton_model = models
    assert triton_model.ops.name == "triton" and type(torch_model.ops) is TorchOps
    want = serve(torch_model)
    assert all(len(tokens) == 4 for tokens in want) and len({tuple(t) for t in want}) > 1
    assert serve(triton_model) == want


def test_tokens_of_drafts_right_and_wrong(models: tuple[Decoder, Decoder]) -> None:
    torch_model, triton_model = models
    work = Work(PROMPTS[1:], [GREEDY] * 2)
    want = work.plain(torch_model)
    _, got = work.guessed(triton_model, want, 2, lambda seed, at: (seed + at) % 3 > 0)
    assert tokens_of(got) == tokens_of(want)


def test_logits(models: tuple[Decoder, Decoder]) -> None:
    """Of steps that extend and decode at once, several tokens a row."""
    said = []
    for model in models:
        stepper, seqs = Stepper(model, 64), [Seq(p) for p in PROMPTS if len(p) > 4]
        out = [stepper.step([(s, len(s.tokens) - 4) for s in seqs[1:]])]
        out.append(stepper.step([(seqs[0], 9)], seqs[1:], q_len=3))
        out.append(stepper.step([(seqs[0], 20)], seqs[1:], every_row=True))
        said.append(torch.cat(out))
    assert torch.allclose(said[0], said[1], atol=1e-4, rtol=0)
