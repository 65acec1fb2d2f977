"""The plan and the worker hold the same shape of a model, or refuse it with the same words.

Both are asked as users ask them: by `actorium plan`, and by what opens the worker's device.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from helpers_configs import CONFIGS, DELTA, EXPERTS, MAMBA, SMALL
from helpers_models import CPU
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from actorium.actors.config.tree import (
    MADE_BITS,
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.errors import ActoriumError
from actorium.gpu.families.architectures import ARCHITECTURES, read_shape
from actorium.gpu.models import registry
from actorium.gpu.parallel.rank_group import ALONE, LoneRank, RankPlace
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.step.pools import make_draft_pool, make_pools
from actorium.gpu.step.states import StatePool
from actorium.gpu.weights.dtypes import TORCH_DTYPES, kv_dtype
from actorium.gpu.weights.lazy_tensors import WeightTensors, materialised
from actorium.gpu.worker.allocation import max_drafts
from actorium.gpu.worker.device import open_device
from actorium.kernels.cpu.grouped_native import NativeGrouped, layout_bytes
from actorium.kernels.grouped_rows import GroupedLinear, is_grouped
from actorium.kernels.scaled_linear import ScaledLinear, is_packed
from actorium.tools.cli import main

BUDGET = 3 << 20
FLAGS = ["--memory", str(BUDGET), "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]


def planned(path: Path, *flags: str) -> dict[str, Any] | str:
    """What the command prints; or, where it refuses, its words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", str(path), *FLAGS, "--json", *flags])
    if code:
        return err.getvalue().removeprefix("actorium: error: ").strip()
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def served(path: Path) -> dict[str, Any] | str:
    """The pools and states of a worker that has opened its device; or its words."""
    config = Config(
        model=ModelConfig(model=str(path), load_format="dummy"),
        memory=MemoryConfig(kv_cache_bytes=BUDGET),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32),
        device=DeviceConfig(device="cpu", threads=1))
    try:
        opened = open_device(config, 1, lambda *_: None, {})
    except ActoriumError as e:
        return str(e)
    runner = opened.runner
    return {"pools": [(group.window, pool.pages, len(pool.layers), pool.bytes)
                      for group, pool in zip(runner.model.shape.groups, runner.pools, strict=True)],
            "states": runner.states.bytes if runner.states else 0,
            "dtype": opened.info.dtype, "longest": opened.ready.max_model_len}


def same(path: Path, raw: dict[str, Any]) -> dict[str, Any] | str:
    """What both say."""
    (path / "config.json").write_text(json.dumps(raw))
    plan, worker = planned(path), served(path)
    if not isinstance(plan, str):
        pools = sum(pool["bytes"] for pool in plan["pools"])
        plan = {"pools": [(pool["window"], pool["pages"], pool["layers"], pool["bytes"])
                          for pool in plan["pools"]],
                "states": plan["used"] - pools, "dtype": plan["weights_dtype"],
                "longest": plan["max_model_len"]}
    assert plan == worker
    return worker


# --- what the two once read differently ----------------------------------------------------------

TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(("raw", "windows"), [
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 48, "layer_types": TYPES}, [48]),
    ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": None}, [0]),
    ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "layer_types": TYPES}, [32, 0]),
    ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "head_dim": None}, [0]),
    ({"architectures": ["GraniteMoeHybridForCausalLM"], **MAMBA, "num_local_experts": 0,
      "layer_types": ["attention"] * 4}, [0]),
    ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
     [0]),
], ids=["Mistral's layer_types", "Gemma 3 without windows", "Gemma 3", "heads of 128 for a MoE",
        "Granite without Mamba", "yarn without original positions"])
def test_both_hold_the_same(raw: dict[str, Any], windows: list[int], tmp_path: Path) -> None:
    found = same(tmp_path, {**SMALL, **raw})
    assert isinstance(found, dict)
    assert [window for window, *_ in found["pools"]] == windows
    assert found["states"] == 0 and found["longest"] == SMALL["max_position_embeddings"]


