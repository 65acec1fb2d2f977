"""The log-probabilities that come with sampled tokens, beside those of a plain forward of the same
tokens: by transformers, and by the engine's own prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_hybrid import DENSE, MOE, hybrid_runner, write_hybrid
from helpers_models import CPU, oracle_logits, write_checkpoint
from helpers_worker import Output, Ring, make_runner
from numpy.typing import NDArray

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.runner import ModelRunner

BF16 = torch.bfloat16
PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (2, 17, 40, 83)]
SAMPLED = ResolvedParams(max_tokens=24, temperature=0.8, top_p=0.95, logprobs=0)
FAMILIES: dict[str, Callable[[Path, torch.dtype], Any]] = {
    "plain": lambda path, dtype: write_checkpoint(path, dtype=dtype, head_dim=32),
    "mixture of experts": lambda path, dtype: write_hybrid(path, MOE, 5, dtype, head_dim=32),
    "hybrid": lambda path, dtype: write_hybrid(path, DENSE, 5, dtype, head_dim=32),
    "sliding windows": lambda path, dtype: write_checkpoint(
        path, "Gemma3ForCausalLM", dtype=dtype, head_dim=32, sliding_window=32,
        sliding_window_pattern=2),
}
MOST = {"float32": 2e-5, "bfloat16": 0.15}
"""Largest difference from transformers, in nats."""
MEAN = {"float32": 3e-6, "bfloat16": 0.03}


def loaded(path: Path, dtype: str, exact: str) -> Decoder:
    config = Config(model=ModelConfig(dtype=dtype), device=DeviceConfig(exact=exact))
    return load_model(path, config, CPU, lambda *_: None)


def ring_of(model: Decoder, budget: int, preempt: int = 0) -> Ring:
    runner: ModelRunner = (hybrid_runner(model) if model.shape.state is not None
                           else make_runner(model, slots=9))
    return Ring(runner, budget, force_preempt_every=preempt)


def sampled(model: Decoder) -> list[Output]:
    """Rollouts of all prompts together, in small chunks, some of them preempted."""
    ring = ring_of(model, 32, preempt=7)
    for seed, prompt in enumerate(PROMPTS):
        ring.submit(prompt, SAMPLED, seed)
    outputs = ring.run()
    assert ring.preemptions
    return outputs


def numbers(columns: list[Any]) -> NDArray[np.float32]:
    return np.concatenate([np.frombuffer(column.chosen, np.float32) for column in columns])


def scored(model: Decoder, prompt: list[int], tokens: list[int]) -> NDArray[np.float32]:
    """Log-probabilities of the tokens behind the prompt, of one request alone."""
    ring = ring_of(model, 512)
    ring.submit(prompt + tokens, ResolvedParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    return numbers(ring.run()[0].prompt_logprobs)[len(prompt) - 1:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_those_of_a_forward_by_transformers(
        tmp_path: Path, family: str, dtype: str) -> None:
    theirs = FAMILIES[family](tmp_path, getattr(torch, dtype))
    differences = []
    for prompt, out in zip(PROMPTS, sampled(loaded(tmp_path, dtype, "off")), strict=True):
        logits = oracle_logits(theirs, prompt + out.tokens)[len(prompt) - 1:-1].float()
        chosen = torch.tensor(out.tokens).unsqueeze(1)
        want = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        differences.append(np.abs(numbers(out.logprobs) - want))
    found = np.concatenate(differences)
    print(f"{family}, {dtype}: mean {found.mean():.2g}, largest {found.max():.2g}")
    assert found.max() < MOST[dtype]
    assert found.mean() < MEAN[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_prompts_to_the_bit(tmp_path: Path, family: str) -> None:
    FAMILIES[family](tmp_path, BF16)
    model = loaded(tmp_path, "bfloat16", "on")
    for prompt, out in zip(PROMPTS, sampled(model), strict=True):
        assert numbers(out.logprobs).tolist() == scored(model, prompt, out.tokens).tolist()
