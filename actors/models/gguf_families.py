"""The architectures of GGUF files by llama.cpp's names for them (`general.architecture`): which
class of config.json each is, what its keys are called there, and what its tensors are called in a
checkpoint of that class. Data alone, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from actorium.actors.errors import shown
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_keys import (
    CAPS,
    DEEPSEEK_KEYS,
    DELTA_EXPERTS,
    DELTA_KEYS,
    ERNIE_KEYS,
    GPT_OSS_KEYS,
    GRANITE_KEYS,
    GROUPED_KEYS,
    HUNYUAN_KEYS,
    HYBRID_KEYS,
    LFM_KEYS,
    LOCAL_EXPERTS,
    LOGIT_SCALE,
    QWEN_EXPERTS,
    RMS,
    Config,
    Key,
    cohere2_fields,
    cohere_fields,
    deepseek_fields,
    dots1_fields,
    ernie_fields,
    exaone4_fields,
    gemma_fields,
    glm4moe_fields,
    glm_fields,
    gpt_oss_fields,
    granite_fields,
    granite_hybrid_fields,
    granite_moe_fields,
    hunyuan_moe_fields,
    layer_norm_epsilon,
    lfm2_fields,
    minimax_fields,
    mistral3_fields,
    olmo_fields,
    olmoe_fields,
    phi3_fields,
    qwen2moe_fields,
    qwen3moe_fields,
    qwen3next_fields,
    qwen35_fields,
    seed_oss_fields,
    starcoder2_fields,
)

ALL_ROWS, BEHIND_KEYS, ONE_EACH, COLUMNS = "all", "behind_keys", "one_each", "columns"
"""Where value heads lie: in all rows; behind those of queries and keys; a row each."""
LATENT, JOINED = "latent", "joined"
"""Changes that make one tensor of two: what expands latents to keys and to values; gate and up."""
SECOND = {"attn_k_b": "attn_v_b", "ffn_gate": "ffn_up", "ffn_gate_shexp": "ffn_up_shexp"}
"""The first of these two, and the other."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside of layers."""
Name = str | tuple[str, ...]
"""What a tensor is called in a checkpoint; or, one behind the other, its rows'."""
More = Callable[[GgufFile, str, Config], Config]
"""(file, architecture, config so far) -> further fields."""


class GgufFamily(NamedTuple):
    """An architecture."""

    architecture: str
    """Class name in config.json."""
    layer: dict[str, Name]
    """Modules of a layer, or whole names of tensors."""
    keys: tuple[Key, ...] = ()
    experts: dict[str, Name] = {}
    """Modules of all of a layer's experts; "{}" is the expert's number."""
    changes: dict[str, str] = {}
    """What is done to tensors of a layer to make those of a checkpoint; see `CHANGES` of
    `gpu/weights/gguf_reader.py`."""
    more: More | None = None
    permuted: bool = False
    """Rows of queries and keys lie in pairs, as llama.cpp rotates them for Llama."""
    norm_plus_one: bool = False
    """The 1 that norms add lies in their weights."""
    partial: bool = False
    """A part of each head may be rotated alone."""
    latent: bool = False
    """Attention over latents: heads have other sizes."""
    outer: dict[str, str] = OUTER
    epsilon: Key = RMS
    """That of its norms."""
    tiled: dict[str, str] = {}
    """Tensors of a layer in which the value heads of a key head do not lie together: its first one
    lies behind the first one of the key head before; which rows they are, or COLUMNS."""


NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""What the config is read from."""
COMPUTED = ("attn_rot_embd", "attn_rot_embd.weight", "rope_freqs.weight")
"""Of a layer: what a config says, too."""
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""In one tensor: rows of queries, keys and values."""
ATTENTION: dict[str, Name] = {
    "attn_q": QKV[0], "attn_k": QKV[1], "attn_v": QKV[2], "attn_qkv": QKV,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}