@pytest.mark.parametrize(("raw", "words"), [
    ({"head_dim": 15}, "head_dim: must be even, got 15"),
    ({"hidden_act": "gelu"}, "hidden_act: only silu is supported, got 'gelu'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
     "rope_scaling.short_factor: must list positive numbers, got None"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
     "rope_scaling.short_factor: must list 8 numbers, one a rotated pair, got 1"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
     "rope_scaling.rope_type: must be one of default, linear, dynamic, llama3, yarn, longrope, "
     "got 'ntk'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor: must be a positive number, got None"),
    ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: 0.2 of 16 dimensions is no even"),
    ({"architectures": ["Gemma3ForCausalLM"], "partial_rotary_factor": 0.5},
     "partial_rotary_factor: only 1.0 is supported"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a positive number, got 'small'"),
    ({"max_position_embeddings": "far"}, "max_position_embeddings: must be a positive integer"),
    ({"architectures": ["GPT9LMHeadModel"]}, "architecture GPT9LMHeadModel is not supported"),
    ({"dtype": "int8"}, "dtype: must be float32, bfloat16 or float16, got 'int8'"),
    ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
     "final_logit_softcapping: is not supported, got 30.0"),
    ({"architectures": ["Qwen3NextForCausalLM"], **DELTA, **EXPERTS, "use_sliding_window": True},
     "use_sliding_window: is not supported for this architecture"),
])
def test_both_refuse_with_the_same_words(raw: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = same(tmp_path, {**SMALL, "architectures": ["LlamaForCausalLM"], **raw})
    assert isinstance(found, str) and words in found


# --- whatever a config says ----------------------------------------------------------------------

LAYERS = SMALL["num_hidden_layers"]
LOADED = 8 << 20
"""Bytes of weights that are drawn at most: families fill in sizes of billions."""
WRONG = st.sampled_from([None, 0, -1, 1.5, "x", True, [], {}, 2**40])
"""Values that hardly any field may have."""
KINDS = st.sampled_from([
    "full_attention", "sliding_attention", "linear_attention", "mamba", "attention", "chunked"])
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def ropes() -> st.SearchStrategy[Any]:
    """A rope object of every kind, served or not, as a whole or with parts missing."""
    number = st.sampled_from([0.5, 1.0, 2, 8.0])
    return st.none() | st.fixed_dictionaries({}, optional={
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope",
                                      "yarn", None]),
        "factor": number, "short_factor": st.sampled_from([[1.0] * 8, [2.0, 1]]),
        "long_factor": st.sampled_from([[4.0] * 8, ["x"]]),
        "rope_theta": st.sampled_from([1, 1e4, 5e5, "far"]),
        "original_max_position_embeddings": st.sampled_from([64, 512, 0]),
        "low_freq_factor": number, "beta_fast": number, "mscale_all_dim": number,
        "attention_factor": number, "partial_rotary_factor": st.sampled_from([1.0, 0.5, 0.25])})


def fp8s() -> st.SearchStrategy[Any]:
    """`quantization_config`: none, FP8 of every form that is served, and what is not."""
    ignored = st.lists(st.sampled_from([
        "lm_head", "model.layers.1.mlp.down_proj", "self_attn", "model.layers.0", "in_proj_b",
        "mlp.experts.0", "shared_mlp", "q_proj", "mtp.layers.0.mlp.up_proj"]), max_size=3)
    plain = st.fixed_dictionaries(
        {"quant_method": st.just("fp8"), "modules_to_not_convert": ignored},
        optional={"weight_block_size": st.sampled_from([[128, 128], [64, 64]])})
    bits = {"num_bits": 8, "type": "float", "symmetric": True}
    compressed = st.builds(
        lambda strategy, names: {**COMPRESSED, "ignore": names, "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {**bits, "strategy": strategy},
            "input_activations": bits}}},
        st.sampled_from(["channel", "tensor", "group"]), ignored)
    return st.none() | st.none() | plain | compressed


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """What an unusual config says otherwise than a usual one."""
    fields: dict[str, Any] = draw(st.fixed_dictionaries({}, optional={
        "num_attention_heads": st.sampled_from([1, 3, 4, 6]),
        "num_key_value_heads": st.sampled_from([1, 2, 3, None]),
        "head_dim": st.sampled_from([2, 10, 15, 16, 80, None]),
        "hidden_size": st.sampled_from([48, 64, 160]),
        "intermediate_size": st.sampled_from([1, 33, 128]),
        "tie_word_embeddings": st.sampled_from([True, False, None]),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16", "int8", None]),
        "torch_dtype": st.sampled_from(["float16", None]),
        "sliding_window": st.sampled_from([None, 7, 48, 0]),
        "use_sliding_window": st.booleans(),
        "max_window_layers": st.sampled_from([0, 2, 9]),
        "sliding_window_pattern": st.sampled_from([1, 2, 3]),
        "full_attention_interval": st.sampled_from([1, 2]),
        "layer_types": st.none() | st.lists(KINDS, min_size=LAYERS - 1, max_size=LAYERS)
        | st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=LAYERS,
                   max_size=LAYERS),
        "attention_bias": st.booleans(), "mlp_bias": st.booleans(),
        "hidden_act": st.sampled_from(["silu", "swish", "gelu"]),
        "rope_scaling": ropes(),
        "rope_parameters": ropes() | st.fixed_dictionaries(
            {"full_attention": ropes(), "sliding_attention": ropes()}),
        "mtp_num_hidden_layers": st.sampled_from([0, 1, 3, "x"]),
        "num_nextn_predict_layers": st.sampled_from([0, 1]),
        "first_k_dense_replace": st.sampled_from([0, 1, 9, None]),
        "num_experts": st.sampled_from([0, 1, 4]),
        "q_lora_rank": st.sampled_from([None, 8, 130]),
        "position_embedding_type": st.sampled_from(["rope", "nope", "alibi"]),
        "max_position_embeddings": st.sampled_from([64, None]),
        "quantization_config": fp8s()}))
    # Few of them at once: most configs would else be refused.
    keep = draw(st.sets(st.sampled_from(sorted(fields)), max_size=3)) if fields else set()
    return {name: fields[name] for name in keep}


