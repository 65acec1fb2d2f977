"""Hybrid models against transformers: fp32, random tiny checkpoints, states and pages poisoned."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_hybrid import (
    BASE,
    DENSE,
    MOE,
    NEXT,
    SPARSE,
    HybridDriver,
    hybrid_config,
    hybrid_model,
    hybrid_runner,
    write_hybrid,
)
from helpers_models import load, oracle_logits, why_refused
from helpers_pairs import pairs
from helpers_parity import ATOL, Case, alone, tokens

from actorium.actors.config.tree import Config
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.step.states import row_bytes

FIRST = ["full_attention", "linear_attention", "linear_attention"]
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 256}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": (NEXT, {}),
    "next-attention-first": (NEXT, {
        "num_hidden_layers": 3, "layer_types": FIRST, "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 6, "attention_bias": True, "mlp_only_layers": [1],
        "norm_topk_prob": False, "rope_parameters": YARN}),
    "dense": (DENSE, {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    "dense-tied": (DENSE, {
        "tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3,
        "num_hidden_layers": 3, "layer_types": FIRST, "rope_parameters": HALF}),
    "sparse": (SPARSE, {"head_dim": 24, "linear_key_head_dim": 12, "linear_value_head_dim": 20}),
    "moe": (MOE, {"decoder_sparse_step": 2, "norm_topk_prob": True}),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case_of(name: str) -> Case:
        architecture, options = CASES[name]
        path = tmp_path_factory.mktemp("model")
        oracle = write_hybrid(path, architecture, seed=3, **options)
        return Case(load(path), oracle, path)

    return case_of


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


RECURRENT = [name for name in CASES if CASES[name][0] != MOE]


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


@pytest.mark.parametrize(("case", "chunk", "prompt"), pairs(
    CASES, [(1, 9), (7, 100), (64, 130), (513, 600)]), indirect=["case"])
def test_greedy_with_chunks(case: Case, chunk: int, prompt: int) -> None:
    case.check(alone(case.model, chunk, prompt))


def test_greedy_equals_generate(case: Case) -> None:
    case.check_against_generate()


@pytest.mark.parametrize(("case", "chunk"), pairs(CASES, [7, 64, 513]), indirect=["case"])
def test_batched_with_admissions_in_the_middle(case: Case, chunk: int) -> None:
    case.check_admissions_in_the_middle(chunk, (17, 64, 40, 2))


def test_preemption(case: Case) -> None:
    case.check_preemption()


@pytest.mark.parametrize(("recurrent", "chunk"), pairs(RECURRENT, [40, 64, 513]),
                         indirect=["recurrent"])
def test_a_prefix_through_a_checkpoint(recurrent: Case, chunk: int) -> None:
    """One of the checkpoints is used twice."""
    others = recurrent.check_a_prefix(chunk, ((193, 192), (190, 160), (49, 48)))
    assert others[0].tokens[193:200] != [] and not torch.isnan(others[0].logits[193]).any()


def test_a_checkpoint_is_kept_again(recurrent: Case) -> None:
    """Its row is overwritten in the very step that admits from it: the old state is read."""
    driver = recurrent.driver(513, checkpoints=1)
    a = driver.admit(tokens(64), 70, saves={32: 1})
    driver.run(1)
    b = driver.admit(tokens(50), 60, a, 32, checkpoint=1)
    c = driver.admit(tokens(80, 9), 90, saves={48: 1})
    driver.run(1)
    d = driver.admit(tokens(60, 9), 80, c, 48, checkpoint=1)
    driver.run()
    recurrent.check(a, c, d)
    want = recurrent.logits(b.tokens)
    torch.testing.assert_close(b.logits[50], want[49], atol=ATOL, rtol=0)


def test_bytes_of_the_state_pool(recurrent: Case) -> None:
    shape = recurrent.model.shape
    for dtype in (torch.float32, torch.bfloat16):
        pool = hybrid_runner(recurrent.model, 7, 3, state_dtype=dtype).states
        assert pool is not None
        assert pool.bytes == 9 * row_bytes(shape.state, len(shape.recurrent), dtype,
                                            recurrent.model.dtype)
        held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
                for layer in pool.layers for part in layer}
        assert sum(held.values()) == pool.bytes > 0


def test_states_in_bf16_stay_near(recurrent: Case) -> None:
    recurrent.check_states_in_bf16()


@pytest.mark.parametrize(("architecture", "factor", "state_dtype"), pairs(
    [(NEXT, 2.0), (DENSE, 1.3)], [torch.float32, torch.bfloat16]))
def test_bf16_in_c_and_in_torch(architecture: str, factor: float, state_dtype: torch.dtype,
                                tmp_path: Path) -> None:
    """Chunks, decodes and a prefix through a checkpoint: C stays as near to fp32 as torch does.
    With experts the two choose others now and then, and then other tokens."""
    options = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 32}
    wide = write_hybrid(tmp_path, architecture, 4, torch.bfloat16, **options).float()
    errors = []
    for native in (True, False):
        model = load(tmp_path, native=native)
        if native and model.ops.name != "native":
            pytest.skip("no C compiler, or torch with another OpenMP")
        driver = HybridDriver(hybrid_runner(model, state_dtype=state_dtype), 90)
        donor = driver.admit(tokens(150), 180, saves={128: 2})
        driver.run(3)
        held = [donor, driver.admit(tokens(140), 170, donor, 128, checkpoint=2),
                driver.admit(tokens(5, 3), 30)]
        driver.run()
        worst = []
        for s in held:
            want = oracle_logits(wide, s.tokens)
            worst += [float((logits - want[n - 1]).abs().mean()) for n, logits in s.logits.items()]
        errors.append(np.median(worst))
    assert errors[0] < factor * errors[1] and errors[1] < 0.05


def test_plans_that_do_not_fit_are_refused(recurrent: Case) -> None:
    runner = hybrid_runner(recurrent.model, checkpoints=2)
    ids, params = np.arange(2, 34, dtype=np.int32).tobytes(), ResolvedParams(max_tokens=2)
    pages = np.ones(1, np.int32).tobytes()
    with pytest.raises(ValueError, match="slot 1: 16 tokens are cached and the checkpoint is 0"):
        runner.run(StepPlan(1, 1, admit=[Admit(1, ids, 32, 16, pages, params, 1)]))
    with pytest.raises(ValueError, match="checkpoint 3 is not in 1..2"):
        runner.run(StepPlan(1, 1, admit=[Admit(1, ids, 32, 16, pages, params, 1, 3)]))
    admit = [Admit(1, ids, 32, 0, b"", params, 1)]
    extend = np.array([1, 16], np.int32).tobytes()
    for save, message in (([1, 1, 17], "slot 1 extends by 16 tokens, not to 17"),
                          ([2, 1, 1], "slot 2 extends by 0"), ([1, 3, 16], "not in 1..2")):
        saves = np.array(save, np.int32).tobytes()
        with pytest.raises(ValueError, match=message):
            runner.run(StepPlan(1, 1, admit=admit, extend=extend, checkpoints=saves))


def test_the_worker_reports_its_states(recurrent: Case) -> None:
    recurrent.check_what_the_worker_tells()


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    import transformers

    text = {k: v for k, v in hybrid_config(DENSE).to_dict().items() if k != "architectures"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2,
              "out_hidden_size": 64, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    whole: Any = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    text_alone = hybrid_model(DENSE)
    whole.model.language_model.load_state_dict(text_alone.model.state_dict())
    whole.lm_head.load_state_dict(text_alone.lm_head.state_dict())
    whole.save_pretrained(str(tmp_path))
    assert (json.loads((tmp_path / "config.json").read_text())["architectures"]
            == ["Qwen3_5ForConditionalGeneration"])
    Case(None, text_alone, tmp_path).check(alone(load(tmp_path), 64, 50, 10))


def test_fields_missing_in_a_config_have_defaults(tmp_path: Path) -> None:
    def shape(architecture: str, **fields: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(
            {"architectures": [architecture], "dtype": "bfloat16", **fields}))
        return read_shape(tmp_path, Config())

    big = shape(NEXT)
    assert big.groups[0].layers == tuple(range(3, 48, 4)) and len(big.recurrent) == 36
    assert (big.rotary_dim, big.experts.number, big.experts.chosen) == (64, 512, 10)
    assert big.state.state == (32, 128, 128) and big.state.columns == (3, 8192)
    text = {"hidden_size": 5120, "num_hidden_layers": 64, "linear_num_value_heads": 48}
    whole = shape("Qwen3_5ForConditionalGeneration", text_config=text)
    assert (len(whole.recurrent), whole.kv_heads, whole.head_dim) == (48, 4, 256)
    row = row_bytes(whole.state, 48, torch.float32, torch.bfloat16)
    assert row == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert shape("Qwen3_5MoeForCausalLM").sparse == tuple(range(40))


@pytest.mark.parametrize(("change", "message"), [
    ({"layer_types": ["linear_attention"] * 4}, "layer_types: a model without full_attention"),
    ({"layer_types": ["full_attention"]}, "layer_types: must be 4 times"),
    ({"linear_num_key_heads": 3}, "linear_num_key_heads: 3 does not divide 4 value heads"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be at least 2"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than 8 experts"),
    ({"use_sliding_window": True}, "use_sliding_window: is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: must be above"),
    ({"mlp_only_layers": 3}, "mlp_only_layers: must be a list"),
])
def test_unsupported_fields_are_named(tmp_path: Path, change: dict[str, Any],
                                      message: str) -> None:
    assert message in why_refused(tmp_path, {"architectures": [NEXT], **BASE, **change})
