"""What GGUF files say of a model beside their keys: in arrays, in which tensors there are, and in
what llama.cpp knows of an architecture."""

from __future__ import annotations

from actorium.actors.errors import shown
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_keys import Config

EXAONE_32B_LAYERS, BAICHUAN_13B_LAYERS, MAVERICK_EXPERTS, MAX_LAYERS = 64, 40, 128, 4096
SOFTMAX, SIGMOID = 1, 2
"""How experts are scored (`expert_gating_func`): in DeepSeek-V2, and in V3."""


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


def phi3_fields(file: GgufFile, at: str, config: Config) -> Config:
    original = f"{at}.rope.scaling.original_context_length"
    fields: Config = {"sliding_window": file.number(f"{at}.attention.sliding_window", 0) or None}
    if original in file:
        fields["original_max_position_embeddings"] = file.number(original)
    return fields


def olmo2_fields(file: GgufFile, at: str, config: Config) -> Config:
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
    return {**glm_fields(file, at, config),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def dots1_fields(_: GgufFile, __: str, ___: Config) -> Config:
    return {"sliding_window": None}


def olmoe_fields(_: GgufFile, __: str, ___: Config) -> Config:
    return {"norm_topk_prob": False}


def minimax_fields(file: GgufFile, at: str, _: Config) -> Config:
    return {"intermediate_size": file.number(f"{at}.expert_feed_forward_length")}


def ernie_fields(_: GgufFile, __: str, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


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
            "conv_bias": _has(file, "shortconv.conv.bias"),
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
    shared = next((own for name in ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.weight")
                   if (own := file.tensors.get(name)) is not None), None)
    if shared is None:
        raise file.bad("tensor blk.0.ffn_gate.weight", "must be there")
    rotates = file.flag(f"{at}.rope.scaling.finetuned", False)
    return {**granite_fields(file, at, config), **_mamba_biases(file, "mamba"),
            "mamba_expand": _inner(file, at) // max(1, config["hidden_size"]),
            "mamba_d_head": "auto",
            "layer_types": ["attention" if count else "mamba"
                            for count in kv_heads_of_layers(file, at, config)],
            "attention_bias": _has(file, "attn_output.bias"),
            "shared_intermediate_size": shared.shape[0],
            "position_embedding_type": "rope" if rotates else "nope"}


def bamba_fields(file: GgufFile, at: str, config: Config) -> Config:
    heads = kv_heads_of_layers(file, at, config)
    return {**_mamba_biases(file, "mamba"), "mamba_d_head": "auto",
            "mamba_expand": _inner(file, at) // max(1, config["hidden_size"]),
            "attn_layer_indices": [i for i, count in enumerate(heads) if count]}


def falcon_h1_fields(file: GgufFile, at: str, config: Config) -> Config:
    """What multiplies is in the weights."""
    inner = _inner(file, at)
    return {**_mamba_biases(file, "mamba"), "mamba_d_ssm": inner,
            "mamba_d_head": inner // max(1, config["mamba_n_heads"]),
            "projectors_bias": _has(file, "ssm_out.bias"), "mamba_norm_before_gate": False,
            "mamba_rms_norm": _has(file, "ssm_norm.weight"),
            "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2}


def jamba_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Layers without key heads are recurrent, those with a router have experts."""
    layers = config["num_hidden_layers"]
    attends = [i for i, count in enumerate(kv_heads_of_layers(file, at, config)) if count]
    sparse = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in file.tensors]
    return {**_mamba_biases(file, "mamba"),
            "mamba_expand": _inner(file, at) // max(1, config["hidden_size"]),
            "num_experts": config["num_experts"] or 1,
            **_periodic(file, f"{at}.attention.head_count_kv", "attn_layer", attends, layers),
            **_periodic(file, f"{at}.expert_count", "expert_layer", sparse, layers)}


def _periodic(file: GgufFile, key: str, name: str, chosen: list[int], layers: int) -> Config:
    """Every so many layers. Raises `BadModel`."""
    first = chosen[0] if chosen else layers
    period = chosen[1] - first if len(chosen) > 1 else layers + 1
    if chosen != list(range(first, layers, max(1, period))):
        raise file.bad(key, f"layers {shown(chosen)} are not every so many, which alone is served")
    return {f"{name}_period": period, f"{name}_offset": first}


def mamba_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Falcon-Mamba where time steps, B and C are normed."""
    inner = _inner(file, at)
    normed = file.flag(f"{at}.ssm.dt_b_c_rms", False)
    return {**_mamba_biases(file), "intermediate_size": inner,
            "expand": inner // max(1, config["hidden_size"]),
            "time_step_rank": file.number(f"{at}.ssm.time_step_rank"),
            **({"architectures": ["FalconMambaForCausalLM"]} if normed else {})}


def mamba2_fields(file: GgufFile, at: str, config: Config) -> Config:
    inner, heads = _inner(file, at), file.number(f"{at}.ssm.time_step_rank")
    return {**_mamba_biases(file), "num_heads": heads, "head_dim": inner // max(1, heads),
            "n_groups": file.number(f"{at}.ssm.group_count"),
            "expand": inner // max(1, config["hidden_size"])}


def nemotron_h_fields(file: GgufFile, at: str, config: Config) -> Config:
    """What a block is its tensors say."""
    wide = [own.shape[0] for name, own in file.tensors.items() if name.endswith("ffn_up.weight")]
    return {**_mamba_biases(file), "mlp_bias": _has(file, "ffn_up.bias"),
            "mamba_head_dim": _inner(file, at) // max(1, config["mamba_num_heads"]),
            "layers_block_type": [_block(file, i) for i in range(config["num_hidden_layers"])],
            "intermediate_size": wide[0] if wide else 1}


def _block(file: GgufFile, i: int) -> str:
    """The kind of Nemotron-H's i-th block. Raises `BadModel`."""
    for kind, name in (("mamba", "ssm_in"), ("moe", "ffn_gate_inp"), ("mlp", "ffn_up"),
                       ("attention", "attn_q")):
        if f"blk.{i}.{name}.weight" in file.tensors:
            return kind
    raise file.bad(f"tensor blk.{i}.ssm_in.weight", "or another mixer must be there")


def _inner(file: GgufFile, at: str) -> int:
    """Width of all heads of a recurrent layer together."""
    return file.number(f"{at}.ssm.inner_size")


def _mamba_biases(file: GgufFile, prefix: str = "") -> Config:
    """Which biases its recurrent layers have; prefix: of the fields."""
    convolution, projections = (f"{prefix}_conv_bias", f"{prefix}_proj_bias") if prefix else (
        "use_conv_bias", "use_bias")
    return {convolution: _has(file, "ssm_conv1d.bias"), projections: _has(file, "ssm_in.bias")}


def _has(file: GgufFile, end: str) -> bool:
    """Whether a layer has such a tensor."""
    return any(name.endswith(f".{end}") for name in file.tensors)


def qwen3next_fields(file: GgufFile, at: str, config: Config) -> Config:
    heads = max(1, config["linear_num_value_heads"])
    return {"linear_value_head_dim": file.number(f"{at}.ssm.inner_size") // heads,
            "norm_topk_prob": True,
            "attention_bias": _has(file, "attn_output.bias")}


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


def lfm2_moe_fields(file: GgufFile, at: str, config: Config) -> Config:
    return {**lfm2_fields(file, at, config), "use_expert_bias": _has(file, "exp_probs_b.bias")}


def llama4_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Chunks of 8,192 tokens in three of four layers, but where the window is 0; keys and queries
    are normed in all sizes but that with 128 experts."""
    if file.number(f"{at}.attention.sliding_window", 1):
        return {"use_qk_norm": config["num_local_experts"] != MAVERICK_EXPERTS}
    return {"attention_chunk_size": None, "attn_temperature_tuning": False,
            "no_rope_layers": [1] * config["num_hidden_layers"],
            "use_qk_norm": config["num_local_experts"] != MAVERICK_EXPERTS}


def baichuan_fields(file: GgufFile, at: str, config: Config) -> Config:
    """The model of 13B has ALiBi, and says so by its layers alone."""
    if config["num_hidden_layers"] == BAICHUAN_13B_LAYERS:
        raise file.bad(f"{at}.block_count", "the model of 40 layers has ALiBi, which is not served")
    return {}


def minicpm_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Old files have none of its factors."""
    layers, hidden = max(1, config["num_hidden_layers"]), config["hidden_size"]
    return {**granite_fields(file, at, config),
            "embedding_multiplier": file.real(f"{at}.embedding_scale", 12.0),
            "residual_multiplier": file.real(f"{at}.residual_scale", 1.4 / layers**0.5),
            "logits_scaling": file.real(f"{at}.logit_scale", hidden / 256)}


def qwen_fields(_: GgufFile, __: str, config: Config) -> Config:
    """The first Qwen counts gates and ups together."""
    return {"intermediate_size": config["intermediate_size"] // 2}


def gpt2_fields(_: GgufFile, __: str, config: Config) -> Config:
    return {"n_inner": config["intermediate_size"]}


def starcoder_fields(file: GgufFile, at: str, config: Config) -> Config:
    kv_heads, heads = config["num_key_value_heads"], config["num_attention_heads"]
    if kv_heads not in (1, heads):
        raise file.bad(f"{at}.attention.head_count_kv", f"must be 1 or {heads}, got {kv_heads}")
    return {**gpt2_fields(file, at, config), "multi_query": kv_heads == 1}


def gptneox_fields(file: GgufFile, at: str, config: Config) -> Config:
    return {"rotary_pct": config["partial_rotary_factor"], "rotary_emb_base": config["rope_theta"],
            "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
            "use_parallel_residual": file.flag(f"{at}.use_parallel_residual", True)}


def falcon_fields(file: GgufFile, _: str, config: Config) -> Config:
    """Queries, keys and values are apart in the file, as if all were of the newer kind."""
    return {"new_decoder_architecture": True, "num_kv_heads": config["num_key_value_heads"],
            "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1,
            "ffn_hidden_size": config["intermediate_size"]}


def mpt_fields(file: GgufFile, at: str, _: Config) -> Config:
    most = file.real(f"{at}.attention.max_alibi_bias", 8.0)
    return {"attn_config": {"alibi": most > 0, "alibi_bias_max": most,
                            "clip_qkv": file.real(f"{at}.attention.clamp_kqv", 0.0)}}


def stablelm_fields(file: GgufFile, _: str, __: Config) -> Config:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
            "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
            "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors}


def apertus_fields(file: GgufFile, _: str, __: Config) -> Config:
    """Of its activations' four numbers two are those of the class."""
    for key, want in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        if file.is_array(key) and any(abs(own - want) > 1e-9 for own in file.numbers(
                key, MAX_LAYERS)):
            raise file.bad(key, f"must be {want} in each layer")
    return {}


def mistral4_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Queries grow with their position where the file says so."""
    fields = deepseek_fields(file, at, config)
    rope = {**config.get("rope_scaling", {}), **fields.get("rope_scaling", {})}
    beta = file.real(f"{at}.attention.temperature_scale", 0.0)
    if not rope:
        raise file.bad(f"{at}.rope.scaling.type", "must be yarn")
    return {**fields, "rope_scaling": {**rope, "llama_4_scaling_beta": beta}}


def kimi_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Layers without key heads are recurrent."""
    heads = kv_heads_of_layers(file, at, config)
    return {**deepseek_fields(file, at, config), "linear_attn_config": {
        "full_attn_layers": [i + 1 for i, count in enumerate(heads) if count],
        "head_dim": file.number(f"{at}.kda.head_dim"), "num_heads": config["num_attention_heads"],
        "short_conv_kernel_size": file.number(f"{at}.ssm.conv_kernel")}}


def deepseek_fields(file: GgufFile, at: str, config: Config) -> Config:
    gating = f"{at}.expert_gating_func"
    scores = file.number(gating, SIGMOID if _has(file, "exp_probs_b.bias") else SOFTMAX)
    if scores not in (SOFTMAX, SIGMOID):
        raise file.bad(gating, f"must be {SOFTMAX} (softmax) or {SIGMOID} (sigmoid), got "
                       f"{shown(scores)}")
    mla = "_mla" if f"{at}.attention.key_length_mla" in file else ""
    query = file.number(f"{at}.attention.key_length{mla}")
    fields: Config = {
        "v_head_dim": file.number(f"{at}.attention.value_length{mla}"),
        "qk_nope_head_dim": query - config["qk_rope_head_dim"], "rope_interleave": True,
        "q_lora_rank": config.get("q_lora_rank") or None}
    if scores == SOFTMAX and at == "deepseek2":
        fields |= {"architectures": ["DeepseekV2ForCausalLM"], "topk_method":
                   "greedy" if config["n_group"] == 1 else "group_limited_greedy"}
    log = f"{at}.rope.scaling.yarn_log_multiplier"
    if log in file and "rope_scaling" in config:
        mscale = round(10 * file.real(log), 6)
        fields["rope_scaling"] = {**config["rope_scaling"], "mscale": mscale,
                                  "mscale_all_dim": mscale}
    return fields
