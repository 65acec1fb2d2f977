"""Greedy tokens and prompt log-probabilities equal transformers', however the work is cut."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import ARCHITECTURES, generated, load, write_checkpoint
from helpers_pairs import pairs
from helpers_worker import Ring, complete, make_runner

from actorium.actors.params import ResolvedParams

NEW = 24
GREEDY = ResolvedParams(max_tokens=NEW, temperature=0.0)
LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 48, 64, 65, 90, 120)


@dataclass
class Case:
    """A checkpoint, its prompts and what transformers makes of them."""

    model: Any
    oracle: Any
    prompts: list[list[int]]
    tokens: list[list[int]]


def _prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(vocab) for _ in range(n)] for n in LENGTHS]


FAMILIES = [name for name in ARCHITECTURES if name != "MistralForCausalLM"]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        options: dict[str, dict[str, Any]] = {
            "LlamaForCausalLM": {"num_key_value_heads": 1, "attention_bias": True},
            "MistralForCausalLM": {"num_key_value_heads": 4, "sliding_window": 24},
            "Qwen2ForCausalLM": {"tie_word_embeddings": True},
            "Qwen3ForCausalLM": {"head_dim": 32},
            "Gemma3ForCausalLM": {"sliding_window": 24, "sliding_window_pattern": 2},
        }
        path = tmp_path_factory.mktemp("model")
        oracle = write_checkpoint(path, kind, seed=3, **options[kind])
        prompts = _prompts(oracle.config.vocab_size)
        return Case(load(path), oracle, prompts, [generated(oracle, p, NEW) for p in prompts])

    return cached


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name == "MistralForCausalLM"))
    for name in ARCHITECTURES])
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


def test_batched_greedy_equals_generate(case: Case) -> None:
    ring = Ring(make_runner(case.model))
    for prompt in case.prompts:
        ring.submit(prompt, GREEDY)
    outputs = ring.run()
    assert [o.tokens for o in outputs] == case.tokens
    assert {o.finish for o in outputs} == {"length"}
    assert ring.most_in_flight == 2


@pytest.mark.parametrize(("case", "budget"), pairs(FAMILIES, [7, 512]), indirect=["case"])
def test_extend_chunks_change_nothing(case: Case, budget: int) -> None:
    runner = make_runner(case.model, slots=8 if budget == 7 else 33)
    assert complete(runner, case.prompts, GREEDY, budget=budget) == case.tokens


@pytest.mark.parametrize(("case", "page_size"), pairs(FAMILIES, [1, 64]), indirect=["case"])
def test_page_size_changes_nothing(case: Case, page_size: int) -> None:
    runner = make_runner(case.model, pages=4096 // page_size, page_size=page_size)
    assert complete(runner, case.prompts, GREEDY) == case.tokens


def test_overlap_changes_nothing(case: Case) -> None:
    ring = Ring(make_runner(case.model), overlap=False)
    for prompt in case.prompts:
        ring.submit(prompt, GREEDY)
    assert [o.tokens for o in ring.run()] == case.tokens
    assert ring.most_in_flight == 1


def test_preemption_changes_nothing(case: Case) -> None:
    pages = 20 if 0 in case.model.shape.windows else 11
    ring = Ring(make_runner(case.model, pages, page_size=8), budget=64)
    for prompt in case.prompts:
        ring.submit(prompt, GREEDY)
    assert [o.tokens for o in ring.run()] == case.tokens
    assert ring.preemptions >= 2


@pytest.mark.parametrize(("case", "budget"), pairs(FAMILIES, [13, 2048]), indirect=["case"])
def test_prompt_logprobs(case: Case, budget: int) -> None:
    ring = Ring(make_runner(case.model), budget=budget)
    prompts = case.prompts[1:]
    for prompt in prompts:
        ring.submit(prompt, ResolvedParams(max_tokens=1, temperature=0.0, prompt_logprobs=3))
    for prompt, out in zip(prompts, ring.run(), strict=True):
        with torch.no_grad():
            logits = case.oracle(torch.tensor([prompt])).logits[0, :-1]
        want = logits.log_softmax(-1)
        chosen = want.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        parts = sorted(out.prompt_logprobs, key=lambda p: p.start)
        assert [p.start for p in parts][0] == 1
        got = np.concatenate([np.frombuffer(p.chosen, np.float32) for p in parts])
        np.testing.assert_allclose(got, chosen.numpy(), atol=1e-4)
        ranks = np.concatenate([np.frombuffer(p.ranks, np.int32) for p in parts])
        assert ranks.tolist() == ((want > chosen[:, None]).sum(-1) + 1).tolist()
        top = np.concatenate([np.frombuffer(p.top_logprobs, np.float32) for p in parts])
        np.testing.assert_allclose(top.reshape(-1, 3), want.topk(3).values.numpy(), atol=1e-4)