@st.composite
def raws(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of any family."""
    whole = {**SMALL, **draw(st.sampled_from(CONFIGS))}
    nested = whole.pop("text_config", None)
    whole = {**whole, **(nested or {}), **draw(fields())}
    if draw(st.integers(0, 3)) == 0:
        whole[draw(st.sampled_from(sorted(whole)))] = draw(WRONG)
    if nested is not None or draw(st.integers(0, 9)) == 0:
        outer = draw(st.sets(st.sampled_from(["dtype", "tie_word_embeddings",
                                              "quantization_config"])))
        outer |= {"architectures", "vision_config"}
        inner = {name: value for name, value in whole.items() if name not in outer}
        whole = {name: whole[name] for name in outer & set(whole)}
        whole["text_config"] = inner
    return whole


class Asked(NamedTuple):
    """How an engine is started."""

    quantization: str
    group: int
    head: str
    kv_dtype: str
    speculative: str
    rank: RankPlace = ALONE
    """That loads its part."""

    @property
    def flags(self) -> list[str]:
        made = ["--quantization-group", str(self.group), "--quantization-head", self.head]
        return ["--quantization", self.quantization, "--kv-cache-dtype", self.kv_dtype,
                "--speculative", self.speculative, "--checkpoints", "0",
                "--tp", str(self.rank.size),
                *(made if self.quantization in MADE_BITS else [])]

    def config(self, path: Path) -> Config:
        return Config(
            model=ModelConfig(
                model=str(path), load_format="dummy", quantization=self.quantization,
                quantization_group=self.group, quantization_head=self.head),
            memory=MemoryConfig(kv_cache_bytes=BUDGET, kv_cache_dtype=self.kv_dtype, checkpoints=0),
            scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32),
            device=DeviceConfig(device="cpu", threads=1),
            speculation=SpeculationConfig(speculative=self.speculative))


places = st.sampled_from([1, 1, 1, 2, 3, 4]).flatmap(
    lambda size: st.builds(RankPlace, st.integers(0, size - 1), st.just(size)))
asked = st.builds(Asked, st.sampled_from(["auto", "auto", "none", "fp8", "int8", "int4"]),
                  st.sampled_from([32, 64, 128]), st.sampled_from(["auto", "none", "int4"]),
                  st.sampled_from(["auto", "fp8_e4m3", "int8"]), st.sampled_from(["off", "mtp:2"]),
                  places)


class Unheard(LoneRank):
    """A rank of a group: to load its part of a model it need not be heard of by the others."""

    def __init__(self, place: RankPlace) -> None:
        super().__init__()
        self.place = place


@contextlib.contextmanager
def recorded() -> Iterator[tuple[list[WeightTensors], list[Any]]]:
    """The tensors that the loader gives to models, and the products of those in 4 to 8 bits; FP8
    stays so as on a device that multiplies in FP8."""
    drawn: list[WeightTensors] = []
    built: list[Any] = []
    load = registry.random_tensors

    def kept(*args: Any) -> WeightTensors:
        drawn.append(load(*args))
        return drawn[-1]

    def noted(kind: Any) -> Any:
        begin = kind.__init__

        def begun(own: Any, *args: Any) -> None:
            begin(own, *args)
            built.append(own)

        return patch.object(kind, "__init__", begun)

    with patch.object(registry, "random_tensors", lambda *args: copied(kept(*args), drawn)), \
            patch.object(registry, "keeps", lambda _device, _kernels, asked: asked != "none"), \
            noted(ScaledLinear), noted(GroupedLinear), noted(NativeGrouped):
        yield drawn, built


def copied(tensors: WeightTensors, drawn: list[WeightTensors]) -> WeightTensors:
    """The dict that the model takes them out of is the second that is recorded."""
    drawn.append(dict(tensors))
    return drawn[-1]


def held(one: ScaledLinear | GroupedLinear | NativeGrouped) -> int:
    """Bytes of a weight; in 4 to 8 bits those that kernels lay out, also where there are none."""
    if isinstance(one, ScaledLinear):
        return one.weight.numel() + one.scaled.scales.nbytes
    if isinstance(one, NativeGrouped):
        return one.held.numel()
    return sum(layout_bytes(one.own.format, one.outs, one.ins))


def loaded(path: Path, own: Asked) -> dict[str, Any] | str:
    """What a worker holds that loads this model; or its words."""
    config = own.config(path)
    try:
        shape = read_shape(path, config).split(own.rank.size)
        max_drafts(config, shape)
        assume(weight_bytes(replace(shape, fp8=None)) < LOADED)
        with recorded() as (drawn, made):
            model = registry.load_model(path, config, CPU, lambda *_: None, Unheard(own.rank))
    except ActoriumError as e:
        return str(e)
    tensors, left = drawn
    assert left == {}, "each tensor has its place in the model"
    shape, drafts = model.shape, max_drafts(config, model.shape)
    whole = [materialised(tensor) for tensor in tensors.values()]
    dense = sum(tensor.nbytes for tensor in whole if not (is_packed(tensor) or is_grouped(tensor)))
    scaled = sum(held(one) for one in made)
    pages = kv_dtype(own.kv_dtype, model.dtype)
    pools = make_pools(shape, [3] * len(shape.groups), 16, pages, CPU)
    draft = make_draft_pool(shape, 3, 16, pages, CPU)
    states = StatePool(shape.state, len(shape.recurrent), 3, 0, TORCH_DTYPES["float32"],
                       model.dtype, CPU, drafts) if shape.state else None
    return {
        "pools": [(group.window, len(group.layers), pool.bytes // 3)
                  for group, pool in zip(shape.groups, pools, strict=True)]
        + ([(0, 1, draft.bytes // 3)] if draft else []),
        "states": states.bytes if states else 0, "drafts": drafts, "weights": dense + scaled,
        "dtype": str(model.dtype).removeprefix("torch."), "longest": shape.max_model_len}


def foretold(path: Path, own: Asked) -> dict[str, Any] | str:
    """The same, as the command says it. Its budget is large enough for whatever is drawn."""
    plan = planned(path, *own.flags, "--memory", "1GiB")
    if isinstance(plan, str):
        return plan
    row = plan["states"]
    return {
        "pools": [(pool["window"], pool["layers"], pool["page_bytes"]) for pool in plan["pools"]],
        "states": 2 * (row["state"] + row["columns"] + row["window"]), "drafts": plan["drafts"],
        "weights": plan["outside"][0]["bytes"], "dtype": plan["weights_dtype"],
        "longest": plan["max_model_len"]}


def test_every_family_is_drawn() -> None:
    assert {config["architectures"][0] for config in CONFIGS} == set(ARCHITECTURES)


@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(raws(), asked)
def test_both_hold_the_same_or_refuse_with_the_same_words(raw: dict[str, Any], own: Asked) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(raw))
        worker, plan = loaded(path, own), foretold(path, own)
        assert plan == worker
        if isinstance(worker, str):
            event("refused")
            return
        event("served")
        shape = read_shape(path, own.config(path))
        dense = replace(shape, fp8=None)
        half = [weight_bytes(s.split(2)) for s in (dense, shape)] \
            if shape.heads % 2 == 0 and not shape.recurrent else []
        for part, whole in zip(half, map(weight_bytes, (dense, shape)), strict=False):
            assert whole <= 2 * part and part <= whole
