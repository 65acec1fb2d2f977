"""Keys of GGUF files' metadata as fields of config.json, architecture by architecture. What files
leave out is as llama.cpp has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.actors.models.gguf_file import GgufFile

Config = dict[str, Any]
REQUIRED = object()
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
EXAONE_32B_LAYERS = 64
SOFTMAX, SIGMOID = 1, 2
"""How experts are scored (`expert_gating_func`): in DeepSeek-V2, and in V3."""


class Key(NamedTuple):
    """A key of the metadata, and its field in config.json."""

    key: str
    """Behind the architecture's name."""
    field: str
    read: Callable[[GgufFile, str], Any] = GgufFile.number
    default: Any = REQUIRED
    """None: the field is left out."""


NUMBER, REAL, FLAG, SAME = GgufFile.number, GgufFile.real, GgufFile.flag, GgufFile.same
COMMON = (
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "num_attention_heads", SAME),
    Key("feed_forward_length", "intermediate_size", SAME, None),
    Key("context_length", "max_position_embeddings"),
    Key("rope.freq_base", "rope_theta", REAL, 10_000.0),
)
RMS = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", REAL)
"""The epsilon of most norms."""
LOGIT_SCALE = (Key("logit_scale", "logit_scale", REAL),)
CAPS = (Key("attn_logit_softcapping", "attn_logit_softcapping", REAL, None),
        Key("final_logit_softcapping", "final_logit_softcapping", REAL, None))
USED = Key("expert_used_count", "num_experts_per_tok")
LOCAL_EXPERTS = (Key("expert_count", "num_local_experts"), USED)
QWEN_EXPERTS = (Key("expert_count", "num_experts"), USED,
                Key("expert_feed_forward_length", "moe_intermediate_size", NUMBER, None))
GRANITE_KEYS = (
    Key("attention.scale", "attention_multiplier", REAL, None),
    Key("embedding_scale", "embedding_multiplier", REAL, 1.0),
    Key("residual_scale", "residual_multiplier", REAL, 1.0),
    Key("logit_scale", "logits_scaling", REAL, 1.0),
)
HYBRID_KEYS = (
    *GRANITE_KEYS, Key("expert_count", "num_local_experts", NUMBER, 0),
    USED._replace(default=None), Key("ssm.conv_kernel", "mamba_d_conv"),
    Key("ssm.state_size", "mamba_d_state"), Key("ssm.group_count", "mamba_n_groups"),
    Key("ssm.time_step_rank", "mamba_n_heads"),
)
DELTA_KEYS = (
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"), Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
    Key("full_attention_interval", "full_attention_interval", NUMBER, 4),
)
DELTA_EXPERTS = (
    *QWEN_EXPERTS, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
GROUPED_KEYS = (
    Key("expert_count", "n_routed_experts"), USED,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_weights_scale", "routed_scaling_factor", REAL, 1.0),
    Key("expert_weights_norm", "norm_topk_prob", FLAG, False),
    Key("leading_dense_block_count", "first_k_dense_replace", NUMBER, 0),
    Key("expert_group_count", "n_group", NUMBER, 1),
    Key("expert_group_used_count", "topk_group", NUMBER, 1),
)
DEEPSEEK_KEYS = (
    Key("attention.q_lora_rank", "q_lora_rank", NUMBER, None),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "qk_rope_head_dim"), *GROUPED_KEYS,
)
ERNIE_KEYS = (
    Key("expert_count", "moe_num_experts"), Key("expert_used_count", "moe_k"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "moe_num_shared_experts", NUMBER, 0),
    Key("leading_dense_block_count", "moe_layer_start_index", NUMBER, 0),
    Key("interleave_moe_layer_step", "moe_layer_interval", NUMBER, 1),
)
HUNYUAN_KEYS = (
    Key("expert_count", "num_experts"), Key("expert_used_count", "moe_topk"),
    Key("expert_shared_count", "num_shared_expert", NUMBER, 1),
)
GPT_OSS_KEYS = (
    *LOCAL_EXPERTS, Key("expert_feed_forward_length", "intermediate_size"),
)
LFM_KEYS = (Key("shortconv.l_cache", "conv_L_cache"),)


def read_keys(file: GgufFile, at: str, keys: tuple[Key, ...]) -> Config:
    """The fields of config.json. Raises `BadModel` naming a key that is missing or wrong."""
    config: Config = {}
    for key, field, read, default in keys:
        if f"{at}.{key}" in file or default is REQUIRED:
            config[field] = read(file, f"{at}.{key}")
        elif default is not None:
            config[field] = default
    return config


