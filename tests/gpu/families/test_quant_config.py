"""What configs of AWQ, GPTQ and compressed-tensors say, and what is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_configs import SMALL
from helpers_speed import slowness
from helpers_stored import Kind
from helpers_tables import bnb_config, float_config, modelopt_config

from actorium.actors.errors import BadConfig, BadModel
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.fp8_config import fp8_shape
from actorium.gpu.families.module_patterns import MAX_PATTERN, parse_pattern
from actorium.gpu.families.quant_config import stored_weights
from actorium.gpu.families.stored_weights import StoredWeight, StoredWeights
from actorium.gpu.families.tensor_specs import Projection, TensorSpec
from actorium.gpu.families.weight_formats import WeightFormat

WHERE = Path("config.json")
Q, GATE, HEAD = "model.layers.1.self_attn.q_proj", "model.layers.12.mlp.gate_proj", "lm_head"


def read(found: dict[str, Any]) -> StoredWeights:
    own = stored_weights({"quantization_config": found}, WHERE)
    assert own is not None
    return own


def groups(*own: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), form: str = "",
           **fields: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    return {**Kind("pack-quantized").config, "ignore": list(ignore), **fields,
            "format": form or "pack-quantized",
            "config_groups": {f"group_{i}": each for i, each in enumerate(own)}}


AS_STORED = {"awq": {"quantization_config": Kind("awq").config},
             "gptq": {"quantization_config": Kind("gptq").config},
             "bitsandbytes": {"quantization_config": bnb_config(load_in_8bit=True)},
             "modelopt": {"quantization_config": modelopt_config()},
             "compressed-tensors": {"quantization_config": Kind("int-quantized", 8, -1,
                                                               True).config},
             **{name: {"quantization_config": Kind(name).config}
                for name in ("torchao", "hqq", "auto-round")},
             "gguf": {"gguf": {"file": "a.gguf", "default": "Q4_1", "modules": {}}}, "plain": {}}


@pytest.mark.parametrize("found", AS_STORED)
@pytest.mark.parametrize("asked", [name for name in AS_STORED if name != "plain"])
def test_how_a_checkpoint_must_be_stored(asked: str, found: str) -> None:
    """What is asked for is what the checkpoint has, and then as without asking; or it is refused:
    an unquantised one is not served as if it were quantised."""
    raw = {**SMALL, "architectures": ["LlamaForCausalLM"], "intermediate_size": 128,
           **AS_STORED[found]}
    if asked == found:
        assert shape_from_config(raw, WHERE, quantization=asked) == shape_from_config(raw, WHERE)
        return
    held = "unquantised" if found == "plain" else f"in {found}"
    with pytest.raises(BadConfig, match=f"--quantization {asked}: .* has its weights {held}"):
        shape_from_config(raw, WHERE, quantization=asked)


def test_awq() -> None:
    own = read({**Kind("awq", group=128).config, "modules_to_not_convert": ["self_attn"]})
    assert own.of(GATE) == StoredWeight("awq", 4, 128, False)
    assert own.of(Q) is None and own.of(HEAD) is None
    assert own.of(GATE).held == WeightFormat(4, 128, True)


def test_gptq() -> None:
    found = Kind("gptq", 8, 256, True, True).config
    assert read(found).of(Q) == StoredWeight("gptq", 8, 256, True, True)
    assert read(found).of(Q).held == WeightFormat(8, 128, False)
    assert read(found).of(HEAD) is None and read({**found, "lm_head": True}).of(HEAD) is not None
    assert not read({**found, "static_groups": True}).of(Q).ordered
    some = read({**found, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert some.of(Q) is not None and some.of(GATE) is None and some.of(HEAD) is None
    rules = read({**found, "lm_head": True, "dynamic": {
        "-:.*self_attn.*": {}, "+:.*mlp\\.gate.*": {"bits": 4, "group_size": 32},
        "lm_head": {"sym": False, "desc_act": False}}})
    assert rules.of(Q) is None and rules.of(GATE) == StoredWeight("gptq", 4, 32, True, True)
    assert rules.of(HEAD) == StoredWeight("gptq", 8, 256, False)
    assert rules.of("model.layers.1.mlp.up_proj") == StoredWeight("gptq", 8, 256, True, True)
    v2 = read(Kind("gptq_v2", group=-1).config)
    assert v2.of(Q) == StoredWeight("gptq_v2", 4, 0, False)


def test_other_names_of_methods_and_fields() -> None:
    for method in ("awq", "gptq"):
        own = Kind(method, group=128).config
        assert read({**own, "quant_method": f"{method}_marlin"}) == read(own)
        older = {name: value for name, value in own.items() if name not in ("bits", "group_size")}
        assert read({**older, "w_bit": 4, "q_group_size": 128}) == read(own)
        with pytest.raises(BadModel, match="bits: must be 4"):
            read({**older, "w_bit": 3, "q_group_size": 128})
    wrong = {"quant_method": ["awq"]}
    with pytest.raises(BadModel, match="quant_method"):
        fp8_shape({"quantization_config": wrong}, WHERE)


def test_bitsandbytes() -> None:
    assert read(bnb_config(load_in_8bit=True)).of(Q) == StoredWeight("bnb-int8", 8, 0, True)
    for kind in ("nf4", "fp4"):
        own = read(bnb_config(load_in_4bit=True, bnb_4bit_quant_type=kind))
        assert own.of(Q) == StoredWeight(f"bnb-{kind}", 4, 64, True) and own.of(HEAD) is None
        assert own.of(Q).held == WeightFormat(8, 64, False)
    unsaid = {"load_in_4bit": True, "llm_int8_skip_modules": ["model.language_model.layers.1",
                                                               "gate_proj"]}
    own = read(unsaid)  # its first configs, whose codes are fp4 by default
    assert own.of(Q) is None and own.of(GATE) is None
    assert own.of("model.layers.11.self_attn.q_proj") == StoredWeight("bnb-fp4", 4, 64, True)


@pytest.mark.parametrize(("change", "field"), [
    ({}, "load_in_4bit"), ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit"),
    ({"load_in_8bit": 1}, "load_in_8bit"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
    ({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ({"load_in_8bit": True, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules")])
def test_what_bitsandbytes_does_not_serve(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadModel, match=rf"quantization_config\.{field}: "):
        read(bnb_config(**change))


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2,
                                                                  "_data": fields}}}


def grain(kind: str, **fields: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": fields}


def test_torchao() -> None:
    whole = "Int8WeightOnlyConfig"
    for found, group in ((None, 0), (grain("PerRow", dim=-1), 0), (grain("PerTensor"), 0),
                         ([grain("PerRow"), grain("PerGroup", group_size=64)], 64)):
        own = read(torchao(whole, granularity=found))
        assert own.of(Q) == StoredWeight("int-quantized", 8, group, True) and own.of(HEAD) is None
    few = read({**torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype={"_data": "int8"},
                          weight_granularity=grain("PerGroup", group_size=32)),
                "modules_to_not_convert": ["model.layers.12.mlp"],
                "include_input_output_embeddings": True})
    assert few.of(Q) == few.of(HEAD) == StoredWeight("int-quantized", 8, 32, True)
    assert few.of(GATE) is None
    two = Kind("torchao", 2).config["quant_type"]["default"]
    own = read(torchao("FqnToConfig", fqn_to_config={
        Q: None, "re:.*mlp\\..*": two, "_default": torchao(whole)["quant_type"]["default"]}))
    assert own.of(Q) is None and own.of(GATE) == StoredWeight("int-quantized", 2, 32, False)
    assert own.of(GATE).held == WeightFormat(4, 32, True)
    assert own.of("model.layers.3.self_attn.o_proj").bits == 8
    floats = torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[
        grain("PerBlock", block_size=[1, 128]), grain("PerBlock", block_size=[128, 128])])
    assert stored_weights({"quantization_config": floats}, WHERE) is None
    shape = fp8_shape({"quantization_config": floats}, WHERE)
    assert shape is not None and shape.block == 128 and not shape.covers(HEAD)


def test_hqq() -> None:
    own = read(Kind("hqq", 8, -1).config)
    assert own.of(Q) == StoredWeight("hqq", 8, 0, False) and own.of(HEAD) is None
    params = {"weight_quant_params": {"nbits": 3, "axis": 0, "group_size": 64}}
    own = read({"quant_method": "hqq", "quant_config": {"self_attn.q_proj": params,
                                                        "mlp.up_proj": None}})
    assert own.of(GATE) is None and own.of("model.layers.1.mlp.up_proj") is None
    assert own.of(Q) == StoredWeight("hqq", 3, 64, False, across=True)
    assert own.of(Q).held_of(256) is None  # dequantised, as are groups of 24
    assert StoredWeight("hqq", 3, 24, False).held_of(96) is None


def test_auto_round() -> None:
    base = {**Kind("auto-round").config, "block_name_to_quantize": "model.layers.1"}
    own = read({**base, "extra_config": {
        Q: {"bits": 8, "group_size": -1, "sym": True}, ".*gate_proj.*": {"bits": 16},
        "lm_head": {"bits": 4}}})
    assert own.of(Q) == StoredWeight("gptq", 8, 0, True) and own.of(GATE) is None
    assert own.of(HEAD) == own.of("model.layers.15.mlp.up_proj") == StoredWeight("gptq", 4, 32,
                                                                                False)
    assert own.of("model.layers.2.mlp.up_proj") is None and read(base).of(HEAD) is None
    for packing, layout in (("auto_round:auto_awq", "awq"), ("auto_round", "gptq_v2")):
        assert read({**base, "packing_format": packing}).of(Q).layout == layout


@pytest.mark.parametrize(("found", "words"), [
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"},
     "quant_type: must be an object"),
    (torchao("Int4WeightOnlyConfig", group_size=128), "'Int4WeightOnlyConfig' is not served"),
    (torchao("Int8StaticActivationInt8WeightConfig"), "is not served, of torchao's types are Int8"),
    (torchao("FqnToConfig", fqn_to_config={"_default": grain("Float8WeightOnlyConfig")}),
     "fqn_to_config._default: 'Float8WeightOnlyConfig' is not served"),
    (torchao("IntxWeightOnlyConfig", weight_dtype=grain("dtype", _data="uint4"),
             intx_packing_format={"_data": "OPAQUE_ATEN_AUTO"}), "intx_packing_format: must be"),
    (torchao("Int8WeightOnlyConfig", granularity=grain("PerAxis", axis=1)), "granularity: must be"),
    (torchao("Int8WeightOnlyConfig", granularity=grain("PerGroup", group_size=24)),
     "granularity.group_size: must be"),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 1.58, "axis": 1}}},
     "nbits: must be 1 or 2"),
    ({"quant_method": "hqq", "quant_config": {
        "weight_quant_params": {"nbits": 4, "axis": 1}, "zero_quant_params": {"nbits": 8}}},
     "zero_quant_params: must be null"),
    ({**Kind("auto-round").config, "packing_format": "auto_round:nv_fp"},
     "packing_format: must be"),
    ({**Kind("auto-round").config, "act_bits": 8}, "act_bits: must be 16, got 8"),
    ({**Kind("auto-round").config, "data_type": "mx_fp"}, "data_type: must be int"),
    ({**Kind("auto-round").config, "bits": 3}, "bits: must be 4 or 8, got 3"),
    ({**Kind("auto-round").config, "extra_config": {Q: {"bits": 2}}}, f"{Q}.bits: must be 4 or 8"),
    ({**Kind("auto-round").config, "rotation_config": {"a": 1}}, "rotation_config: is not"),
    ({**Kind("auto-round").config, "packing_format": "auto_round:auto_awq", "bits": 8},
     "bits: must be 4, got 8"),
])
def test_what_quantisers_do_not_serve(found: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        read(found)
    assert words in str(caught.value) and "config.json: quantization_config." in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(("fields", "words"), [
    ({"weight_dtype": {"_data": "float8_e5m2"}}, "weight_dtype: must be float8_e4m3fn"),
    ({"granularity": grain("PerGroup", group_size=32)}, "granularity: must be PerRow, PerTensor"),
    ({"granularity": grain("PerBlock", block_size=[64, 64])}, "granularity: must be PerRow"),
])
def test_what_torchao_does_not_serve_in_fp8(fields: dict[str, Any], words: str) -> None:
    found = {"quantization_config": torchao("Float8WeightOnlyConfig", **fields)}
    with pytest.raises(BadModel, match=words):
        fp8_shape(found, WHERE)


def test_numbers_in_e2m1() -> None:
    nv = read(float_config("nvfp4-pack-quantized"))
    assert nv.of(Q) == StoredWeight("nvfp4-pack-quantized", 4, 16, True) and nv.of(HEAD) is None
    assert nv.of(Q).held == WeightFormat(5, 16, False)
    mx = read(float_config("mxfp4-pack-quantized"))
    assert mx.of(Q).held == WeightFormat(5, 32, False)
    own = read(modelopt_config(ignore=["lm_head", "model.layers.12*", "*v_proj"]))
    assert own.of(Q) == StoredWeight("nvfp4", 4, 16, True)
    assert all(own.of(name) is None for name in (HEAD, GATE, "model.layers.1.self_attn.v_proj"))


@pytest.mark.parametrize(("found", "field"), [
    (float_config("nvfp4-pack-quantized", num_bits=8), "weights.num_bits"),
    (float_config("nvfp4-pack-quantized", group_size=32), "weights.group_size"),
    (float_config("mxfp4-pack-quantized", group_size=16), "weights.group_size"),
    (float_config("mxfp4-pack-quantized", symmetric=False), "weights.symmetric"),
    (modelopt_config(group_size=32), "group_size"), (modelopt_config(ignore="x"), "ignore"),
    (modelopt_config(quant_algo="W4A8_AWQ"), "quant_algo"),
    (modelopt_config(quant_algo=None), "quant_algo"),
    (modelopt_config(quant_algo="FP8", ignore=["a*b"]), "ignore")])
def test_what_is_not_served_in_floats(found: dict[str, Any], field: str) -> None:
    raw = {**SMALL, "architectures": ["LlamaForCausalLM"], "quantization_config": found}
    with pytest.raises(BadModel, match=field.replace(".", "\\.") + ": "):
        shape_from_config(raw, WHERE)


@pytest.mark.parametrize("method", [
    "torchao", "hqq", "mxfp4", "fbgemm_fp8", "eetq", "quanto", "aqlm", "vptq", "higgs", "spqr",
    "quark", "bitnet", "fp_quant", "sinq", "metal", "inc", "squeezellm", "marlin",
    "modelopt_mxfp8", "quip", "", None, 5, ["fp8"], {}])
@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_methods_that_are_not_served(method: Any, impl: str) -> None:
    """One line names the field, whatever else the config says."""
    raw = {**SMALL, "architectures": ["LlamaForCausalLM"], "quantization_config": {
        "quant_method": method, "bits": 4, "weight_bits": 4, "group_size": 32}}
    for asked in ("auto", "none", "int4", "fp8"):
        with pytest.raises((BadModel, BadConfig)) as caught:
            shape_from_config(raw, WHERE, quantization=asked, impl=impl)
        said = str(caught.value)
        assert "\n" not in said and len(said) < 300
        assert "quantization_config" in said or "quantization" in said and impl != "auto"


def test_compressed_tensors() -> None:
    own = read(Kind("int-quantized", 8, -1, True).config)
    assert own.of(Q) == StoredWeight("int-quantized", 8, 0, True) and own.of(HEAD) is None
    four, eight = Kind("pack-quantized"), Kind("int-quantized", 8, -1)
    own = read(groups(four.scheme("re:.*mlp\\..*"), eight.scheme(), form="mixed-precision",
                      ignore=("lm_head", "re:.*layers\\.(0|1)\\.mlp.*", "model.layers.3.mlp")))
    assert own.of(GATE) == StoredWeight("pack-quantized", 4, 32, False)
    assert own.of(Q) == StoredWeight("int-quantized", 8, 0, False)
    for left in (HEAD, "model.layers.0.mlp.up_proj", "model.layers.3.mlp.up_proj"):
        assert own.of(left) is None
    # A module's own name goes before a pattern, and that before Linear.
    own = read(groups(eight.scheme("Linear"), four.scheme("re:.*_proj$"), eight.scheme(Q),
                      form="mixed-precision"))
    assert own.of(Q).bits == 8 and own.of(GATE).bits == 4
    own = read(groups(four.scheme("re:.*down_proj$")))
    assert own.of(Q) is None and own.of("model.layers.0.mlp.down_proj") is not None


def test_names_of_models_with_images() -> None:
    own = read(groups(Kind("pack-quantized").scheme(), ignore=(
        "model.language_model.layers.0.mlp.up_proj", "re:model\\.language_model.*q_proj$",
        "re:.*visual.*", "re:language_model\\.lm_head")))
    assert own.of("model.layers.0.mlp.up_proj") is None and own.of(Q) is None
    assert own.of(HEAD) is None and own.of(GATE) is not None


def test_what_is_held() -> None:
    specs = [TensorSpec("model.embed_tokens.weight", (8, 64)),
             *(TensorSpec(f"{name}.weight", (8, 64), "", Projection(name)) for name in (Q, GATE)),
             TensorSpec("model.layers.1.mlp.gate.weight", (8, 64)),
             TensorSpec("lm_head.weight", (8, 64))]
    held = read(Kind("awq").config).held(specs)
    assert held.source == "awq" and held.default == WeightFormat(4, 32, True)
    assert held.modules == ((HEAD, None),)
    found = Kind("gptq", symmetric=True, ordered=True).config
    held = read({**found, "lm_head": True, "modules_to_not_convert": ["q_proj"]}).held(specs)
    form = WeightFormat(4, 32, False)
    assert held.modules == ((Q, None), (HEAD, form)) and held.default == form and held.ordered


GPTQ, AWQ, PACK = (Kind(name).config for name in ("gptq", "awq", "pack-quantized"))
SCHEME = Kind("pack-quantized").scheme()


def weights(**fields: Any) -> dict[str, Any]:
    return groups({**SCHEME, "weights": {**SCHEME["weights"], **fields}})


@pytest.mark.parametrize(("found", "words"), [
    ({**GPTQ, "bits": 3}, "bits: must be 4 or 8, got 3"), ({**GPTQ, "bits": 2}, "bits: must be"),
    ({**GPTQ, "bits": True}, "bits: must be"), ({**GPTQ, "group_size": 48}, "group_size: must be"),
    ({**GPTQ, "group_size": None}, "group_size: must be"), ({**GPTQ, "sym": "no"}, "sym: must be"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: must be gptq or gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, "checkpoint_format: must be gptq or gptq_v2"),
    ({**GPTQ, "dynamic": {".*mlp": 3}}, "dynamic: must be an object of at most 64 objects"),
    ({**GPTQ, "dynamic": {".*mlp": {"bits": 3}}}, "dynamic..*mlp.bits: must be 4 or 8, got 3"),
    ({**GPTQ, "dynamic": {"-:(?!mlp)": {}}}, "dynamic: patterns may have"),
    ({**GPTQ, "pack_dtype": "int64"}, "pack_dtype: must be int32"),
    ({**GPTQ, "modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize: must list names"),
    ({**AWQ, "bits": 8}, "bits: must be 4"), ({**AWQ, "version": "gemv"}, "version: only gemm"),
    ({**AWQ, "modules_to_not_convert": "x"}, "modules_to_not_convert: must list names"),
    ({**PACK, "quantization_status": "frozen"}, "quantization_status: must be compressed"),
    ({**PACK, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: is not"),
    ({**PACK, "transform_config": {"config_groups": {}}}, "transform_config: is not supported"),
    (groups(), "config_groups: must name groups"), (weights(num_bits=3), "num_bits: must be 4 or"),
    (weights(type="float"), "'group_0'.weights.type: must be int"),
    (weights(strategy="block"), "weights.strategy: must be tensor, channel or group"),
    (weights(group_size=24), "weights.group_size: must be -1"),
    (weights(actorder="x"), "weights.actorder: must be weight or group"),
    (groups({**SCHEME, "input_activations": {"type": "float", "num_bits": 8}}),
     "input_activations: must be null, or int with 8 bits"),
    (groups({**SCHEME, "input_activations": {"num_bits": 8, "symmetric": False}}),
     "input_activations.symmetric: static zero-points"),
    (groups({**SCHEME, "output_activations": {}}), "output_activations: must be null"),
    (groups({**SCHEME, "format": "marlin-24"}), "format: must be pack-quantized, int-quantized"),
    (groups(SCHEME, SCHEME), "targets: Linear is the target of another group"),
    (groups({**SCHEME, "targets": [3]}), "targets: must list names"),
    (groups({**SCHEME, "targets": ["re:(a+)+$"]}), "targets: patterns may have"),
    (groups(SCHEME, ignore=("re:x",) * 65), "ignore: lists more than 64 patterns"),
    (groups(SCHEME, ignore=("x",) * 100_001), "ignore: must list at most 100000 names"),
    ({**AWQ, "modules_to_not_convert": ["x"] * 10_001}, "convert: must list at most 10000 names"),
    (groups(SCHEME, ignore=("re:(?=x)y",)), "ignore: patterns may have"), (groups(SCHEME, form=""
     "mixed-precision", ignore=("x",)) | {"config_groups": {"a": 3}}, "'a': must be an object"),
])
def test_what_is_not_served(found: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        read(found)
    assert words in str(caught.value) and "config.json: quantization_config." in str(caught.value)
    assert "\n" not in str(caught.value)


STRANGE: list[Any] = [None, True, False, -1, 0, 4, 2**70, 1e308, float("nan"), "", "x", "re:",
                      "re:$", [], [[]], [None], ["re:.*"], {}, {"a": 1}, [{"a": []}]]


def everywhere(found: Any, change: Any) -> Iterator[Any]:
    """The object with each of its fields changed in turn, at any depth."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield {**found, key: change}
            yield {k: v for k, v in found.items() if k != key}
            for inner in everywhere(value, change):
                yield {**found, key: inner}
    elif isinstance(found, list):
        for i, value in enumerate(found):
            for inner in (change, *everywhere(value, change)):
                yield [*found[:i], inner, *found[i + 1:]]


