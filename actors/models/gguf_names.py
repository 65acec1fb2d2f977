"""What tensors of GGUF files are called in checkpoints: layer by layer, of architectures alike."""

from __future__ import annotations

Name = str | tuple[str, ...]
"""What a tensor is called in a checkpoint; or, one behind the other, its rows'."""
ALL_ROWS, BEHIND_KEYS, ONE_EACH, COLUMNS = "all", "behind_keys", "one_each", "columns"
"""Where value heads lie: in all rows; behind those of queries and keys; a row each."""
LATENT, JOINED = "latent", "joined"
"""Changes that make one tensor of two: what expands latents to keys and to values; gate and up."""
SECOND = {"attn_k_b": "attn_v_b", "ffn_gate": "ffn_up", "ffn_gate_shexp": "ffn_up_shexp"}
"""The first of these two, and the other."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside of layers."""
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
GATED = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
MLP: dict[str, Name] = {name: f"mlp.{own}" for name, own in GATED.items()}
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
TOKEN_INPUTS: dict[str, Name] = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm"}
"""What takes the input that a token gives every layer by itself."""
TOKEN_OUTER = {**OUTER, "per_layer_token_embd": "model.embed_tokens_per_layer",
               "per_layer_model_proj": "model.per_layer_model_projection",
               "per_layer_proj_norm": "model.per_layer_projection_norm"}
GEMMA3N_LAYER: dict[str, Name] = {
    **GEMMA_LAYER, **TOKEN_INPUTS, "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm"}
GEMMA3N_OUTER = {**TOKEN_OUTER, "altup_proj": "model.altup_projections.{}",
                 "altup_unembd_proj": "model.altup_unembed_projections.{}"}
GEMMA4_LAYER: dict[str, Name] = {
    **GEMMA_LAYER, **TOKEN_INPUTS, "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)}}
del GEMMA4_LAYER["attn_qkv"]  # whose layers have heads of two sizes
GLM_LAYER: dict[str, Name] = {
    **LAYER, **GATE_UP, "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm"}
QWEN_MOE_LAYER: dict[str, Name] = {**LAYER, "ffn_gate_inp": "mlp.gate"}
SHARED = {f"{name}_shexp": own for name, own in GATED.items()}
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
    "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias",
    **{f"shortconv.{own}": f"conv.{own}" for own in ("conv", "in_proj", "out_proj")}}
