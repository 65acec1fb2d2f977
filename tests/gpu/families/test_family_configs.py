"""What configs of single families mean: text parts, defaults, spellings, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import GROUPED, HERE, INDEXER, LATENT, SMALL
from helpers_models import Seq, Stepper, load, tiny_config, tiny_model, why_refused

from actorium.gpu.families.architectures import model_tensors, shape_from_config
from actorium.gpu.families.layer_shapes import QueryScaling, RopeShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.rotary import rope_tables

ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3,
        "original_max_position_embeddings": 8}


def shape(architecture: str, **fields: Any) -> ModelShape:
    return shape_from_config({**SMALL, **fields, "architectures": [architecture]}, HERE)


def logits(path: Path) -> torch.Tensor:
    seq = Seq([(7 * i) % 199 for i in range(30)])
    return Stepper(load(path), 16).step([(seq, 30)], every_row=True)


# --- Mistral 3 -----------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("architecture", "options"), [
    ("MistralForCausalLM", {"sliding_window": 9}),
    ("Ministral3ForCausalLM", {"rope_parameters": ROPE}),
    ("Mistral4ForCausalLM", {"rope_parameters": ROPE, **LATENT, "head_dim": 8,
                             "num_key_value_heads": 4})])
def test_the_text_part_of_mistral_3(tmp_path: Path, architecture: str, options: dict[str, Any],
                                    tied: bool) -> None:
    import transformers

    options = {**options, "tie_word_embeddings": tied}
    text = tiny_config(architecture, **options)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Mistral3Config(text_config=text.to_dict(), vision_config=vision,
                                         tie_word_embeddings=tied)
    whole: Any = transformers.Mistral3ForConditionalGeneration(config).eval()
    alone = tiny_model(architecture, **options)
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.lm_head.load_state_dict(alone.lm_head.state_dict())
    whole.save_pretrained(str(tmp_path / "whole"))
    alone.save_pretrained(str(tmp_path / "alone"))
    names = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert names["architectures"] == ["Mistral3ForConditionalGeneration"]
    assert torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "alone"))


def test_mistral_3_whose_config_says_of_ties_nothing_has_a_head() -> None:
    """As Mistral-Small-3.1's."""
    text = {**SMALL, "model_type": "mistral"}
    assert not shape("Mistral3ForConditionalGeneration", text_config=text).tied
    text["tie_word_embeddings"] = True
    assert shape("Mistral3ForConditionalGeneration", text_config=text).tied


def test_queries_are_scaled_where_any_position_has_them_scaled() -> None:
    grown = shape("Ministral3ForCausalLM", rope_parameters=ROPE)
    assert grown.query_scaling == QueryScaling(0.3, 8) and grown.query_table(2) == 1
    assert len(rope_tables(grown)) == 2
    short = replace(grown, max_model_len=8)
    assert short.query_table(2) is None and len(rope_tables(short)) == 1
    plain = {name: value for name, value in ROPE.items() if name != "llama_4_scaling_beta"}
    assert shape("Ministral3ForCausalLM", rope_parameters=plain).query_scaling is None


def test_ministral_3_without_a_rope_has_the_default_one() -> None:
    default = shape("Ministral3ForCausalLM")
    assert default.query_scaling == QueryScaling(0.1, 16_384)
    assert default.ropes == (RopeShape("yarn", 1e6, 16.0, 16_384, mscale=1.0, mscale_all_dim=1.0),)


# --- what configs leave out ----------------------------------------------------------------------