@pytest.mark.parametrize("kind", [Kind("awq"), Kind("gptq", ordered=True), Kind("pack-quantized"),
                                  Kind("int-quantized", 8, -1), Kind("torchao"), Kind("hqq"),
                                  Kind("auto-round")])
def test_whatever_a_config_says(kind: Kind) -> None:
    """It is read, or refused in one line."""
    specs = [TensorSpec(f"{Q}.weight", (8, 64), "", Projection("q")), TensorSpec(f"{HEAD}.weight",
                                                                                 (8, 64))]
    outcomes = {True: 0, False: 0}
    for change in STRANGE:
        for found in everywhere(kind.config, change):
            try:
                own = stored_weights({"quantization_config": found}, WHERE)
                assert own is None or own.held(specs).source == own.source
                outcomes[True] += 1
            except BadModel as e:
                outcomes[False] += 1
                assert "\n" not in str(e) and len(str(e)) < 400
    assert min(outcomes.values()) > 10


PATTERNS = [".*", ".*down_proj$", "^model\\.layers\\.[0-5]\\.mlp", ".*layers.(1[0-9]|2[0-3]).*",
            "lm_head", ".*(q|k|v)_proj", "model\\.layers\\.\\d+\\.self_attn.*", ".+_head$",
            "a|lm.*", "(?:model\\.)?layers", ".*mlp\\.experts\\.\\d+\\.(gate|up)_proj$", "[a-z_]+$",
            ".*x?_proj", ".*\\.1\\..*proj", "model.layers.1.", ".*[qkv]_pro.$"]
