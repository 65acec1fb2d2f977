"""Granite-4 hybrid against transformers: fp32, tiny checkpoints at random, states poisoned."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_mamba import BASE, GRANITE, write_granite
from helpers_models import CPU, load, oracle_logits, why_refused
from helpers_pairs import pairs
from helpers_parity import ATOL, Case, alone, tokens

from actorium.actors.config.tree import Config, ModelConfig
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.models.registry import load_model

CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-tied-rope": {
        "tie_word_embeddings": True, "position_embedding_type": "rope", "mamba_n_groups": 2,
        "mamba_proj_bias": True, "attention_bias": True, "mamba_d_conv": 3,
        "layer_types": ["attention", "mamba", "mamba"], "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "experts": {"num_local_experts": 6, "mamba_n_heads": 4, "mamba_d_head": 32,
                "mamba_d_state": 12, "mamba_conv_bias": False},
    "experts-rope": {
        "num_local_experts": 5, "position_embedding_type": "rope", "mamba_n_groups": 2,
        "tie_word_embeddings": True, "mamba_d_conv": 2, "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"], "residual_multiplier": 1.0},
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        path = tmp_path_factory.mktemp("model")
        oracle = write_granite(path, seed=3, **CASES[kind])
        return Case(load(path), oracle, path)

    return cached


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


@pytest.mark.parametrize(("case", "chunk", "prompt"), pairs(
    CASES, [(1, 9), (7, 100), (64, 130), (513, 600)]), indirect=["case"])
def test_greedy_with_chunks(case: Case, chunk: int, prompt: int) -> None:
    case.check(alone(case.model, chunk, prompt))


def test_the_checkpoint_can_fail_us(case: Case) -> None:
    """Logits differ by much more than what is let pass, and so do the tokens chosen."""
    logits = case.logits(tokens(100))
    assert float(logits.std()) > 1000 * ATOL
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_greedy_equals_generate(case: Case) -> None:
    case.check_against_generate()


@pytest.mark.parametrize(("case", "chunk"), pairs(CASES, [7, 513]), indirect=["case"])
def test_batched_with_admissions_in_the_middle(case: Case, chunk: int) -> None:
    case.check_admissions_in_the_middle(chunk, (17, 64, 2))


def test_preemption(case: Case) -> None:
    case.check_preemption()


@pytest.mark.parametrize(("case", "chunk"), pairs(CASES, [40, 513]), indirect=["case"])
def test_a_prefix_through_a_checkpoint(case: Case, chunk: int) -> None:
    case.check_a_prefix(chunk, ((193, 192), (49, 48)))


def test_states_in_bf16_stay_near(case: Case) -> None:
    case.check_states_in_bf16()


@pytest.mark.parametrize("experts", [0, 6])
def test_weights_in_bf16(experts: int, tmp_path: Path) -> None:
    """As near to the same weights in fp32 as transformers is in bf16."""
    narrow = write_granite(tmp_path, 4, torch.bfloat16, num_local_experts=experts)
    s = alone(load(tmp_path), 90, 150, 30)
    theirs = oracle_logits(narrow, s.tokens).float()
    want = oracle_logits(narrow.float(), s.tokens)
    ours = torch.stack([(logits - want[n - 1]).abs().mean() for n, logits in s.logits.items()])
    peers = torch.stack([(theirs[n - 1] - want[n - 1]).abs().mean() for n in s.logits])
    assert float(ours.median()) < 1.5 * float(peers.median())


def test_time_steps_are_limited_in_decode_as_in_extend(tmp_path: Path) -> None:
    """Transformers limits them in chunks only: the oracle is its run over all tokens at once."""
    oracle = write_granite(tmp_path, 5, time_step_limit=(0.3, 0.9))
    Case(None, oracle, tmp_path).check(alone(load(tmp_path), 64, 80, 20))
    assert read_shape(tmp_path, Config()).recurrence.time_limit == (0.3, 0.9)  # type: ignore[union-attr]


def test_the_worker_reports_its_states(case: Case) -> None:
    case.check_what_the_worker_tells()


@pytest.mark.parametrize("experts", [0, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_at_random_are_numbers(experts: int, dtype: str, tmp_path: Path) -> None:
    fields = {**BASE, "architectures": [GRANITE], "dtype": dtype, "num_local_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = Config(model=ModelConfig(load_format="dummy"))
    model = load_model(tmp_path, config, CPU, lambda *_: None)
    logits = torch.stack(list(alone(model, 100, 300, 20).logits.values()))
    assert torch.isfinite(logits).all() and float(logits.std()) > 0


def test_fields_missing_in_a_config_have_defaults(tmp_path: Path) -> None:
    """And names and numbers as Granite 4.0's checkpoints have them."""
    kinds = ["mamba"] * 5 + ["attention"] + ["mamba"] * 2
    fields = {"architectures": [GRANITE], "hidden_size": 1536, "num_hidden_layers": 8,
              "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
              "mamba_d_state": 128, "layer_types": kinds, "dtype": "bfloat16",
              "num_local_experts": 62, "num_experts_per_tok": 6, "residual_multiplier": 0.22,
              "embedding_multiplier": 12, "rms_norm_eps": 1e-5, "logits_scaling": 6,
              "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = read_shape(tmp_path, Config())
    assert shape.recurrent == (0, 1, 2, 3, 4, 6, 7) and shape.groups[0].layers == (5,)
    assert shape.state is not None
    assert (shape.state.state, shape.state.columns) == ((48, 64, 128), (3, 3072 + 256))
    assert shape.norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert shape.embed_scale == pytest.approx(12 / 0.22)
    assert (shape.ropes, shape.logit_scale, shape.head_dim) == ((), 1 / 6, 128)
    assert shape.recurrence is not None and shape.experts is not None
    assert shape.recurrence.time_limit == (0, math.inf)  # type: ignore[union-attr]
    assert (shape.experts.number, shape.experts.size, shape.experts.shared) == (62, 11_008, 1024)
    del fields["layer_types"]
    fields["layers_block_type"] = kinds
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_shape(tmp_path, Config()) == shape


@pytest.mark.parametrize(("change", "message"), [
    ({"layer_types": ["mamba"] * 4}, "layer_types: a model without attention"),
    ({"layer_types": ["mamba", "attention"]}, "layer_types: must be 4 times mamba or attention"),
    ({"layer_types": ["mamba", [], 3, "attention"]}, "layer_types: must be 4 times"),
    ({"mamba_n_groups": 3}, "mamba_n_groups: 3 does not divide 8 heads"),
    ({"mamba_n_heads": 7}, "mamba_n_heads: 7 heads of 16 are not mamba_expand * hidden_size, 128"),
    ({"mamba_d_conv": 1}, "mamba_d_conv: must be at least 2"),
    ({"num_local_experts": 2}, "num_experts_per_tok: 3 is more than 2 experts"),
    ({"num_local_experts": "many"}, "num_local_experts: must be a positive integer"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type: must be rope or nope"),
    ({"time_step_limit": [1.0, 0.5]}, "time_step_limit: must be two numbers, the least first"),
    ({"time_step_limit": "none"}, "time_step_limit: must be two numbers"),
    ({"residual_multiplier": 0}, "residual_multiplier: must be a positive number"),
])
def test_unsupported_fields_are_named(tmp_path: Path, change: dict[str, Any],
                                      message: str) -> None:
    assert message in why_refused(tmp_path, {"architectures": [GRANITE], **BASE, **change})