def layer_types(file: GgufFile, at: str, config: Config, every: int = 0) -> Config:
    """The window, and which layers have it; {} where there is none. every: the layers that have
    none by default; 0: no layer has one."""
    window = file.number(f"{at}.attention.sliding_window", 0)
    key, layers = f"{at}.attention.sliding_window_pattern", config["num_hidden_layers"]
    if not window or key not in file and not every:
        return {}
    if file.is_array(key):
        near = [bool(each) for each in file.numbers(key, layers)]
    else:
        each = file.number(key, every)
        near = [bool(each) and (i + 1) % each != 0 for i in range(layers)]
    if len(near) != layers:
        raise file.bad(key, f"tells of {len(near)} layers, not {layers}")
    return {"sliding_window": window, "layer_types": [
        "sliding_attention" if own else "full_attention" for own in near]}


def gemma_fields(file: GgufFile, at: str, config: Config) -> Config:
    heads, width = config["num_attention_heads"], config["head_dim"]
    wide = config["num_hidden_layers"] == GEMMA_27B_LAYERS[at]
    every, local = (2, {}) if at == "gemma2" else (6, {
        "rope_local_base_freq": file.real(f"{at}.rope.freq_base_swa", 10_000.0),
        "rope_theta": file.real(f"{at}.rope.freq_base", 1_000_000.0)})
    return {"query_pre_attn_scalar": config["hidden_size"] // max(1, heads) if wide else width,
            "sliding_window": None, **local, **layer_types(file, at, config, every)}


def phi3_fields(file: GgufFile, at: str, config: Config) -> Config:
    original = f"{at}.rope.scaling.original_context_length"
    fields: Config = {"sliding_window": file.number(f"{at}.attention.sliding_window", 0) or None}
    if original in file:
        fields["original_max_position_embeddings"] = file.number(original)
    return fields


def olmo_fields(file: GgufFile, at: str, config: Config) -> Config:
    """OLMo 3 is OLMo 2 with windows."""
    windows = layer_types(file, at, config)
    return {**windows, "architectures": ["Olmo3ForCausalLM"]} if windows else {}


def exaone4_fields(file: GgufFile, at: str, config: Config) -> Config:
    wide = config["num_hidden_layers"] == EXAONE_32B_LAYERS
    return {"sliding_window": None, **layer_types(file, at, config, 4 if wide else 0)}


def granite_fields(_: GgufFile, __: str, config: Config) -> Config:
    return {"attention_multiplier": config.get("attention_multiplier",
                                               max(1, config["head_dim"]) ** -0.5)}


def granite_moe_fields(file: GgufFile, at: str, config: Config) -> Config:
    """With an MLP for all tokens it is another class."""
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    more = {} if shared is None else {"architectures": ["GraniteMoeSharedForCausalLM"],
                                      "shared_intermediate_size": shared.shape[0]}
    return {**granite_fields(file, at, config), **more}


def mistral3_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Ministral 3 where queries grow with their position."""
    key = f"{at}.attention.temperature_scale"
    if key not in file or not (beta := file.real(key)):
        return {}
    rope, mscale = config.get("rope_scaling", {}), f"{at}.rope.scaling.yarn_log_multiplier"
    if rope.get("rope_type") != "yarn":
        raise file.bad(key, "is served with a rope of type yarn alone")
    scale = {name: file.real(mscale) for name in ("mscale", "mscale_all_dim") if mscale in file}
    return {"architectures": ["Ministral3ForCausalLM"], "rope_scaling": {
        **rope, **scale, "llama_4_scaling_beta": beta}}


def glm4moe_fields(file: GgufFile, at: str, config: Config) -> Config:
    """The layer that drafts is not read."""
    return {**glm_fields(file, at, config), "num_nextn_predict_layers": 0,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def dots1_fields(_: GgufFile, __: str, ___: Config) -> Config:
    return {"sliding_window": None}


def olmoe_fields(_: GgufFile, __: str, ___: Config) -> Config:
    return {"norm_topk_prob": False}


def minimax_fields(file: GgufFile, at: str, _: Config) -> Config:
    return {"intermediate_size": file.number(f"{at}.expert_feed_forward_length")}


def ernie_fields(_: GgufFile, __: str, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def layer_norm_epsilon(field: str) -> Key:
    """That of a model with LayerNorms, whose config calls it so."""
    return Key("attention.layer_norm_epsilon", field, REAL)


def cohere_fields(file: GgufFile, _: str, __: Config) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def cohere2_fields(file: GgufFile, at: str, config: Config) -> Config:
    return layer_types(file, at, config, 4)


def starcoder2_fields(_: GgufFile, __: str, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def gpt_oss_fields(file: GgufFile, at: str, config: Config) -> Config:
    """The ends of its yarn's ramp are not rounded."""
    rope = config.get("rope_scaling", {})
    return {"sliding_window": None, **layer_types(file, at, config, 2),
            "rope_scaling": {**rope, "truncate": False} if rope else {"rope_type": "default"}}


