"""DeepSeek-V3 against transformers: fp32, random tiny checkpoints, pages poisoned."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_deepseek import BASE, DEEPSEEK, YARN, deepseek_model, write_deepseek
from helpers_hybrid import hybrid_runner
from helpers_models import Seq, Stepper, generated, load, oracle_logits, why_refused
from helpers_pairs import pairs
from helpers_parity import ATOL, NEW, Case, alone, tokens
from helpers_worker import Ring, make_runner

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import read_shape
from actorium.kernels.reference.experts import route_groups

CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "queries-at-once": {
        "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0, "n_group": 1,
        "topk_group": 1, "num_hidden_layers": 2, "n_shared_experts": 2, "v_head_dim": 24},
    "yarn": {
        "rope_parameters": YARN, "rope_interleave": False, "norm_topk_prob": False,
        "n_routed_experts": 12, "n_group": 3, "topk_group": 1, "attention_bias": True,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        path = tmp_path_factory.mktemp("model")
        oracle = write_deepseek(path, seed=3, **CASES[kind])
        return Case(load(path), oracle, path)

    return cached


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


@pytest.mark.parametrize(("case", "chunk", "prompt", "page_size"), pairs(
    CASES, [(1, 9, 16), (7, 100, 1), (64, 130, 64), (513, 600, 16)]), indirect=["case"])
def test_greedy_with_chunks(case: Case, chunk: int, prompt: int, page_size: int) -> None:
    case.check(alone(case.model, chunk, prompt, page_size=page_size, pages=6400 // page_size))


def test_batched_greedy_equals_generate(case: Case) -> None:
    """Through the scheduler, with transformers' own decode path for a witness."""
    prompts = [tokens(n, n) for n in (1, 2, 7, 16, 33, 70)]
    ring = Ring(make_runner(case.model), budget=64)
    for prompt in prompts:
        ring.submit(prompt, ResolvedParams(max_tokens=NEW, temperature=0.0))
    for prompt, out in zip(prompts, ring.run(), strict=True):
        assert out.tokens == generated(case.oracle, prompt, NEW)
    assert ring.most_in_flight == 2


@pytest.mark.parametrize(("case", "chunk"), pairs(CASES, [7, 513]), indirect=["case"])
def test_batched_with_admissions_in_the_middle(case: Case, chunk: int) -> None:
    case.check_admissions_in_the_middle(chunk, (17, 64, 40, 2))


def test_preemption(case: Case) -> None:
    """And the scheduler's way, with a pool that holds a third of what is asked for."""
    case.check_preemption()
    prompts = [tokens(n, n) for n in (30, 40, 50, 60)]
    ring = Ring(make_runner(case.model, 24, page_size=8), budget=32)
    for prompt in prompts:
        ring.submit(prompt, ResolvedParams(max_tokens=50, temperature=0.0))
    outputs = ring.run()
    assert ring.preemptions >= 2
    for prompt, out in zip(prompts, outputs, strict=True):
        want = case.logits(prompt + out.tokens)
        assert out.tokens == want[len(prompt) - 1:-1].argmax(-1).tolist()


def test_a_prefix_is_reused(case: Case) -> None:
    """Beside its donor, and after it has gone: pages of latents serve whoever begins so."""
    case.check_a_prefix(64, ((193, 192), (190, 160), (49, 48)))


def test_prompt_logprobs(case: Case) -> None:
    prompts = [tokens(n, n) for n in (2, 40, 77)]
    ring = Ring(make_runner(case.model), budget=13)
    for prompt in prompts:
        ring.submit(prompt, ResolvedParams(max_tokens=1, temperature=0.0, prompt_logprobs=3))
    for prompt, out in zip(prompts, ring.run(), strict=True):
        want = case.logits(prompt)[:-1].log_softmax(-1)
        parts = sorted(out.prompt_logprobs, key=lambda p: p.start)
        got = np.concatenate([np.frombuffer(p.chosen, np.float32) for p in parts])
        chosen = want.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        np.testing.assert_allclose(got, chosen.numpy(), atol=ATOL)


@pytest.mark.parametrize(("case", "q_len"), pairs(CASES, [2, 3, 5, 11]), indirect=["case"])
def test_windows_of_several_rows(case: Case, q_len: int) -> None:
    """What verifies drafts: the last q_len tokens of several sequences, beside an extend."""
    stepper = Stepper(case.model)
    for pool in stepper.pools:
        for layer in pool.layers:
            layer.fill_(torch.nan)
    seqs = [Seq(tokens(n, n)) for n in (40, 23, q_len + 1)]
    for s in seqs:
        s.tokens = s.tokens[:-q_len]
        stepper.step([(s, len(s.tokens))])
        s.tokens = tokens(len(s.tokens) + q_len, len(s.tokens) + q_len)
    other = Seq(tokens(20, 9))
    got = stepper.step([(other, 20)], seqs, q_len, every_row=True)
    want = [case.logits(s.tokens) for s in (other, *seqs)]
    rows = torch.cat([want[0], *(own[-q_len:] for own in want[1:])])
    torch.testing.assert_close(got, rows, atol=ATOL, rtol=0)