LFM_OUTER = {**OUTER, "token_embd_norm": "model.norm"}
SHORT_CONVOLUTION = {"shortconv.conv.weight": "convolution"}
SEED_LAYER: dict[str, Name] = {**LAYER, "post_attention_norm": "post_attention_layernorm"}
GPT_OSS_LAYER: dict[str, Name] = {
    **SEED_LAYER, "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}
LLAMA4_LAYER: dict[str, Name] = {
    **BEFORE, **ATTENTION, "ffn_gate_inp": "feed_forward.router",
    **{name: f"feed_forward.{own}" for name, own in GATED.items()},
    **{name: f"feed_forward.shared_expert.{own}" for name, own in SHARED.items()}}
APERTUS_LAYER: dict[str, Name] = {
    **LAYER, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
XIELU = {f"xielu.alpha_{own}": f"mlp.act_fn.alpha_{own}" for own in "pn"}
"""Numbers of Apertus's activations."""
INDEXED_LAYER: dict[str, Name] = {
    **DEEPSEEK_LAYER, **{f"indexer.{name}": f"self_attn.indexer.{own}" for name, own in (
        ("k_norm", "k_norm"), ("proj", "weights_proj"), ("attn_k", "wk"), ("attn_q_b", "wq_b"))}}
RECURRENT_PARTS: dict[str, Name] = {
    "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj",
    "ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_d": "D"}
"""Of a Mamba-2 layer."""
SCAN_PARTS: dict[str, Name] = {
    **RECURRENT_PARTS, "ssm_dt.bias": "dt_proj.bias", "ssm_dt": "dt_proj", "ssm_x": "x_proj",
    **{f"ssm_{own}_norm": f"{own}_layernorm" for own in ("dt", "b", "c")}}
"""Of a Mamba layer."""
SCAN = {"ssm_a": "log_negated_rows", "ssm_conv1d.weight": "convolution"}
MAMBA_LAYER: dict[str, Name] = {
    "attn_norm": "norm", **{name: f"mixer.{own}" for name, own in SCAN_PARTS.items()}}
MAMBA2_LAYER: dict[str, Name] = {
    "attn_norm": "norm", **{name: f"mixer.{own}" for name, own in RECURRENT_PARTS.items()}}
NEMOTRON_H_LAYER: dict[str, Name] = {
    **MAMBA2_LAYER, "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj",
    **{f"attn_{own}": f"mixer.{own}_proj" for own in "qkv"}, "ffn_down": "mixer.down_proj",
    **{name: f"mixer.shared_experts.{own}" for name, own in SHARED.items()},
    "ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"}
BAMBA_LAYER: dict[str, Name] = {
    **ATTENTION, "attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm",
    **{name: f"mamba.{own}" for name, own in RECURRENT_PARTS.items()},
    **{name: f"feed_forward.{own}" for name, own in GATED.items()}}
FALCON_H1_LAYER: dict[str, Name] = {**BAMBA_LAYER, "ffn_norm": "pre_ff_layernorm.weight"}
"""Its second norm is a tensor without the word weight."""
JAMBA_LAYER: dict[str, Name] = {
    **BAMBA_LAYER, **{name: f"mamba.{own}" for name, own in SCAN_PARTS.items()},
    "ffn_gate_inp": "feed_forward.router"}
KIMI_LAYER: dict[str, Name] = {
    **ATTENTION, **DEEPSEEK_LAYER, "ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm", "ssm_beta": "self_attn.b_proj",
    **{f"ssm_conv1d_{own}": f"self_attn.{own}_conv1d" for own in "qkv"},
    **{f"ssm_{own}_{part}": f"self_attn.{own}_{part}_proj" for own in "fg" for part in "ab"}}
KIMI_CHANGES = {"ssm_a": "log_negated", **{
    f"ssm_conv1d_{own}.weight": "convolution" for own in "qkv"}}

ENCODER_OUTER = {
    **OUTER, "token_types": "model.embed_token_types", "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm", "cls": "head.dense", "cls.norm": "head.norm",
    "cls.output": "score"}
ENCODER_LAYER: dict[str, Name] = {
    **ATTENTION, **MLP, "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm"}

DEEPSEEK_MTP = {"": "model.layers.{0}.", **{
    f"nextn.{name}": f"model.layers.{{0}}.{own}" for name, own in (
        ("eh_proj", "eh_proj"), ("enorm", "enorm"), ("hnorm", "hnorm"),
        ("shared_head_norm", "shared_head.norm"), ("embed_tokens", "embed_tokens"),
        ("shared_head_head", "shared_head.head"))}}
"""Modules of the layer that drafts; "": what the names of its others begin with; "ffn": those of
its MLP, where that lies elsewhere. {0}: how many layers there are before it."""
QWEN_MTP = {"": "mtp.layers.0.", "nextn.eh_proj": "mtp.fc", "nextn.shared_head_norm": "mtp.norm",
            "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden",
            "nextn.embed_tokens": "mtp.embed_tokens", "nextn.shared_head_head": "mtp.head"}
NEMOTRON_MTP = {"": "mtp.layers.0.", "ffn": "mtp.layers.1.", **{
    f"nextn.{name}": f"mtp.layers.0.{name}" for name in ("eh_proj", "enorm", "hnorm")},
    "post_attention_norm": "mtp.layers.1.norm",
    "nextn.shared_head_norm": "mtp.layers.1.final_layernorm"}
"""A block with attention, and one with experts."""


def experts_at(at: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
               ) -> dict[str, Name]:
    """Names of a mixture's tensors; at: what they begin with."""
    gate, up, down = (f"{at}experts.{{}}.{name}" for name in names)
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down,
            "ffn_gate_up_exps": (gate, up)}


EXPERTS = experts_at("mlp.")
SPARSE = "block_sparse_moe."
MIXTRAL_EXPERTS = experts_at(SPARSE, ("w1", "w3", "w2"))