def hunyuan_moe_fields(file: GgufFile, at: str, config: Config) -> Config:
    key, size = f"{at}.expert_feed_forward_length", config["intermediate_size"]
    if file.number(key, size) != size:
        raise file.bad(key, f"must be {at}.feed_forward_length, {size}")
    return {}


def lfm2_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Layers without key heads are convolutions."""
    return {"norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False,
            "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
            "layer_types": ["full_attention" if count else "conv"
                            for count in kv_heads_of_layers(file, at, config)]}


def kv_heads_of_layers(file: GgufFile, at: str, config: Config) -> list[int]:
    """The key heads of each layer. Raises `BadModel`."""
    key, layers = f"{at}.attention.head_count_kv", config["num_hidden_layers"]
    counts = file.numbers(key, layers) if file.is_array(key) else [file.number(key)] * layers
    if len(counts) != layers:
        raise file.bad(key, f"tells of {len(counts)} layers, not {layers}")
    return counts


def granite_hybrid_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Layers without key heads are recurrent."""
    inner, hidden = file.number(f"{at}.ssm.inner_size"), max(1, config["hidden_size"])
    shared = next((own for name in ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.weight")
                   if (own := file.tensors.get(name)) is not None), None)
    if shared is None:
        raise file.bad("tensor blk.0.ffn_gate.weight", "must be there")
    biased = {own: f".{own}.bias" for own in ("ssm_in", "ssm_conv1d")}
    found = {own: any(name.endswith(end) for name in file.tensors) for own, end in biased.items()}
    rotates = file.flag(f"{at}.rope.scaling.finetuned", False)
    return {**granite_fields(file, at, config), "mamba_expand": inner // hidden,
            "mamba_d_head": "auto",
            "layer_types": ["attention" if count else "mamba"
                            for count in kv_heads_of_layers(file, at, config)],
            "attention_bias": any(name.endswith(".attn_output.bias") for name in file.tensors),
            "shared_intermediate_size": shared.shape[0],
            "mamba_proj_bias": found["ssm_in"], "mamba_conv_bias": found["ssm_conv1d"],
            "position_embedding_type": "rope" if rotates else "nope"}


def qwen3next_fields(file: GgufFile, at: str, config: Config) -> Config:
    heads = max(1, config["linear_num_value_heads"])
    return {"linear_value_head_dim": file.number(f"{at}.ssm.inner_size") // heads,
            "norm_topk_prob": True,
            "attention_bias": any(name.endswith(".attn_output.bias") for name in file.tensors)}


def qwen35_fields(file: GgufFile, at: str, config: Config) -> Config:
    fields = qwen3next_fields(file, at, config)
    if "num_experts" not in config:
        del fields["norm_topk_prob"]
    return fields


def qwen2moe_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Weights of the chosen experts are not made to sum to 1, as in llama.cpp."""
    size = config["intermediate_size"]
    each = size // max(1, config["num_experts_per_tok"])
    return {"norm_topk_prob": False, "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
            "moe_intermediate_size": config.get("moe_intermediate_size", each),
            "shared_expert_intermediate_size": file.number(
                f"{at}.expert_shared_feed_forward_length", size)}


def qwen3moe_fields(_: GgufFile, __: str, ___: Config) -> Config:
    return {"norm_topk_prob": True}


def seed_oss_fields(file: GgufFile, _: str, config: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "attention_out_bias": config["attention_bias"]}


def glm_fields(file: GgufFile, _: str, __: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors
            or "blk.0.attn_qkv.bias" in file.tensors}


def deepseek_fields(file: GgufFile, at: str, config: Config) -> Config:
    gating = f"{at}.expert_gating_func"
    scores = file.number(gating, SOFTMAX)
    if scores not in (SOFTMAX, SIGMOID):
        raise file.bad(gating, f"must be {SOFTMAX} (softmax) or {SIGMOID} (sigmoid), got "
                       f"{shown(scores)}")
    mla = "_mla" if f"{at}.attention.key_length_mla" in file else ""
    query = file.number(f"{at}.attention.key_length{mla}")
    fields: Config = {
        "v_head_dim": file.number(f"{at}.attention.value_length{mla}"),
        "qk_nope_head_dim": query - config["qk_rope_head_dim"], "rope_interleave": True,
        "q_lora_rank": config.get("q_lora_rank") or None}
    if scores == SOFTMAX:
        fields |= {"architectures": ["DeepseekV2ForCausalLM"], "topk_method":
                   "greedy" if config["n_group"] == 1 else "group_limited_greedy"}
    log = f"{at}.rope.scaling.yarn_log_multiplier"
    if log in file and "rope_scaling" in config:
        mscale = round(10 * file.real(log), 6)
        fields["rope_scaling"] = {**config["rope_scaling"], "mscale": mscale,
                                  "mscale_all_dim": mscale}
    return fields
