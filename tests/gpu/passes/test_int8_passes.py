"""Norms and gates before products that take INT8: joined with what quantises, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import CONFIGS, SMALL
from helpers_hybrid import hybrid_runner
from helpers_models import CPU
from helpers_ranks import run_ranks, whole
from helpers_worker import complete, make_runner

from actorium.actors.config.parsed_values import PASSES, parse_passes
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.passes.pass_manager import PassManager
from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.inputs import InputForm, Quantised

PROMPTS = [[5, 9, 31, 7, 100, 8, 3], [11] * 20, [1, 2]]
GREEDY = ResolvedParams(max_tokens=10, temperature=0.0)
QUANT = ("norm_quant", "act_quant")
QWEN3, GEMMA, HYBRID = (next(raw for raw in CONFIGS if raw["architectures"] == [name])
                        for name in ("Qwen3ForCausalLM", "Gemma3ForCausalLM",
                                     "Qwen3NextForCausalLM"))
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


def loaded(path: Path, raw: dict[str, Any], passes: str = "all", group: int = 32,
         ranks: RankGroup | LoneRank = LoneRank(), **device: Any) -> Decoder:
    """Random weights in INT8; group 0: a scale a row."""
    (path / "config.json").write_text(json.dumps({**SMALL, **raw, "dtype": "bfloat16"}))
    config = Config(model=ModelConfig(load_format="dummy", seed=3, quantization="int8",
                                      quantization_group=group),
                    device=DeviceConfig(passes=passes, **device))
    return load_model(path, config, CPU, lambda *_: None, ranks)


def counts(model: Decoder, on: str = "all") -> dict[str, int]:
    """How often the passes that quantise matched."""
    report = PassManager(model, parse_passes(on)).install()
    return {name: report.matches[name] for name in QUANT}


@pytest.fixture
def native(tmp_path: Path) -> None:
    """A machine whose C library can be built."""
    if not isinstance(loaded(tmp_path, QWEN3, "none").ops, NativeOps):
        pytest.skip("the C library cannot be built here")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize(("raw", "gates", "alone"), [
    (QWEN3, 0, 4),  # C's product has its gate, and gives bf16
    (GEMMA, 4, 4), (HYBRID, 0, 1)], ids=["qwen3", "gemma", "hybrid"])
def test_the_same_bits_on_a_cpu(raw: dict[str, Any], gates: int, alone: int, group: int,
                                tmp_path: Path) -> None:
    """gates: that quantise; alone: where products do not have theirs."""
    fused = loaded(tmp_path, raw, group=group)
    assert counts(fused) == {"norm_quant": 8, "act_quant": gates}
    apart = loaded(tmp_path, raw, "all,-norm_quant,-act_quant", group)
    assert counts(apart, "all,-norm_quant,-act_quant") == dict.fromkeys(QUANT, 0)
    runner = hybrid_runner if fused.shape.recurrent else make_runner
    want = complete(runner(apart), PROMPTS, GREEDY, budget=16)
    assert complete(runner(fused), PROMPTS, GREEDY, budget=16) == want
    left = PassManager(loaded(tmp_path, raw, "none", group), QUANT).install()
    assert left.error == 0, "both round alike"
    assert left.matches["act_quant"] == alone


@pytest.mark.usefixtures("native")
def test_a_wrong_code_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeOps.rms_norm_quant

    def wrong(self: NativeOps, x: Any, weight: Any, eps: float, form: InputForm) -> Quantised:
        made_of = right(self, x, weight, eps, form)
        made_of.scales.mul_(1.5)
        return made_of

    monkeypatch.setattr(NativeOps, "rms_norm_quant", wrong)
    with pytest.raises(BadModel, match=r"the pass norm_quant .* made %norm_quant.*differ by"):
        loaded(tmp_path, QWEN3)
    loaded(tmp_path, QWEN3, "all,-norm_quant")


@pytest.mark.usefixtures("native")
def test_sums_over_ranks_keep_the_norm_behind_them(tmp_path: Path) -> None:
    """The first norm of all quantises; the others are made with the ranks' sums."""
    def body(group: RankGroup) -> dict[str, int]:
        own = tmp_path / f"rank-{group.place.rank}"
        own.mkdir()
        model = loaded(own, QWEN3, ranks=group)
        report = PassManager(model, PASSES).install()
        assert counts(model, "all,-reduce_norm") == {"norm_quant": 8, "act_quant": 0}
        return {name: report.matches[name] for name in ("reduce_norm", *QUANT)}

    for found in whole(run_ranks(tmp_path / "a", 2, body)):
        assert found == {"reduce_norm": 7, "norm_quant": 1, "act_quant": 0}


@pytest.mark.slow
@interpreted
def test_in_triton(tmp_path: Path) -> None:
    """A scale a row: norms and gates quantise; of weights in groups inputs stay as they are."""
    fused = loaded(tmp_path, QWEN3, group=0, kernels="triton")
    assert counts(fused) == {"norm_quant": 8, "act_quant": 4}
    plain = loaded(tmp_path, QWEN3, "all,-norm_quant,-act_quant", 0, kernels="triton")
    want = complete(make_runner(plain), PROMPTS[:1], GREEDY, budget=16)
    assert complete(make_runner(fused), PROMPTS[:1], GREEDY, budget=16) == want
    assert PassManager(plain, QUANT).install().error == 0, "both round alike"
    assert counts(loaded(tmp_path, QWEN3, group=32, kernels="triton")) == dict.fromkeys(QUANT, 0)


def test_products_that_dequantise_take_their_input_as_it_is(tmp_path: Path) -> None:
    model = loaded(tmp_path, QWEN3, kernels="torch")
    assert counts(model) == dict.fromkeys(QUANT, 0)
    assert model.dtype is torch.bfloat16
