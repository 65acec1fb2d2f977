"""Ranks of every family against the model alone: logits, and the tokens of whole requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers_deepseek import write_deepseek
from helpers_kinds import write_kind
from helpers_mamba import write_granite
from helpers_models import generated, write_checkpoint
from helpers_mxfp4 import write_mxfp4
from helpers_ranks import run_ranks, whole
from helpers_worker import Output, Ring
from torch import Tensor
from transformers import AutoModelForCausalLM

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.params import ResolvedParams
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.worker.device import open_device

CASES: dict[str, Callable[[Path], Any]] = {
    "llama": lambda path: write_kind(path, "llama"),
    "llama-bias-tied": lambda path: write_checkpoint(
        path, "LlamaForCausalLM", attention_bias=True, mlp_bias=True, num_key_value_heads=1,
        tie_word_embeddings=True, intermediate_size=90),
    "qwen2": lambda path: write_checkpoint(path, "Qwen2ForCausalLM", vocab_size=201),
    "qwen3": lambda path: write_checkpoint(path, "Qwen3ForCausalLM"),
    "mistral": lambda path: write_checkpoint(path, "MistralForCausalLM", sliding_window=9),
    "gemma3": lambda path: write_kind(path, "windows"),
    "deepseek": lambda path: write_kind(path, "deepseek"),
    "latent-no-query-rank": lambda path: write_deepseek(path, 5, q_lora_rank=None),
    "qwen3.5": lambda path: write_kind(path, "hybrid"),
    "qwen3-moe": lambda path: write_kind(path, "experts"),
    "qwen3.5-moe": lambda path: write_kind(path, "sparse"),
    "granite-3": lambda path: write_checkpoint(
        path, "GraniteForCausalLM", attention_bias=True, mlp_bias=True, residual_multiplier=0.4,
        attention_multiplier=0.2, embedding_multiplier=3.0, logits_scaling=2.0),
    "granite": lambda path: write_granite(path, seed=5),
    "granite-experts": lambda path: write_granite(path, seed=5, num_local_experts=6),
    "granite-groups": lambda path: write_granite(path, seed=5, mamba_n_groups=2),
    "olmo2": lambda path: write_checkpoint(path, "Olmo2ForCausalLM", attention_bias=True),
    "smollm3": lambda path: write_checkpoint(path, "SmolLM3ForCausalLM", no_rope_layers=[0, 1, 0]),
    "glm4": lambda path: write_checkpoint(path, "Glm4ForCausalLM", num_key_value_heads=1),
    "exaone4": lambda path: write_checkpoint(path, "Exaone4ForCausalLM", sliding_window=9,
                                             sliding_window_pattern=2),
    "phi3": lambda path: write_checkpoint(path, "Phi3ForCausalLM", intermediate_size=90),
    "mixtral": lambda path: write_checkpoint(
        path, "MixtralForCausalLM", intermediate_size=92, num_local_experts=6),
    "gemma2": lambda path: write_checkpoint(
        path, "Gemma2ForCausalLM", sliding_window=9, attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0, query_pre_attn_scalar=16),
    "qwen2-moe": lambda path: write_checkpoint(
        path, "Qwen2MoeForCausalLM", num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=36, shared_expert_intermediate_size=50, mlp_only_layers=[1]),
    "granite-moe": lambda path: write_checkpoint(
        path, "GraniteMoeForCausalLM", attention_bias=True, intermediate_size=92,
        residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0),
    "gpt-oss": lambda path: write_checkpoint(
        path, "GptOssForCausalLM", num_local_experts=6, num_experts_per_tok=2, sliding_window=9,
        intermediate_size=92),
    "gpt-oss-mxfp4": lambda path: write_mxfp4(path, num_hidden_layers=2),
}
GREEDY = ResolvedParams(max_tokens=9, temperature=0.0, logprobs=3)


class Served(NamedTuple):
    """What one rank gave."""

    outputs: list[Output]
    logits: list[Tensor]
    """Of every step, and of those that draft."""
    preemptions: float


def opened_config(path: Path, **model: Any) -> Config:
    return Config(model=ModelConfig(model=str(path), **model),
                  memory=MemoryConfig(page_size=16, max_total_tokens=1600, checkpoints=2),
                  scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48),
                  device=DeviceConfig(device="cpu", threads=1),
                  speculation=SpeculationConfig(speculative="auto"))


def asked() -> list[list[int]]:
    """The greedy prompts, of which the last is part of another one."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 190, (n,), generator=draw).tolist() for n in (1, 40, 23)]
    return [*prompts, prompts[1][:35]]