NEEDED: dict[str, dict[str, Any]] = {
    "Dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "DeepseekV2": {"num_experts_per_tok": 2}, "Glm4Moe": {"head_dim": 128}}
"""Fields without which transformers has no model either."""


@pytest.mark.parametrize("family", [
    "Olmoe", "GraniteMoeShared", "Ministral3", "Mistral4", "Glm4Moe", "MiniMaxM2", "Ernie4_5",
    "Ernie4_5_Moe", "HunYuanDenseV1", "HunYuanMoEV1", "Dots1", "FlexOlmo", "DeepseekV2",
    "DeepseekV32", "GlmMoeDsa", "Glm4MoeLite", "Llama4"])
def test_fields_left_out_are_as_in_transformers(family: str) -> None:
    import transformers

    fields = NEEDED.get(family, {})
    made = getattr(transformers, f"{family}ForCausalLM").config_class(**fields)
    name = {"architectures": [f"{family}ForCausalLM"]}
    assert shape_from_config({**fields, **name}, HERE) == shape_from_config(
        {**made.to_dict(), **name}, HERE)


def test_windows_of_dots1_begin_with_a_layer() -> None:
    fields = {**GROUPED, "sliding_window": 9, "max_window_layers": 3}
    assert shape("Dots1ForCausalLM", **fields).windows == (0, 0, 0, 9)


# --- indexers ------------------------------------------------------------------------------------

INDEXED = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_is_read_where_it_leaves_something_out(name: str) -> None:
    fields = {**SMALL, **LATENT, **INDEXER, "architectures": [name], "index_topk": 64}
    for longest, indexed in ((None, True), (65, True), (64, False), (9, False)):
        served = shape_from_config(fields, HERE, max_model_len=longest)
        assert (served.index is not None) == indexed
        assert any("indexer" in own.name for own in model_tensors(served)) == indexed
        assert served.max_model_len == (longest or 512)


@pytest.mark.parametrize(("fields", "shared"), [
    ({}, ()), ({"index_topk_freq": 0}, ()), ({"index_topk_freq": 2}, (2,)),
    ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (1, 2)),
    ({"index_topk_freq": 2, "index_topk_pattern": "FSSF"}, (1, 2)),
    ({"index_topk_pattern": "FSSF", "indexer_types": ["full", "full", "shared", "full"]}, (2,))])
def test_layers_of_glm_5_share_what_one_has_chosen(fields: dict[str, Any],
                                                   shared: tuple[int, ...]) -> None:
    import transformers

    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=4, **fields).indexer_types
    assert tuple(i for i, kind in enumerate(theirs) if kind == "shared") == shared
    own = shape(INDEXED[1], **LATENT, **INDEXER, num_hidden_layers=4, **fields)
    assert own.index is not None and own.index.shared == shared
    assert len([own for own in model_tensors(own) if own.name.endswith("indexer.wk.weight")]) \
        == 4 - len(shared)


