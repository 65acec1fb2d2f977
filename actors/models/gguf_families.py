"""The architectures of GGUF files by llama.cpp's names for them (`general.architecture`): which
class of config.json each is, what its keys are called there, and what its tensors are called in a
checkpoint of that class. Data alone, and no torch.
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
LATENT, JOINED = "latent", "joined"
"""Changes that make one tensor of two: what expands latents to keys and to values; gate and up."""
SECOND = {"attn_k_b": "attn_v_b", "ffn_gate": "ffn_up", "ffn_gate_shexp": "ffn_up_shexp"}
"""The first of these two, and the other."""
SIGMOID = 2
"""How the experts of DeepSeek-V3 are scored (`expert_gating_func`)."""


class Key(NamedTuple):
    """A key of the metadata, and its field in config.json."""

    key: str
    """Behind the architecture's name."""
    field: str
    read: Callable[[GgufFile, str], Any] = GgufFile.number
    default: Any = REQUIRED
    """None: the field is left out."""


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
    zero: tuple[str, ...] = ()
    """Keys that must be absent or 0: what they ask for is not served."""


# --- keys ----------------------------------------------------------------------------------------

NUMBER, REAL, FLAG, SAME = GgufFile.number, GgufFile.real, GgufFile.flag, GgufFile.same
COMMON = (
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "num_attention_heads", SAME),
    Key("feed_forward_length", "intermediate_size", SAME),
    Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", REAL),
    Key("context_length", "max_position_embeddings"),
    Key("rope.freq_base", "rope_theta", REAL, 10_000.0),
)
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
    *QWEN_EXPERTS, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"), Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
    Key("full_attention_interval", "full_attention_interval", NUMBER, 4),
)
DEEPSEEK_KEYS = (
    Key("attention.q_lora_rank", "q_lora_rank", NUMBER, None),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "qk_rope_head_dim"),
    Key("expert_count", "n_routed_experts"), USED,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_weights_scale", "routed_scaling_factor", REAL, 1.0),
    Key("expert_weights_norm", "norm_topk_prob", FLAG, False),
    Key("leading_dense_block_count", "first_k_dense_replace", NUMBER, 0),
    Key("expert_group_count", "n_group", NUMBER, 1),
    Key("expert_group_used_count", "topk_group", NUMBER, 1),
)


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


def _gemma(file: GgufFile, at: str, config: Config) -> Config:
    heads, width = config["num_attention_heads"], config["head_dim"]
    wide = config["num_hidden_layers"] == GEMMA_27B_LAYERS[at]
    every, local = (2, {}) if at == "gemma2" else (6, {
        "rope_local_base_freq": file.real(f"{at}.rope.freq_base_swa", 10_000.0),
        "rope_theta": file.real(f"{at}.rope.freq_base", 1_000_000.0)})
    return {"query_pre_attn_scalar": config["hidden_size"] // max(1, heads) if wide else width,
            "sliding_window": None, **local, **layer_types(file, at, config, every)}


def _phi3(file: GgufFile, at: str, config: Config) -> Config:
    original = f"{at}.rope.scaling.original_context_length"
    fields: Config = {"sliding_window": file.number(f"{at}.attention.sliding_window", 0) or None}
    if original in file:
        fields["original_max_position_embeddings"] = file.number(original)
    return fields


def _olmo(file: GgufFile, at: str, config: Config) -> Config:
    """OLMo 3 is OLMo 2 with windows."""
    windows = layer_types(file, at, config)
    return {**windows, "architectures": ["Olmo3ForCausalLM"]} if windows else {}


def _exaone4(file: GgufFile, at: str, config: Config) -> Config:
    wide = config["num_hidden_layers"] == EXAONE_32B_LAYERS
    return {"sliding_window": None, **layer_types(file, at, config, 4 if wide else 0)}


def _granite(_: GgufFile, __: str, config: Config) -> Config:
    return {"attention_multiplier": config.get("attention_multiplier", config["head_dim"] ** -0.5)}


def _granite_hybrid(file: GgufFile, at: str, config: Config) -> Config:
    """Layers without key heads are recurrent."""
    key, hidden = f"{at}.attention.head_count_kv", max(1, config["hidden_size"])
    layers, inner = config["num_hidden_layers"], file.number(f"{at}.ssm.inner_size")
    counts = file.numbers(key, layers) if file.is_array(key) else [file.number(key)] * layers
    shared = next((own for name in ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.weight")
                   if (own := file.tensors.get(name)) is not None), None)
    if len(counts) != layers or shared is None:
        raise file.bad(key if shared else "tensor blk.0.ffn_gate.weight",
                       f"must be that of {layers} layers")
    biased = {own: f".{own}.bias" for own in ("ssm_in", "ssm_conv1d")}
    found = {own: any(name.endswith(end) for name in file.tensors) for own, end in biased.items()}
    rotates = file.flag(f"{at}.rope.scaling.finetuned", False)
    return {**_granite(file, at, config), "mamba_expand": inner // hidden, "mamba_d_head": "auto",
            "layer_types": ["attention" if count else "mamba" for count in counts],
            "attention_bias": any(name.endswith(".attn_output.bias") for name in file.tensors),
            "shared_intermediate_size": shared.shape[0],
            "mamba_proj_bias": found["ssm_in"], "mamba_conv_bias": found["ssm_conv1d"],
            "position_embedding_type": "rope" if rotates else "nope"}


def _qwen3next(file: GgufFile, at: str, config: Config) -> Config:
    heads = max(1, config["linear_num_value_heads"])
    return {"linear_value_head_dim": file.number(f"{at}.ssm.inner_size") // heads,
            "norm_topk_prob": True,
            "attention_bias": any(name.endswith(".attn_output.bias") for name in file.tensors)}