def serve(config: Config, group: RankGroup, **ring: Any) -> Served:
    """Requests of several kinds, some of them twice, so that a prefix is found."""
    runner = open_device(config, 1, lambda *_: None, {}, group).runner
    seen: list[Tensor] = []

    def kept(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(rows: Tensor) -> Tensor:
            seen.append(logits(rows).clone())
            return seen[-1]
        return call

    for name in ("logits", "head_logits"):  # with and without the final norm
        setattr(runner.model, name, kept(getattr(runner.model, name)))
    run = Ring(runner, budget=48, **ring)
    *prompts, part = asked()
    for prompt in prompts:
        run.submit(prompt, GREEDY)
    first = run.run()
    run.submit(part, GREEDY)
    run.submit(prompts[1], ResolvedParams(max_tokens=9, temperature=0.8, top_p=0.9), seed=11, n=2)
    run.submit(prompts[2], ResolvedParams(max_tokens=9, temperature=1.0, top_k=7,
                                          presence_penalty=0.4,
                                          repetition_penalty=1.1), seed=12)
    return Served(first + run.run()[len(first):], seen, run.preemptions)


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    """Every step's logits to 1e-5 of their largest."""
    return len(got) == len(want) > 9 and all(
        one.shape == other.shape
        and float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())
        for one, other in zip(got, want, strict=True))


BY_FOUR = ("llama-bias-tied", "gemma3", "deepseek", "qwen3.5", "qwen3-moe", "granite-groups")
"""More ranks than heads of keys and values, and what each kind of layer makes of that."""
LIKE_OTHERS = ("qwen2", "mistral", "latent-no-query-rank", "granite", "gpt-oss-mxfp4")


@pytest.mark.parametrize(("name", "size"), [
    pytest.param(name, size, marks=[pytest.mark.slow] * (
        name in LIKE_OTHERS or (size == 4) != (name in BY_FOUR)))
    for name in CASES for size in (2, 4)])
def test_ranks_give_what_the_model_alone_gives(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / "model"
    path.mkdir()
    CASES[name](path)
    config = opened_config(path)
    alone = serve(config, LoneRank())
    ranks = whole(run_ranks(tmp_path / "group", size, lambda group: serve(config, group)))
    assert len({str(own.outputs) for own in ranks}) == 1, "all ranks sample alike"
    for own in ranks:
        assert all(torch.equal(a, b) for a, b in zip(own.logits, ranks[0].logits, strict=True))
    assert near(ranks[0].logits, alone.logits)
    assert [out.tokens for out in ranks[0].outputs] == [out.tokens for out in alone.outputs]
    assert [out.cached for out in ranks[0].outputs] == [out.cached for out in alone.outputs]
    if size == 2:
        oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert [out.tokens for out in ranks[0].outputs[:4]] == [
            generated(oracle, prompt, GREEDY.max_tokens) for prompt in asked()]


FEW = ("llama-bias-tied", "qwen3.5")


@pytest.mark.parametrize("name", [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_preempted_sequences_and_drafts_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    """Every third step somebody gives up pages and states, to come back by prefix or checkpoint;
    where there is an MTP layer, each step verifies two drafts."""
    path = tmp_path / "model"
    path.mkdir()
    CASES[name](path)
    config = opened_config(path)
    alone = serve(config, LoneRank(), speculative="off")
    one, other = whole(run_ranks(tmp_path / "group", 2, lambda group: serve(
        config, group, force_preempt_every=3, speculative="mtp:2,fixed")))
    assert str(one.outputs) == str(other.outputs) and one.preemptions > 2
    assert [out.tokens for out in one.outputs] == [out.tokens for out in alone.outputs]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_ranks_in_bf16_stay_near_and_agree(tmp_path: Path, kind: str) -> None:
    """With the C kernels; partial sums are rounded once."""
    path = tmp_path / "model"
    path.mkdir()
    write_kind(path, kind)
    config = opened_config(path, dtype="bfloat16")
    alone = serve(config, LoneRank())
    one, other = whole(run_ranks(tmp_path / "group", 2, lambda group: serve(config, group)))
    assert str(one.outputs) == str(other.outputs)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    # Later steps have other inputs where two tokens are nearly as likely.
    first, want = one.logits[0], alone.logits[0]
    assert float((first - want).abs().max()) <= 0.05 * float(want.abs().max())
