"""The tables of architectures, and what of a file is refused since nothing would be made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers_gguf import ARCHITECTURES, NAMED_AS, own_cache, write_model
from helpers_models import load

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_config import gguf_config
from actorium.actors.models.gguf_families import FAMILIES, VARIANTS
from actorium.actors.models.gguf_file import TYPES, GgufTensor, read_gguf
from actorium.actors.models.gguf_tensors import GgufPart, checkpoint_tensors
from actorium.actors.models.model_dir import resolve
from actorium.gpu.families.architectures import ARCHITECTURES as SERVED

__all__ = ["own_cache"]
SIZES: dict[str, Any] = {"num_hidden_layers": 1}


def test_names_are_the_packages_and_those_of_served_classes() -> None:
    assert set(FAMILIES) - set(NAMED_AS) <= set(gguf.MODEL_ARCH_NAMES.values())
    variants = (own for _, own in VARIANTS.values())
    assert {own.architecture for own in (*FAMILIES.values(), *variants)} <= set(SERVED)


@pytest.mark.parametrize("at", FAMILIES)
def test_every_tensor_that_the_package_knows_of_an_architecture_has_a_name(at: str) -> None:
    """But for those of layers that draft, and what only other sizes of the architecture have."""
    others = {"deepseek2": {"attn_k", "attn_v"}, "hunyuan-moe": {"rope_freqs"}, "mpt": {"ffn"}}
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[NAMED_AS.get(at, at)]
    known = {gguf.TENSOR_NAMES[own].removeprefix("blk.{bid}.")
             for own in gguf.MODEL_TENSORS[number]
             if gguf.TENSOR_NAMES[own].startswith("blk.{bid}.")}
    own, more = FAMILIES[at], VARIANTS.get(at, (None, FAMILIES[at]))[1]
    served = {name.removesuffix(".weight").removesuffix(".bias") for each in (own, more)
              for name in (*each.layer, *each.experts, *each.by_head)}
    left = {name for name in known - served - others.get(at, set())
            if not name.startswith("nextn") and name != "attn_rot_embd"}
    # What a class without experts has, and one with them.
    assert not left - {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}


def changed(path: Path, architecture: str, change: Callable[[gguf.GGUFWriter], None],
            **options: Any) -> str:
    """Why a file to which something was added is refused."""
    write_model(path, architecture, "F32", more=change, **SIZES, **options)
    with pytest.raises(BadModel) as caught:
        load(resolve(str(path)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "shape"), [
    ("blk.0.attn_sinks.weight", (4,)), ("blk.0.attn_q.scale", (1,)), ("output.bias", (199,)),
    ("blk.0.ffn_gate_exps.bias", (2, 8))])
def test_tensors_of_which_nothing_would_be_made(name: str, shape: tuple[int, ...],
                                                tmp_path: Path) -> None:
    assert name in changed(tmp_path / "m.gguf", "LlamaForCausalLM", lambda writer: (
        writer.add_tensor(name, np.zeros(shape, np.float32))))


def test_biases_that_the_class_has_not(tmp_path: Path) -> None:
    """Llama has those of queries, keys and values only with that of what attention gives."""
    why = changed(tmp_path / "m.gguf", "LlamaForCausalLM", lambda writer: (
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))))
    assert "blk.0.attn_q.bias" in why


def test_keys_that_ask_for_more_than_is_served(tmp_path: Path) -> None:
    assert "mistral3.attention.temperature_scale: is served with a rope of type yarn" in changed(
        tmp_path / "m.gguf", "MistralForCausalLM",
        lambda writer: writer.add_float32("mistral3.attention.temperature_scale", 0.1))
    assert "hunyuan-moe.expert_feed_forward_length: must be" in changed(
        tmp_path / "m.gguf", "HunYuanMoEV1ForCausalLM",
        lambda writer: writer.add_expert_feed_forward_length(8), num_experts=4, moe_topk=[2])
    assert "qwen2.rope.dimension_count" in changed(
        tmp_path / "m.gguf", "Qwen2ForCausalLM", lambda writer: writer.add_rope_dimension_count(8))


def test_experts_that_are_scored_otherwise(tmp_path: Path) -> None:
    def other(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("deepseek2.expert_gating_func")
        writer.add_uint32("deepseek2.expert_gating_func", 4)

    assert "deepseek2.expert_gating_func: must be 1 (softmax) or 2 (sigmoid), got 4" in changed(
        tmp_path / "m.gguf", "DeepseekV3ForCausalLM", other, num_key_value_heads=4, head_dim=8,
        qk_rope_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2)


GEMMA4: dict[str, Any] = {
    "sliding_window": 24, "num_hidden_layers": 4, "global_head_dim": 32, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199}


@pytest.mark.parametrize(("key", "value", "why"), [
    ("attention.head_count_kv", [2, 1, 2, 2], "layers with full_attention that differ in it"),
    ("attention.head_count_kv", [2, 1, 1, 1], "layers with sliding_attention that differ in it"),
    ("attention.head_count_kv", [2, 1], "tells of 2 layers, not 4"),
    ("feed_forward_length", [96, 96, 96, 192], "must be one width, and perhaps twice that of the "
     "last 2 layers"),
    ("feed_forward_length", [96, 96, 192], "must be one width"),
    ("attention.sliding_window_pattern", [True] * 4, "the last layer must have full attention"),
    ("attention.sliding_window", 0, "must be there"),
    ("attention.value_length_swa", 8, "must be gemma4.attention.key_length_swa, 16"),
    ("rope.dimension_count_swa", 8, "must be gemma4.attention.key_length_swa, 16")])
def test_layers_of_gemma_4_that_are_not_served(key: str, value: int | list[int], why: str,
                                               tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"gemma4.{key}")
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"gemma4.{key}", value)

    write_model(tmp_path / "m.gguf", "Gemma4ForCausalLM", "F32", more=more, **GEMMA4)
    with pytest.raises(BadModel, match=f"gemma4.{key}: {why}"):
        resolve(str(tmp_path / "m.gguf"))


def test_streams_of_gemma_3n_lie_in_one_tensor(tmp_path: Path) -> None:
    options = {name: own for name, own in GEMMA4.items() if name != "global_head_dim"}
    write_model(tmp_path / "m.gguf", "Gemma3nForCausalLM", "F32", **options, laurel_rank=8,
                activation_sparsity_pattern=[0.95, 0.0, 0.5, 0.0])
    file = read_gguf(tmp_path / "m.gguf")
    names = {part.name for part in checkpoint_tensors(file)}
    assert {f"model.altup_projections.{i}.weight" for i in range(3)} < names
    found = gguf_config(file)
    assert found["activation_sparsity_pattern"] == [0.95, 0.0, 0.5, 0.0]
    assert (found["laurel_rank"], found["num_kv_shared_layers"]) == (8, 2)
    own = file.tensors["altup_proj.weight"]
    file.tensors["altup_proj.weight"] = own._replace(shape=(192, 64))
    with pytest.raises(BadModel, match="tensor altup_proj.weight: must have three dimensions"):
        list(checkpoint_tensors(file))


def test_value_heads_that_are_not_those_of_the_key_heads(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("qwen35.ssm.group_count")
        writer.add_ssm_group_count(3)

    options = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    write_model(tmp_path / "m.gguf", "Qwen3_5ForCausalLM", "F32", more=more, **options)
    with pytest.raises(BadModel, match="qwen35.ssm.time_step_rank: 4 value heads are not those"):
        resolve(str(tmp_path / "m.gguf"))


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    """They are counted with the others, and come last."""
    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("glm4.block_count")
        writer.add_block_count(2)
        writer.add_uint32("glm4.nextn_predict_layers", 1)
        writer.add_tensor("blk.1.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))

    path = tmp_path / "m.gguf"
    write_model(path, "Glm4ForCausalLM", "F32", more=more, **SIZES)
    file = read_gguf(path)
    assert gguf_config(file)["num_hidden_layers"] == 1
    assert not any("layers.1" in part.name for part in checkpoint_tensors(file))
    load(resolve(str(path)))


def test_nemotron_drafts_by_two_blocks(tmp_path: Path) -> None:
    """Which the file has in one: attention, and experts."""
    own = {"nextn.eh_proj": (64, 128), "nextn.enorm": (64,), "nextn.hnorm": (64,),
           "nextn.shared_head_norm": (64,), "attn_norm": (64,), "post_attention_norm": (64,),
           "attn_q": (64, 64), "attn_output": (64, 64), "ffn_gate_inp": (4, 64),
           "ffn_up_exps": (4, 32, 64), "ffn_down_shexp": (64, 32)}

    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("nemotron_h_moe.block_count")
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        for name, shape in own.items():
            writer.add_tensor(f"blk.3.{name}.weight", np.zeros(shape, np.float32))

    path = tmp_path / "m.gguf"
    write_model(path, "NemotronHForCausalLM", "F32", more=more, n_routed_experts=4,
                layers_block_type=["mamba", "moe", "attention"], mamba_num_heads=8,
                mamba_head_dim=16, n_groups=2, num_experts_per_tok=2, n_group=1, topk_group=1,
                moe_intermediate_size=32, moe_shared_expert_intermediate_size=32)
    assert gguf_config(read_gguf(path))["num_nextn_predict_layers"] == 1
    first, second = (f"mtp.layers.{i}." for i in (0, 1))
    assert {part.name.removesuffix(".weight") for part in checkpoint_tensors(read_gguf(path))
            if part.name.startswith("mtp.")} == {
        f"{first}eh_proj", f"{first}enorm", f"{first}hnorm", f"{first}norm",
        f"{first}mixer.q_proj", f"{first}mixer.o_proj", f"{second}norm",
        f"{second}final_layernorm", f"{second}mixer.gate",
        *(f"{second}mixer.experts.{i}.up_proj" for i in range(4)),
        f"{second}mixer.shared_experts.down_proj"}


def test_phi3s_factors_are_tensors(tmp_path: Path) -> None:
    path, short, long = tmp_path / "m.gguf", [1.0, 1.25], [2.0, 2.5]
    write_model(path, "Phi3ForCausalLM", "F32", num_hidden_layers=1, more=lambda writer: (
        writer.add_rope_scaling_attn_factors(1.125)), rope_parameters={
            "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.25,
            "short_factor": short, "long_factor": long}, original_max_position_embeddings=256)
    found = gguf_config(read_gguf(path))
    assert found["rope_scaling"] == {"rope_type": "longrope", "short_factor": short,
                                     "long_factor": long, "attention_factor": 1.125}
    assert found["original_max_position_embeddings"] == 256
    assert found["partial_rotary_factor"] == 0.25


def test_experts_gates_and_ups_in_one_tensor(tmp_path: Path) -> None:
    """As newer files have them, of any architecture."""
    options: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32}
    apart, joined = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_model(apart, "Qwen3MoeForCausalLM", "Q8_0", **SIZES, **options)
    reader = gguf.GGUFReader(str(apart))
    tensors = {own.name: own for own in reader.tensors}
    gate, up = (tensors.pop(f"blk.0.ffn_{own}_exps.weight") for own in ("gate", "up"))
    writer = gguf.GGUFWriter(str(joined), "qwen3moe")
    for field in reader.fields.values():
        if field.name.startswith("qwen3moe."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for name, own in tensors.items():
        writer.add_tensor(name, own.data, raw_dtype=own.tensor_type)
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", np.concatenate([gate.data, up.data], 1),
                      raw_dtype=gate.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = [{part.name: part.shape for part in checkpoint_tensors(read_gguf(path))}
             for path in (apart, joined)]
    assert names[0] == names[1]


@pytest.mark.parametrize("shape", [(64,), (1, 64)])
def test_the_gate_of_a_shared_expert_is_a_row_however_it_is_stored(shape: tuple[int, ...],
                                                                  tmp_path: Path) -> None:
    """llama.cpp's converters have written it both ways."""
    stored = GgufTensor("blk.0.ffn_gate_inp_shexp.weight", TYPES[0], shape, tmp_path, 0, 256)
    assert GgufPart("model.layers.0.mlp.shared_expert_gate.weight", stored,
                    change="row").shape == (1, 64)