def _qwen2moe(file: GgufFile, at: str, config: Config) -> Config:
    """Weights of the chosen experts are not made to sum to 1, as in llama.cpp."""
    size = config["intermediate_size"]
    each = size // max(1, config["num_experts_per_tok"])
    return {"norm_topk_prob": False, "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
            "moe_intermediate_size": config.get("moe_intermediate_size", each),
            "shared_expert_intermediate_size": file.number(
                f"{at}.expert_shared_feed_forward_length", size)}


def _qwen3moe(_: GgufFile, __: str, ___: Config) -> Config:
    return {"norm_topk_prob": True}


def _seed_oss(file: GgufFile, _: str, config: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "attention_out_bias": config["attention_bias"]}


def _glm(file: GgufFile, _: str, __: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors
            or "blk.0.attn_qkv.bias" in file.tensors}


def _deepseek(file: GgufFile, at: str, config: Config) -> Config:
    gating = f"{at}.expert_gating_func"
    if file.number(gating, 1) != SIGMOID:
        raise file.bad(gating, f"must be {SIGMOID} (sigmoid, as in DeepSeek-V3), got "
                       f"{shown(file.number(gating, 1))}")
    mla = "_mla" if f"{at}.attention.key_length_mla" in file else ""
    query = file.number(f"{at}.attention.key_length{mla}")
    fields: Config = {
        "v_head_dim": file.number(f"{at}.attention.value_length{mla}"),
        "qk_nope_head_dim": query - config["qk_rope_head_dim"], "rope_interleave": True,
        "q_lora_rank": config.get("q_lora_rank") or None}
    log = f"{at}.rope.scaling.yarn_log_multiplier"
    if log in file and "rope_scaling" in config:
        mscale = round(10 * file.real(log), 6)
        fields["rope_scaling"] = {**config["rope_scaling"], "mscale": mscale,
                                  "mscale_all_dim": mscale}
    return fields


# --- tensors -------------------------------------------------------------------------------------

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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


def experts_at(at: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
               ) -> dict[str, Name]:
    """Names of a mixture's tensors; at: what they begin with."""
    gate, up, down = (f"{at}experts.{{}}.{name}" for name in names)
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down,
            "ffn_gate_up_exps": (gate, up)}


EXPERTS = experts_at("mlp.")
SPARSE = "block_sparse_moe."
QWEN3MOE = GgufFamily("Qwen3MoeForCausalLM", QWEN_MOE_LAYER, QWEN_EXPERTS, EXPERTS, more=_qwen3moe)
FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", LAYER, permuted=True),
    "mistral3": GgufFamily("MistralForCausalLM", LAYER, permuted=True,
                           zero=("attention.temperature_scale",)),
    "qwen2": GgufFamily("Qwen2ForCausalLM", LAYER),
    "qwen3": GgufFamily("Qwen3ForCausalLM", LAYER),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM", LAYER),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM", LAYER),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", QWEN2_MOE_LAYER, QWEN_EXPERTS, EXPERTS,
                           {"ffn_gate_inp_shexp.weight": "row"}, _qwen2moe),
    "qwen3moe": QWEN3MOE, "qwen3vlmoe": QWEN3MOE,
    "gemma2": GgufFamily("Gemma2ForCausalLM", GEMMA_LAYER, CAPS, more=_gemma, norm_plus_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", GEMMA_LAYER, CAPS, more=_gemma, norm_plus_one=True),
    "phi3": GgufFamily("Phi3ForCausalLM", {**LAYER, **GATE_UP}, more=_phi3, partial=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM", AFTER_LAYER, more=_olmo),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", LAYER, permuted=True),
    "chatglm": GgufFamily("GlmForCausalLM", {**LAYER, **GATE_UP}, more=_glm, partial=True),
    "glm4": GgufFamily("Glm4ForCausalLM", GLM_LAYER, more=_glm, partial=True),
    "seed_oss": GgufFamily("SeedOssForCausalLM", {
        **LAYER, "post_attention_norm": "post_attention_layernorm"}, more=_seed_oss),
    "exaone4": GgufFamily("Exaone4ForCausalLM", AFTER_LAYER, more=_exaone4),
    "granite": GgufFamily("GraniteForCausalLM", LAYER, GRANITE_KEYS, more=_granite, permuted=True),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM", {**LAYER, "ffn_gate_inp": f"{SPARSE}router.layer"},
        (*GRANITE_KEYS, *LOCAL_EXPERTS), experts_at(SPARSE), more=_granite, permuted=True),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", HYBRID_LAYER, HYBRID_KEYS, experts_at(SPARSE),
        {**RECURRENT, **{f"ffn_{own}.weight": JOINED for own in (
            "gate", "up", "gate_shexp", "up_shexp")}}, _granite_hybrid, permuted=True),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM", NEXT_LAYER, DELTA_KEYS, EXPERTS,
        {**RECURRENT, "ffn_gate_inp_shexp.weight": "row"}, _qwen3next, norm_plus_one=True,
        partial=True),
    "deepseek2": GgufFamily("DeepseekV3ForCausalLM", DEEPSEEK_LAYER, DEEPSEEK_KEYS, EXPERTS,
                            {"attn_k_b.weight": LATENT, "attn_v_b.weight": LATENT}, _deepseek,
                            latent=True),
}
"""By `general.architecture`."""
MIXTURES = {
    "llama": GgufFamily(
        "MixtralForCausalLM", {**LAYER, "ffn_gate_inp": f"{SPARSE}gate"}, LOCAL_EXPERTS,
        experts_at(SPARSE, ("w1", "w3", "w2")), permuted=True),
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
    for key in own.zero:
        if f"{name}.{key}" in file and file.real(f"{name}.{key}"):
            raise file.bad(f"{name}.{key}", "is not served")
    return own