NAMES = [Q, GATE, HEAD, "model.layers.15.mlp.down_proj", "layers", "model.layers.3.mlp.experts.7"
         ".up_proj", "model.visual.blocks.1.proj", "", "a", "model.layers.1.self_attn.v_proj"]


@pytest.mark.parametrize("text", PATTERNS)
def test_patterns_mean_what_they_do_elsewhere(text: str) -> None:
    found = parse_pattern(text)
    assert found is not None
    assert [found.matches(name) for name in NAMES] == [
        re.match(text, name) is not None for name in NAMES]


def test_patterns_that_are_not_read() -> None:
    for text in ("", "(a+)+", "(a|b)*", "a{3}", "(?=a)b", "(a", "a)", "[^a]", "a**", "\\1", "*a",
                 "a" * (MAX_PATTERN + 1), "a\\", "$"):
        assert parse_pattern(text) is None, text


def test_no_pattern_takes_long() -> None:
    """What would take a regular expression longer than the universe."""
    text = ".*" * 60 + "(a?" * 60 + ")?" * 60 + ".*" * 30 + "b$"
    pattern = parse_pattern(text[:MAX_PATTERN - 2] if len(text) > MAX_PATTERN else text)
    start = time.thread_time()
    assert pattern is None or not pattern.matches("a" * 500)
    pattern = parse_pattern(".*a" * 130 + "$")
    assert pattern is not None and not pattern.matches("a" * 499 + "c")
    assert time.thread_time() - start < 2 * slowness()