def test_llama4_without_chunks(tmp_path: Path) -> None:
    """Where the window is 0: all layers rotate, and attend to everything."""
    path = tmp_path / "m.gguf"
    options = {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 1, "num_local_experts": 4}
    write_model(path, "Llama4ForCausalLM", "F32", **options, **SIZES,
                more=lambda writer: writer.add_sliding_window(0))
    found = gguf_config(read_gguf(path))
    assert found["attention_chunk_size"] is None and found["no_rope_layers"] == [1]
    assert found["attn_temperature_tuning"] is False and found["use_qk_norm"] is True


def test_a_model_of_baichuan_with_alibi(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "LlamaForCausalLM", "F32", at="baichuan", num_hidden_layers=40)
    with pytest.raises(BadModel, match="baichuan.block_count: the model of 40 layers has ALiBi"):
        gguf_config(read_gguf(path))


def test_experts_of_jamba_in_layers_that_keep_no_period(tmp_path: Path) -> None:
    """Its config can only say every how many layers attend."""
    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("jamba.attention.head_count_kv")
        writer.add_head_count_kv([2, 2, 0, 2])

    path = tmp_path / "m.gguf"
    write_model(path, "JambaForCausalLM", "F32", more=more, num_hidden_layers=4, num_experts=1,
                attn_layer_period=2, attn_layer_offset=1)
    with pytest.raises(BadModel, match="jamba.attention.head_count_kv: layers .0, 1, 3. are not"):
        gguf_config(read_gguf(path))


@pytest.mark.parametrize("number", [0.25, 1.0])
def test_activations_of_apertus_that_are_not_the_class_s(number: float, tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("xielu.beta")
        writer.add_array("xielu.beta", [number])

    assert "xielu.beta: must be 0.5 in each layer" in changed(
        tmp_path / "m.gguf", "ApertusForCausalLM", more)


def test_every_architecture_of_the_helper_is_served() -> None:
    assert set(ARCHITECTURES.values()) <= set(FAMILIES)