MLP: dict[str, Name] = {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GATE_UP: dict[str, Name] = {"ffn_up": ("mlp.gate_proj", "mlp.up_proj")}
"""Of MLPs whose gate and up are one tensor."""
BEFORE: dict[str, Name] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LAYER: dict[str, Name] = {**BEFORE, **ATTENTION, **MLP}
AFTER_LAYER: dict[str, Name] = {
    **ATTENTION, **MLP, "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm"}
"""Norms of what attention and MLP give alone."""
GEMMA_LAYER: dict[str, Name] = {
    **AFTER_LAYER, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
GLM_LAYER: dict[str, Name] = {
    **LAYER, **GATE_UP, "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm"}
QWEN_MOE_LAYER: dict[str, Name] = {**LAYER, "ffn_gate_inp": "mlp.gate"}
SHARED = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
QWEN2_MOE_LAYER: dict[str, Name] = {
    **QWEN_MOE_LAYER, **{name: f"mlp.shared_expert.{own}" for name, own in SHARED.items()},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
NEXT_LAYER: dict[str, Name] = {
    **QWEN2_MOE_LAYER, "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log"}
DELTA_LAYER: dict[str, Name] = {
    **NEXT_LAYER, "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
TILED = {"attn_qkv.weight": BEHIND_KEYS, "ssm_conv1d.weight": BEHIND_KEYS,
         "attn_gate.weight": ALL_ROWS, "ssm_beta.weight": ONE_EACH, "ssm_alpha.weight": ONE_EACH,
         "ssm_a": ONE_EACH, "ssm_dt.bias": ONE_EACH, "ssm_out.weight": COLUMNS}
"""Tensors of Qwen3.5's recurrent layers."""
HYBRID_LAYER: dict[str, Name] = {
    **BEFORE, **ATTENTION, "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj", "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{own}{end}": f"shared_mlp.{name}" for end in ("", "_shexp")
       for own, name in (("gate", "input_linear"), ("up", "input_linear"),
                         ("down", "output_linear"))}}
FUSED = {"in_proj_ba": ("in_proj_b", "in_proj_a"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z")}
"""Modules of checkpoints of Qwen3-Next that are loaded as two."""
RECURRENT = {"ssm_a": "log_negated", "ssm_d": "flat", "ssm_norm.weight": "flat",
             "ssm_conv1d.weight": "convolution"}
"""Changes of recurrent layers' tensors."""
DEEPSEEK_LAYER: dict[str, Name] = {
    **BEFORE, **MLP, **{name: f"mlp.shared_experts.{own}" for name, own in SHARED.items()},
    "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


GROUPED_LAYER: dict[str, Name] = {
    **QWEN_MOE_LAYER, **{name: f"mlp.shared_experts.{own}" for name, own in SHARED.items()},
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
GLM4_MOE_LAYER: dict[str, Name] = {
    **GROUPED_LAYER, "post_attention_norm": "post_attention_layernorm"}
ERNIE_MOE_LAYER: dict[str, Name] = {
    **GROUPED_LAYER, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
HUNYUAN_LAYER: dict[str, Name] = {
    **LAYER, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
HUNYUAN_MOE_LAYER: dict[str, Name] = {
    **HUNYUAN_LAYER, **{name: f"mlp.shared_mlp.{own}" for name, own in SHARED.items()},
    "ffn_gate_inp": "mlp.gate.wg"}
LFM_LAYER: dict[str, Name] = {
    **ATTENTION, "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    **{f"shortconv.{own}": f"conv.{own}" for own in ("conv", "in_proj", "out_proj")}}


def experts_at(at: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
               ) -> dict[str, Name]:
    """Names of a mixture's tensors; at: what they begin with."""
    gate, up, down = (f"{at}experts.{{}}.{name}" for name in names)
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down,
            "ffn_gate_up_exps": (gate, up)}


EXPERTS = experts_at("mlp.")
SPARSE = "block_sparse_moe."
MIXTRAL_EXPERTS = experts_at(SPARSE, ("w1", "w3", "w2"))
QWEN3MOE = GgufFamily("Qwen3MoeForCausalLM", QWEN_MOE_LAYER, QWEN_EXPERTS, EXPERTS,
                      more=qwen3moe_fields)
FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", LAYER, permuted=True),
    "mistral3": GgufFamily("MistralForCausalLM", LAYER, more=mistral3_fields, permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", LAYER),
    "qwen3": GgufFamily("Qwen3ForCausalLM", LAYER),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM", LAYER),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM", LAYER),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", QWEN2_MOE_LAYER, QWEN_EXPERTS, EXPERTS,
                           {"ffn_gate_inp_shexp.weight": "row"}, qwen2moe_fields),
    "qwen3moe": QWEN3MOE, "qwen3vlmoe": QWEN3MOE,
    "gemma2": GgufFamily("Gemma2ForCausalLM", GEMMA_LAYER, CAPS, more=gemma_fields,
                         norm_plus_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", GEMMA_LAYER, CAPS, more=gemma_fields,
                         norm_plus_one=True),
    "phi3": GgufFamily("Phi3ForCausalLM", {**LAYER, **GATE_UP}, more=phi3_fields, partial=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM", AFTER_LAYER, more=olmo_fields),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", LAYER, permuted=True),
    "chatglm": GgufFamily("GlmForCausalLM", {**LAYER, **GATE_UP}, more=glm_fields, partial=True),
    "glm4": GgufFamily("Glm4ForCausalLM", GLM_LAYER, more=glm_fields, partial=True),
    "seed_oss": GgufFamily("SeedOssForCausalLM", {
        **LAYER, "post_attention_norm": "post_attention_layernorm"}, more=seed_oss_fields),
    "exaone4": GgufFamily("Exaone4ForCausalLM", AFTER_LAYER, more=exaone4_fields),
    "granite": GgufFamily("GraniteForCausalLM", LAYER, GRANITE_KEYS, more=granite_fields,
                          permuted=True),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM", {**HYBRID_LAYER, **ATTENTION},
        (*GRANITE_KEYS, *LOCAL_EXPERTS), experts_at(SPARSE),
        {f"ffn_{own}_shexp.weight": JOINED for own in ("gate", "up")}, granite_moe_fields,
        permuted=True),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", HYBRID_LAYER, HYBRID_KEYS, experts_at(SPARSE),
        {**RECURRENT, **{f"ffn_{own}.weight": JOINED for own in (
            "gate", "up", "gate_shexp", "up_shexp")}}, granite_hybrid_fields, permuted=True),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM", NEXT_LAYER, (*DELTA_KEYS, *DELTA_EXPERTS), EXPERTS,
        {**RECURRENT, "ffn_gate_inp_shexp.weight": "row"}, qwen3next_fields, norm_plus_one=True,
        partial=True),
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM", DELTA_LAYER, DELTA_KEYS, {}, RECURRENT, qwen35_fields,
        norm_plus_one=True, partial=True, tiled=TILED),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM", DELTA_LAYER, (*DELTA_KEYS, *DELTA_EXPERTS), EXPERTS,
        {**RECURRENT, "ffn_gate_inp_shexp.weight": "row"}, qwen35_fields, norm_plus_one=True,
        partial=True, tiled=TILED),
    "olmoe": GgufFamily("OlmoeForCausalLM", QWEN_MOE_LAYER, QWEN_EXPERTS, EXPERTS,
                        more=olmoe_fields),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", GLM4_MOE_LAYER, GROUPED_KEYS, EXPERTS,
                          more=glm4moe_fields, partial=True),
    "dots1": GgufFamily("Dots1ForCausalLM", GROUPED_LAYER, GROUPED_KEYS, EXPERTS,
                        more=dots1_fields),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM", {**LAYER, "ffn_gate_inp": f"{SPARSE}gate", "exp_probs_b.bias":
                                 f"{SPARSE}e_score_correction_bias"},
        LOCAL_EXPERTS, MIXTRAL_EXPERTS, more=minimax_fields, partial=True),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", LAYER, more=ernie_fields),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", ERNIE_MOE_LAYER, ERNIE_KEYS, EXPERTS,
                               {"exp_probs_b.bias": "row"}, ernie_fields),
    "hunyuan-dense": GgufFamily("HunYuanDenseV1ForCausalLM", HUNYUAN_LAYER),
    "hunyuan-moe": GgufFamily("HunYuanMoEV1ForCausalLM", HUNYUAN_MOE_LAYER, HUNYUAN_KEYS, EXPERTS,
                              more=hunyuan_moe_fields),
    "lfm2": GgufFamily("Lfm2ForCausalLM", LFM_LAYER, LFM_KEYS, {},
                       {"shortconv.conv.weight": "convolution"}, lfm2_fields,
                       outer={**OUTER, "token_embd_norm": "model.norm"}),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM", {**LAYER, "post_attention_norm": "post_attention_layernorm",
                              "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"},
        GPT_OSS_KEYS, EXPERTS, more=gpt_oss_fields),
    "command-r": GgufFamily("CohereForCausalLM", LAYER, LOGIT_SCALE, more=cohere_fields,
                            epsilon=layer_norm_epsilon("layer_norm_eps")),
    "cohere2": GgufFamily("Cohere2ForCausalLM", LAYER, LOGIT_SCALE, more=cohere2_fields,
                          epsilon=layer_norm_epsilon("layer_norm_eps")),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", LAYER, more=starcoder2_fields,
                             epsilon=layer_norm_epsilon("norm_epsilon")),
    "nemotron": GgufFamily("NemotronForCausalLM", LAYER, norm_plus_one=True, partial=True,
                           epsilon=layer_norm_epsilon("norm_eps")),
    "arcee": GgufFamily("ArceeForCausalLM", LAYER, permuted=True),
    "deepseek2": GgufFamily("DeepseekV3ForCausalLM", DEEPSEEK_LAYER, DEEPSEEK_KEYS, EXPERTS,
                            {"attn_k_b.weight": LATENT, "attn_v_b.weight": LATENT}, deepseek_fields,
                            latent=True),
}
"""By `general.architecture`."""
MIXTURES = {
    "llama": GgufFamily(
        "MixtralForCausalLM", {**LAYER, "ffn_gate_inp": f"{SPARSE}gate"}, LOCAL_EXPERTS,
        MIXTRAL_EXPERTS, permuted=True),
}
"""Those that are another class where `expert_count` is not 0."""


def family(file: GgufFile) -> GgufFamily:
    """Of the model. Raises `BadModel` where its architecture is not served."""
    name = file.text("general.architecture")
    if name not in FAMILIES:
        raise file.bad("general.architecture", f"{shown(name)} is not served; served are "
                       f"{', '.join(FAMILIES)}")
    own, count = FAMILIES[name], f"{name}.expert_count"
    if file.number(count, 0) and not own.experts:
        if name not in MIXTURES:
            raise file.bad(count, "mixtures of experts of this architecture are not served")
        own = MIXTURES[name]
    return own