@pytest.mark.parametrize(("fields", "named"), [
    ({"index_topk": "many"}, "index_topk"), ({"index_n_heads": 0}, "index_n_heads"),
    ({"index_head_dim": 6}, "index_head_dim"), ({"q_lora_rank": None}, "q_lora_rank"),
    ({"indexer_types": ["full"]}, "indexer_types"),
    ({"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
    ({"index_topk_pattern": "FSX"}, "index_topk_pattern"),
    ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_topk_freq"),
    ({"index_topk_freq": -1}, "index_topk_freq")])
def test_a_wrong_indexer_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    name = {"architectures": [INDEXED[1]]}
    why = why_refused(tmp_path, {**SMALL, **LATENT, **INDEXER, "num_hidden_layers": 3, **name,
                                 **fields})
    assert f"config.json: {named}: " in why


# --- other spellings -----------------------------------------------------------------------------

def test_glm_4_5_has_a_layer_that_drafts_unless_its_config_says_0() -> None:
    assert shape("Glm4MoeForCausalLM", **GROUPED).mtp_layers == 1
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        assert shape("Glm4MoeForCausalLM", **GROUPED, **{name: 0}).mtp_layers == 0


@pytest.mark.parametrize(("rotary", "share", "want"), [
    (8, None, 8), (None, None, 0), (16, None, 0), (8, 0.25, 4), (None, 0.5, 8)])
def test_minimax_names_what_it_rotates_in_two_ways(rotary: int | None, share: float | None,
                                                   want: int) -> None:
    fields = {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": rotary,
              "partial_rotary_factor": share}
    assert shape("MiniMaxM2ForCausalLM", **fields).rotary_dim == want


def test_alpha_of_hunyuan_means_a_larger_theta() -> None:
    """As Hunyuan-A13B's config has it, of old and of new."""
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    old = shape("HunYuanDenseV1ForCausalLM", rope_scaling=rope, rope_theta=10000.0)
    new = shape("HunYuanDenseV1ForCausalLM", rope_parameters={**rope, "rope_theta": 10000.0})
    assert old.ropes == new.ropes == (RopeShape(theta=10000.0 * 1000 ** (16 / 14)),)


# --- what is refused -----------------------------------------------------------------------------

HUNYUAN, MINIMAX = "HunYuanMoEV1ForCausalLM", "MiniMaxM2ForCausalLM"
DEEPSEEK, ERNIE, GLM = "DeepseekV2ForCausalLM", "Ernie4_5_MoeForCausalLM", "Glm4MoeForCausalLM"


@pytest.mark.parametrize(("architecture", "fields", "message"), [
    ("OlmoeForCausalLM", {"clip_qkv": -1}, "clip_qkv: must be a positive number, got -1"),
    ("OlmoeForCausalLM", {"num_experts": 4}, "num_experts_per_tok: 8 is more than 4 experts"),
    ("OlmoeForCausalLM", {"hidden_act": "relu"}, "hidden_act: only silu"),
    ("GraniteMoeSharedForCausalLM", {"shared_intermediate_size": -4}, "shared_intermediate_size"),
    ("Mistral3ForConditionalGeneration", {"text_config": 3}, "text_config: must be an object"),
    ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "llama"}},
     "text_config.model_type: must be one of mistral, ministral3, mistral4, got 'llama'"),
    ("Mistral4ForCausalLM", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
     "rope_parameters.partial_rotary_factor: must be 64 of 128 dimensions, got 0.25"),
    ("Ministral3ForCausalLM", {"rope_parameters": {
        "rope_type": "default", "llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings"),
    ("Ministral3ForCausalLM", {"rope_parameters": {**ROPE, "llama_4_scaling_beta": -1}},
     "rope_parameters.llama_4_scaling_beta: must be a positive number"),
    (GLM, {"n_group": 3}, "n_group: 3 groups of 128 experts"),
    (GLM, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("Dots1ForCausalLM", {}, "n_routed_experts: must be a positive integer, got None"),
    (MINIMAX, {"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported"),
    (MINIMAX, {"use_qk_norm": False}, "use_qk_norm: only True is supported, got False"),
    (MINIMAX, {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list: only 1 (full attention)"),
    (MINIMAX, {"rotary_dim": 7}, "partial_rotary_factor"),
    (ERNIE, {"use_bias": True}, "use_bias: only False is supported, got True"),
    (ERNIE, {"moe_k": 65}, "moe_k: 65 is more than 64 experts"),
    (ERNIE, {"moe_layer_end_index": "last"}, "moe_layer_end_index: must be an integer"),
    (ERNIE, {"moe_norm_min": 0}, "moe_norm_min: must be a positive number"),
    (HUNYUAN, {"moe_topk": [1, 1, 2, 2]}, "moe_topk: must be a positive integer, got [1, 1"),
    (HUNYUAN, {"use_cla": True}, "use_cla: only False is supported"),
    (HUNYUAN, {"num_shared_expert": [2, 2, 2, 2]}, "num_shared_expert: only 1 is supported"),
    (DEEPSEEK, {"topk_method": "noaux_tc"}, "topk_method: must be greedy or group_limited_greedy"),
    (DEEPSEEK, {"norm_topk_prob": True}, "norm_topk_prob: only False is supported, got True"),
    (DEEPSEEK, {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2},
     "n_group: must be a positive integer"),
    (DEEPSEEK, {}, "num_experts_per_tok: must be a positive integer, got None"),
    ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: must be 4 times"),
    ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "alpha": "x"}},
     "rope_scaling.alpha: must be a positive number"),
    ("HunYuanDenseV1ForCausalLM", {"rope_scaling": [1]}, "rope_scaling: must be an object"),
])
def test_fields_that_are_not_served_are_named(tmp_path: Path, architecture: str,
                                              fields: dict[str, Any], message: str) -> None:
    assert message in why_refused(tmp_path, {**SMALL, "architectures": [architecture], **fields})
