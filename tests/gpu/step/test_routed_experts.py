"""The experts that a model's mixtures choose, as requests are told of them: beside transformers',
through preemptions, drafts, and models whose layers have their mixtures in other places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_deepseek import write_deepseek
from helpers_hybrid import MOE, SPARSE, hybrid_runner, write_hybrid
from helpers_mamba import write_granite
from helpers_models import load, write_checkpoint
from helpers_speculation import Work
from helpers_worker import Output, Ring, make_runner

from actorium.actors.messages import joined_experts
from actorium.actors.params import ResolvedParams
from actorium.actors.runtime.beat_gauges import eager_key
from actorium.gpu.models.decoder import Decoder

PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (1, 17, 40, 83)]
TOLD = ResolvedParams(max_tokens=12, temperature=0.8, routed_experts=True)
GEMMA = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "global_head_dim": 24,
         "moe_intermediate_size": 24, "num_hidden_layers": 2, "sliding_window": 9,
         "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, tuple[Callable[[Path], Any], tuple[int, int]]] = {
    "DeepSeek-V3": (lambda path: write_deepseek(path, 3), (2, 3)),
    "Gemma 4": (lambda path: write_checkpoint(path, "Gemma4ForCausalLM", **GEMMA), (2, 2)),
    "Granite 4": (lambda path: write_granite(path, num_local_experts=4), (4, 3)),
    "Qwen3.5-MoE": (lambda path: write_hybrid(path, SPARSE, 5), (4, 3)),
    "GPT-OSS": (lambda path: write_checkpoint(path, "GptOssForCausalLM", num_local_experts=5,
                                              num_experts_per_tok=2), (3, 2)),
}


def ring_of(model: Decoder, budget: int = 64, **more: Any) -> Ring:
    runner = (hybrid_runner(model) if model.shape.state is not None
              else make_runner(model, slots=9))
    return Ring(runner, budget, **more)


def theirs(oracle: Any, tokens: list[int]) -> list[list[list[int]]]:
    """Sorted experts that transformers' routers choose: by token, by layer."""
    found: list[list[list[int]]] = []

    def note(_module: Any, _given: Any, out: Any) -> None:
        found.append(out[-1].reshape(len(tokens), -1).sort(-1).values.tolist())

    hooks = [module.register_forward_hook(note) for name, module in oracle.named_modules()
             if name.endswith("mlp.gate")]
    with torch.no_grad():
        oracle(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [list(layers) for layers in zip(*found, strict=True)]


def told(out: Output) -> list[list[list[int]]]:
    return [[sorted(chosen) for chosen in layers]
            for layers in joined_experts(out.experts).tolist()]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    path = tmp_path_factory.mktemp("moe")
    oracle = write_hybrid(path, MOE, 5)
    return load(path), oracle


@pytest.mark.parametrize(("budget", "preempt"), [(2048, 0), (32, 0), (32, 3)])
def test_they_are_those_of_transformers(moe: tuple[Decoder, Any], budget: int,
                                        preempt: int) -> None:
    model, oracle = moe
    ring = ring_of(model, budget, force_preempt_every=preempt)
    for seed, prompt in enumerate(PROMPTS):
        ring.submit(prompt, TOLD, seed)
        ring.submit(prompt, ResolvedParams(max_tokens=5, temperature=0), seed)
    outputs = ring.run()
    assert bool(ring.preemptions) == bool(preempt)
    for prompt, out, beside in zip(PROMPTS, outputs[::2], outputs[1::2], strict=True):
        tokens = prompt + out.tokens
        assert not beside.experts
        pieces = [(own.start, own.end) for own in out.experts]
        assert [end for _, end in pieces[:-1]] == [start for start, _ in pieces[1:]]
        assert (pieces[0][0], pieces[-1][1]) == (0, len(tokens) - 1)
        assert told(out) == theirs(oracle, tokens)[:-1]


def test_they_change_no_token_and_cost_nothing_where_nobody_asks(moe: tuple[Decoder, Any]) -> None:
    model, _ = moe
    ring, quiet = ring_of(model), ring_of(model)
    for seed, prompt in enumerate(PROMPTS):
        ring.submit(prompt, TOLD, seed)
        quiet.submit(prompt, ResolvedParams(max_tokens=12, temperature=0.8), seed)
    assert [out.tokens for out in ring.run()] == [out.tokens for out in quiet.run()]
    assert model.tape.chosen is None
    names = [runner.runner.served.get(eager_key("experts"), 0) for runner in (ring, quiet)]
    assert names[0] > 0 == names[1]


def test_drafts_that_were_not_accepted_are_not_told(moe: tuple[Decoder, Any]) -> None:
    model, oracle = moe
    work = Work(PROMPTS, [TOLD] * len(PROMPTS))
    _, outputs = work.guessed(model, work.plain(model), 3,
                              lambda seed, at: (seed * 31 + at * 17) % 5 < 3)
    assert any(own.end - own.start == 3 for out in outputs for own in out.experts[1:])
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        assert told(out) == theirs(oracle, prompt + out.tokens)[:-1]


def test_a_prompt_in_the_prefix_cache_is_computed_again(moe: tuple[Decoder, Any]) -> None:
    model, oracle = moe
    ring = ring_of(model)
    for _ in range(2):
        ring.submit(PROMPTS[3], ResolvedParams(max_tokens=2, temperature=0))
        ring.run()
    ring.submit(PROMPTS[3], TOLD)
    out = ring.run()[-1]
    assert out.cached == 0
    assert told(out) == theirs(oracle, PROMPTS[3] + out.tokens)[:-1]


@pytest.mark.parametrize("family", OTHERS)
def test_mixtures_in_other_places_are_told(tmp_path: Path, family: str) -> None:
    write, (layers, chosen) = OTHERS[family]
    write(tmp_path)
    model = load(tmp_path)
    ring = ring_of(model)
    ring.submit(PROMPTS[1], TOLD)
    out = ring.run()[0]
    assert not out.error
    shape = joined_experts(out.experts).shape
    assert shape == (len(PROMPTS[1]) + 11, layers, chosen)
    assert model.shape.mixtures == layers


def test_what_would_not_fit_a_message_is_refused(moe: tuple[Decoder, Any],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.actors.scheduler.worker_capacity.MAX_ROUTED_BYTES", 1000)
    ring = ring_of(moe[0])
    ring.submit(PROMPTS[2], TOLD)
    ring.submit(PROMPTS[3], TOLD)
    first, second = ring.run()
    assert not first.error and len(first.tokens) == 12
    assert "95 tokens are 1,140 bytes, at most 1,000" in (second.error or "")


def test_a_model_without_them_refuses(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    ring = ring_of(load(tmp_path))
    ring.submit(PROMPTS[1], TOLD)
    assert "no mixture of experts" in (ring.run()[0].error or "")