def test_bytes_of_a_token(case: Case) -> None:
    config = case.oracle.config
    pool = hybrid_runner(case.model, pages=7, page_size=4).pools[0]
    row = config.kv_lora_rank + config.qk_rope_head_dim
    assert pool.bytes == 7 * 4 * config.num_hidden_layers * row * 4


def test_the_worker_allocates_the_planned_pool(case: Case) -> None:
    found = case.opened(kv_cache_bytes=1 << 20)
    (pool,) = found.runner.pools
    row = case.oracle.config.kv_lora_rank + case.oracle.config.qk_rope_head_dim
    each = 16 * row * 4 * case.oracle.config.num_hidden_layers
    assert pool.pages == found.ready.groups[0].pages == min((1 << 20) // each, 4 * 65 + 1)


def test_dummy_weights(case: Case) -> None:
    model = load(case.path, load_format="dummy", dtype="bfloat16")
    out = Ring(make_runner(model))
    out.submit(tokens(20), ResolvedParams(max_tokens=8, temperature=0.0, logprobs=0))
    (done,) = out.run()
    assert len(done.tokens) == 8
    assert all(np.isfinite(np.frombuffer(p.chosen, np.float32)).all() for p in done.logprobs)


def test_bf16_stays_near(tmp_path: Path) -> None:
    """Rounding the checkpoint's way: as far from fp32 as transformers itself, and no farther."""
    oracle = write_deepseek(tmp_path, 5, torch.bfloat16)
    theirs = oracle_logits(oracle, tokens(90)).float()
    wide = oracle_logits(oracle.float(), tokens(90))
    s, stepper, rows = Seq(tokens(90)), Stepper(load(tmp_path)), []
    while s.done < 90:
        rows.append(stepper.step([(s, min(32, 90 - s.done))], every_row=True))
    error = (torch.cat(rows) - wide).abs().mean(-1).median()
    assert error < 1.5 * (theirs - wide).abs().mean(-1).median()


def test_experts_of_the_best_groups_alone() -> None:
    """The highest score of all stays out where its group is not among the chosen."""
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.6, 0.4, 0.8]])
    weights, experts = route_groups(scores, torch.zeros(6), 3, 1, 2)
    assert sorted(experts[0].tolist()) == [4, 5]
    assert sorted(weights[0].tolist()) == pytest.approx([0.4, 0.8])
    _, experts = route_groups(scores, torch.tensor([0.0, 1, 0, 0, 0, 0]), 3, 1, 2)
    assert sorted(experts[0].tolist()) == [0, 1]
    _, experts = route_groups(scores, torch.zeros(6), 3, 3, 3)
    assert sorted(experts[0].tolist()) == [0, 3, 5]


def test_stacked_experts(tmp_path: Path) -> None:
    """A checkpoint that has all experts of a layer in one tensor."""
    from safetensors.torch import load_file, save_file

    oracle = write_deepseek(tmp_path, 2)
    file = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(str(file)).items() if ".experts." not in name}
    for name, p in oracle.named_parameters():
        if ".experts." in name:
            tensors[name] = p.detach().clone()
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, str(file))
    Case(None, oracle, tmp_path).check(alone(load(tmp_path), 33, 50, 10))


def test_fields_missing_in_a_config_have_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": [DEEPSEEK], "dtype": "bfloat16", "max_position_embeddings": 163_840,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1}}))
    s = read_shape(tmp_path, Config())
    assert s.kv_row == (1, 576) and s.sparse == tuple(range(3, 61))
    assert s.latent.query_rank == 1536 and s.latent.interleaved
    assert (s.experts.number, s.experts.shared, s.routing.groups) == (256, 2048, 8)
    assert s.attention_scale == pytest.approx(192 ** -0.5 * 1.3688879 ** 2)
    assert s.max_model_len == 163_840 and s.mtp_layers == 0


@pytest.mark.parametrize(("change", "message"), [
    ({"n_group": 3}, "n_group: 3 groups of 8 experts"),
    ({"n_group": 8}, "n_group: 8 groups of 8 experts"),
    ({"topk_group": 5}, "topk_group: 5 is more than 4 groups"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5 is more than the 4 experts of 2 groups"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: must be even"),
    ({"kv_lora_rank": 0}, "kv_lora_rank: must be a positive integer"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace: must be a number of layers"),
    ({"hidden_act": "gelu"}, "hidden_act: only silu"),
    ({"rope_scaling": 3}, "rope_scaling: must be an object"),
    ({"quantization_config": {"quant_method": "quanto"}}, "quant_method: must be fp8"),
])
def test_unsupported_fields_are_named(tmp_path: Path, change: dict[str, Any],
                                      message: str) -> None:
    assert message in why_refused(tmp_path, {"architectures": [DEEPSEEK], **BASE, **change})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    deepseek_model(0).save_pretrained(str(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    del tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    save_file(tensors, str(file))
    with pytest.raises(BadModel, match="2.mlp.gate.e_score_correction_bias is missing"):
        load(tmp_path)
