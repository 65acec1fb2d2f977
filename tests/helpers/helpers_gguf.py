"""GGUF files of tiny models, written with the `gguf` package: its names and its quantisation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from helpers_gguf_rows import DESCRIBED, Named, Put, made, stacked, xielu
from helpers_hybrid import hybrid_model
from helpers_models import tiny_model
from torch import Tensor

ARCHITECTURES = {
    f"{name}ForCausalLM": at for name, at in {
        "Llama": "llama", "Mistral": "mistral3", "Mixtral": "llama", "Qwen2": "qwen2",
        "Qwen3": "qwen3", "Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "Gemma2": "gemma2",
        "Gemma3": "gemma3", "Gemma3n": "gemma3n", "Gemma4": "gemma4",
        "Phi3": "phi3", "Olmo2": "olmo2", "Olmo3": "olmo2", "SmolLM3": "smollm3",
        "Glm": "chatglm", "Glm4": "glm4", "SeedOss": "seed_oss", "Exaone4": "exaone4",
        "Granite": "granite", "GraniteMoe": "granitemoe", "GraniteMoeHybrid": "granitehybrid",
        "DeepseekV3": "deepseek2", "Qwen3Next": "qwen3next", "Qwen3_5": "qwen35",
        "Qwen3_5Moe": "qwen35moe", "Olmoe": "olmoe", "Glm4Moe": "glm4moe", "Dots1": "dots1",
        "MiniMaxM2": "minimax-m2",
        "Ernie4_5": "ernie4_5", "Ernie4_5_Moe": "ernie4_5-moe", "HunYuanDenseV1": "hunyuan-dense",
        "HunYuanMoEV1": "hunyuan-moe", "Lfm2": "lfm2", "DeepseekV2": "deepseek2",
        "GraniteMoeShared": "granitemoe", "Ministral3": "mistral3", "GptOss": "gpt-oss",
        "Cohere": "command-r", "Cohere2": "cohere2", "Starcoder2": "starcoder2",
        "Nemotron": "nemotron", "Arcee": "arcee", "Apertus": "apertus", "Bamba": "granitehybrid",
        "Bloom": "bloom", "Mpt": "mpt",
        "Falcon": "falcon", "FalconH1": "falcon-h1", "FalconMamba": "mamba", "Mamba": "mamba",
        "Mamba2": "mamba2", "Jamba": "jamba", "GPT2": "gpt2", "GPTBigCode": "starcoder",
        "GPTNeoX": "gptneox", "Phi": "phi2", "StableLm": "stablelm", "Olmo": "olmo",
        "Jais2": "jais2", "KimiLinear": "kimi-linear", "Lfm2Moe": "lfm2moe", "Llama4": "llama4",
        "Mistral4": "mistral4", "Glm4MoeLite": "deepseek2", "DeepseekV32": "deepseek32",
        "GlmMoeDsa": "glm-dsa", "NemotronH": "nemotron_h"}.items()}
ARCHITECTURES["GPT2LMHeadModel"] = ARCHITECTURES.pop("GPT2ForCausalLM")
"""That are served from GGUF, and GGUF's names for them."""
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
          "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
          "IQ1_S": (0,), "IQ1_M": (), "NVFP4": (), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Where a block's f16 numbers lie, of types that the package does not make."""
Write = Callable[[gguf.GGUFWriter], None]


def _dequantised_by_the_package() -> Iterator[str]:
    for own, (_, size) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.dequantize(np.zeros((1, size), np.uint8), own)
            yield own.name


KINDS = tuple(_dequantised_by_the_package())
"""Of tensors: all that the package can read."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directories that are made of GGUF files lie elsewhere than the user's."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("actorium.actors.models.gguf_folder.roots", lambda: [path])
    return path


def stored(weight: Tensor, kind: str) -> tuple[np.ndarray, Tensor]:
    """(the weight in this type, what it is worth): types that the package does not make are random
    blocks of its size."""
    wide = weight.detach().float().numpy()
    own = Type[kind]
    if kind in SCALES:
        numbers, size = gguf.GGML_QUANT_SIZES[own]
        rng = np.random.default_rng(wide.size)
        raw = rng.integers(0, 256, (*wide.shape[:-1], wide.shape[-1] // numbers, size), np.uint8)
        for at in SCALES[kind]:
            scales = rng.uniform(-1e-4, 1e-4, raw.shape[:-1]).astype(np.float16)
            raw[..., at:at + 2] = scales[..., None].view(np.uint8)
        if kind == "IQ1_M":  # four bits of the scale are the upper ones of each of its words
            raw[..., 49::2] = raw[..., 49::2] & 15 | np.array([0, 0, 0, 0x10], np.uint8)
        if kind == "NVFP4":  # small scales in e4m3
            raw[..., :4] %= 16
        raw = raw.reshape(*wide.shape[:-1], -1)
    else:
        raw = gguf.quantize(wide, own)
    return raw, torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, own)).reshape(
        wide.shape))


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of Llama's queries or keys as its GGUF files have them (llama.cpp's `permute`)."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def unpaired(weight: Tensor, heads: int) -> Tensor:
    """As the checkpoint has them."""
    order = torch.argsort(paired(torch.arange(len(weight)), heads))
    return weight[order]


def write_model(path: Path, architecture: str, kind: str, seed: int = 0, more: Write | None = None,
                embedding: str | None = None, tensors_each: int = 0, at: str = "",
                **options: Any) -> Any:
    """A tiny random model as a GGUF file, its matrices in this type; returns the transformers model
    of what the file is worth. embedding: type of the embedding and the head; more: writes metadata
    beside that of the architecture; tensors_each: of a file, of several that the package makes
    (PATH-00001-of-00007.gguf, ...); at: GGUF's name for the architecture, of several."""
    make = hybrid_model if ARCHITECTURES[architecture] in DELTA else tiny_model
    model = make(architecture, seed, **options)
    at, config = at or ARCHITECTURES[architecture], model.config
    if at == "nemotron_h" and "moe" in config.layers_block_type:
        at = "nemotron_h_moe"
    writer = gguf.GGUFWriter(str(path), at, split_max_tensors=tensors_each)
    if at in DESCRIBED and "embedding_multiplier" not in (
            config.to_dict() if at == "granitehybrid" else ()):
        DESCRIBED[at](writer, config)
    else:
        describe(writer, config, at)
    for key, numbers in (xielu(model) if at == "apertus" else {}).items():
        writer.add_array(key, numbers)
    if more is not None:
        more(writer)
    with torch.no_grad():
        for name, weight, put in named_tensors(model, at):
            small = weight.dim() == 1 or any(part in name for part in SMALL)
            own = "F32" if small else embedding or kind if name in HEADS else kind
            raw, worth = stored(weight, own)
            writer.add_tensor(name, raw, raw_dtype=Type[own])
            put(worth)
        for name, numbers in rope_factors(config).items():
            writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


HEADS = ("token_embd.weight", "output.weight")
SMALL = (".bias", "ssm_dt.", "ssm_x", "ssm_f_", "ssm_g_", "position_embd", "indexer.", "_norm",
         "gate_inp", "shortconv.conv.", "probs_b", "ssm_conv1d", "ssm_a", "ssm_d",
         "ssm_ba", "ssm_beta", "altup", "laurel", "per_layer_model_proj")
"""Parts of names of what stays in F32."""
RENAMED = {
    ".sinks": ".sinks.weight", ".forget_gate.": ".", ".dt_bias": ".dt_proj.bias",
    "gate.moe_statics": "moe_statics",
    "moe.router.weight": "moe.router.layer.weight", "correction_bias": "correction.bias",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
"""Parts of names in transformers' models, and in checkpoints as the package knows them."""


def named_tensors(model: Any, at: str) -> Named:
    """All of a model's, by the package's names and in the order of rows that llama.cpp's converters
    make."""
    config = model.config
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[NAMED_AS.get(at, at)],
        config.num_hidden_layers)
    found = {**dict(model.named_parameters()), **{
        name: own for name, own in model.named_buffers()
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))}}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    yield from stacked(model)
    for name, weight in found.items():
        own = made(name, weight, config, at)
        if own is not None:
            yield from own
            continue
        layer = name.split(".")[2] if ".layers." in name else ""
        split = {**SPLIT, **TURNED} if at == "gpt-oss" else SPLIT
        make = next((make for end, make in split.items() if name.endswith(end)
                     and (end, at) not in NOT_SPLIT), None)
        if make is not None:
            yield from make(f"blk.{layer}.", weight.data, config)
            continue
        stem = name.replace("model.", "backbone.") if at.startswith("nemotron_h") else name
        stem = stem.removeprefix("transformer.") if at == "bloom" else stem
        for ours, theirs in RENAMED.items():
            stem = stem.replace(ours, theirs)
        to = names.get_name(stem, try_suffixes=(".weight", ".bias"))
        assert to is not None, name
        yield _moved(f"{to}.weight" if to.endswith("_exps") else to, weight.data, config, at)


def _moved(name: str, weight: Tensor, config: Any, at: str) -> tuple[str, Tensor, Put]:
    """A tensor that is one of the file's."""
    heads = 0
    if at in PAIRED and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
    if heads:
        return name, paired(weight, heads), lambda own: weight.copy_(unpaired(own, heads))
    if at in PLUS_ONE and name.endswith("norm.weight") and "ssm" not in name:
        return name, weight + 1, lambda own: weight.copy_(own - 1)
    kind = name.partition(".")[2].partition(".")[2].removesuffix(".weight")
    if at in ("qwen35", "qwen35moe") and kind in VALUE_HEADS:
        return _tiled(name, weight, config, *VALUE_HEADS[kind])
    if name.endswith("ssm_a"):
        flat = weight.shape if at == "qwen3next" else (len(weight), 1)
        return (name, -weight.exp().view(flat),
                lambda own: weight.copy_((-own).log().view_as(weight)))
    if name.endswith("ssm_d"):
        return name, weight.view(-1, 1), lambda own: weight.copy_(own.view_as(weight))
    if name.endswith("ssm_norm.weight") and at == "granitehybrid":
        return (name, weight.view(config.mamba_n_groups, -1),
                lambda own: weight.copy_(own.view_as(weight)))
    if any(part in name for part in ("ssm_conv1d.weight", "shortconv.conv.weight")):
        return name, weight.squeeze(), lambda own: weight.copy_(own.view_as(weight))
    return name, weight, weight.copy_


VALUE_HEADS = {"attn_qkv": (0, True, False), "ssm_conv1d": (0, True, False),
               "attn_gate": (0, False, False), "ssm_beta": (0, False, True),
               "ssm_alpha": (0, False, True), "ssm_a": (0, False, True),
               "ssm_dt.bias": (0, False, True), "ssm_out": (1, False, False)}
"""Tensors that llama.cpp's converters reorder: along which dimension, whether queries and keys come
first, and whether a head is one number."""


def _tiled(name: str, weight: Tensor, config: Any, dim: int, behind: bool,
           single: bool) -> tuple[str, Tensor, Put]:
    """The value heads of all key heads by turns, as llama.cpp's converter writes them."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim if behind else 0
    width = 1 if single else config.linear_value_head_dim
    order = torch.arange(values * width).reshape(keys, values // keys, width).transpose(0, 1)
    order = torch.cat((torch.arange(first), order.flatten() + first))
    away = torch.argsort(order)
    if name.endswith("ssm_a"):
        return name, -weight.exp()[order], lambda own: weight.copy_((-own).log()[away])
    there = weight.squeeze().index_select(dim, order)
    return name, there, lambda own: weight.copy_(own.index_select(dim, away).view_as(weight))


def _halves(names: tuple[str, str], at: str, weight: Tensor, _: Any) -> Named:
    for name, part in zip(names, weight.chunk(2, -2), strict=True):
        yield f"{at}{name}.weight", part.contiguous(), part.copy_


def _by_turns(kind: str, at: str, weight: Tensor, _: Any) -> Named:
    """Gates and ups of GPT-OSS, whose matrices lie on their side."""
    for i, name in enumerate(("gate", "up")):
        part = weight[..., i::2]
        yield (f"{at}ffn_{name}_exps.{kind}",
               (part.transpose(1, 2) if kind == "weight" else part).contiguous(),
               lambda own, part=part: part.copy_(own.transpose(1, 2) if own.dim() == 3 else own))


def _turned_down(kind: str, at: str, weight: Tensor, _: Any) -> Named:
    yield (f"{at}ffn_down_exps.{kind}",
           weight.transpose(1, 2).contiguous() if kind == "weight" else weight,
           lambda own: weight.copy_(own.transpose(1, 2) if own.dim() == 3 else own))


def _shared_halves(at: str, weight: Tensor, config: Any) -> Named:
    end = "_shexp" if config.num_local_experts else ""
    yield from _halves((f"ffn_gate{end}", f"ffn_up{end}"), at, weight, config)


def _shared_down(at: str, weight: Tensor, config: Any) -> Named:
    yield f"{at}ffn_down{'_shexp' if config.num_local_experts else ''}.weight", weight, weight.copy_


def _expansion(at: str, weight: Tensor, config: Any) -> Named:
    heads = weight.unflatten(0, (config.num_attention_heads, -1))
    keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    yield (f"{at}attn_k_b.weight", keys.transpose(1, 2).contiguous(),
           lambda own: keys.copy_(own.transpose(1, 2)))
    yield f"{at}attn_v_b.weight", values.contiguous(), values.copy_


def _delta_parts(at: str, weight: Tensor, config: Any) -> Named:
    """Of each key head its query, key, values and gates; in the file all of one kind together."""
    shared = (config.linear_num_value_heads // config.linear_num_key_heads
              * config.linear_value_head_dim)
    sizes = [config.linear_key_head_dim] * 2 + [shared] * 2
    parts = weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1)
    rows = [len(part) * part.shape[1] for part in parts]

    def put(own: Tensor) -> None:
        for part, each in zip(parts[:3], own.split(rows[:3]), strict=True):
            part.copy_(each.view_as(part))

    yield f"{at}attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in parts[:3]]), put
    yield (f"{at}attn_gate.weight", parts[3].flatten(0, 1),
           lambda own: parts[3].copy_(own.view_as(parts[3])))


SPLIT: dict[str, Callable[[str, Tensor, Any], Named]] = {
    "experts.gate_up_proj": partial(_halves, ("ffn_gate_exps", "ffn_up_exps")),
    "shared_mlp.input_linear.weight": _shared_halves,
    "shared_mlp.output_linear.weight": _shared_down, "self_attn.kv_b_proj.weight": _expansion,
    "linear_attn.in_proj_qkvz.weight": _delta_parts,
}
"""By the end of a name: tensors that are several in a file."""
TURNED = {
    "experts.gate_up_proj": partial(_by_turns, "weight"),
    "experts.gate_up_proj_bias": partial(_by_turns, "bias"),
    "experts.down_proj": partial(_turned_down, "weight"),
    "experts.down_proj_bias": partial(_turned_down, "bias"),
}
"""Those of GPT-OSS."""
NOT_SPLIT = {("experts.gate_up_proj", "qwen3next")}
"""Experts whose gates and ups lie in one tensor, which newer files have."""
NAMED_AS = {"deepseek32": "glm-dsa", "qwen": "qwen2", "codeshell": "starcoder2"}
"""Those that the package does not know, or with fewer tensors, and one whose tensors have the same
names."""
PAIRED = ("arcee", "olmo", "internlm2", "xverse", "baichuan", "minicpm", "llama", "smollm3",
          "granite", "granitemoe", "granitehybrid", "mistral3")
"""Architectures whose rows of queries and keys lie in pairs."""
PLUS_ONE = ("nemotron", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
"""Those whose norms have the 1 that is added in their weights."""


DELTA = ("qwen3next", "qwen35", "qwen35moe")
"""Those with recurrent layers of GatedDeltaNet."""


def rope_factors(config: Any) -> dict[str, list[float]]:
    """Tensors of a longrope's factors, or of a rope of whose frequencies only the first ones turn.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    if (full := ropes.get("full_attention") or {}).get("rope_type") == "proportional":
        half = next(iter(config.to_dict()["per_layer_config"].values()))["head_dim"] // 2
        turning = int(half * full["partial_rotary_factor"])
        return {"rope_freqs.weight": [1.0] * turning + [1e30] * (half - turning)}
    return {f"rope_factors_{name}.weight": ropes[f"{name}_factor"] for name in ("long", "short")
            if f"{name}_factor" in ropes}


EPSILONS = {"codeshell": "norm_epsilon", "command-r": "layer_norm_eps", "cohere2": "layer_norm_eps",
            "starcoder2": "norm_epsilon", "nemotron": "norm_eps"}
"""What configs call that of LayerNorms."""
KEYS: dict[str, str] = {
    "logit_scale": "logit_scale",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_num_experts": "expert_count", "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count", "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_layer_start_index": "leading_dense_block_count",
    "num_shared_expert": "expert_shared_count", "conv_L_cache": "shortconv.l_cache",
    "n_shared_experts": "expert_shared_count", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count", "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank", "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank", "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length", "index_topk": "attention.indexer.top_k",
}
"""Fields of configs, and the keys that they become as they are."""


def describe(writer: gguf.GGUFWriter, config: Any, at: str) -> None:
    """The architecture's metadata, as llama.cpp's converters write it."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if at in EPSILONS:
        writer.add_layer_norm_eps(getattr(config, EPSILONS[at]))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for field, key in KEYS.items():
        value = getattr(config, field, None)
        value = value[0] if isinstance(value, list) else value
        if isinstance(value, float):
            writer.add_float32(f"{at}.{key}", value)
        elif value is not None and value is not False:
            writer.add_uint32(f"{at}.{key}", value)
    ropes = config.rope_parameters
    if ropes is not None:
        writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if hasattr(config, "kv_lora_rank"):
        _describe_latents(writer, config)
        return
    heads, width = config.num_key_value_heads, getattr(
        config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if at == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if at in ("granitehybrid", "lfm2", "lfm2moe"):
        writer.add_head_count_kv([heads if "attention" in kind and "linear" not in kind
                                  else 0 for kind in config.layer_types])
    else:
        writer.add_head_count_kv(heads)
    if at == "granitehybrid":
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if at in ("glm4moe", "dots1"):
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if at in ("minimax-m2", "gpt-oss"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if at in ("mistral3", "gpt-oss"):
        _describe_yarn(writer, ropes, 1.0)
        if "llama_4_scaling_beta" in ropes:
            writer.add_attn_temperature_scale(ropes["llama_4_scaling_beta"])
    if not at.startswith(("granite", "phi3", "chatglm")):
        writer.add_key_length(width)
        writer.add_value_length(width)
    share = (ropes or {}).get("partial_rotary_factor") or float(at in PAIRED)
    if share and at != "granitehybrid":
        writer.add_rope_dimension_count(int(width * share))
    if at in DELTA:
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(2)
    _describe_windows(writer, config, at)


def _describe_windows(writer: gguf.GGUFWriter, config: Any, at: str) -> None:
    ropes, window = config.rope_parameters or {}, getattr(config, "sliding_window", None)
    if "sliding_attention" in ropes and at == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    if at == "phi3":
        writer.add_sliding_window(window or 0)
        writer.add_rope_scaling_orig_ctx_len(ropes.get("original_max_position_embeddings")
                                             or config.max_position_embeddings)
    elif window and at in ("gemma2", "gemma3", "olmo2", "exaone4", "gpt-oss", "cohere2"):
        writer.add_sliding_window(window)
        if at in ("olmo2", "exaone4"):
            writer.add_sliding_window_pattern([kind == "sliding_attention"
                                               for kind in config.layer_types])


def _describe_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    rotated = config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + rotated)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotated)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type in ("deepseek_v2", "deepseek_v3"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if hasattr(
            config, "topk_method") else gguf.ExpertGatingFuncType.SIGMOID)
    _describe_yarn(writer, config.rope_parameters, 0.1)


def _describe_yarn(writer: gguf.GGUFWriter, ropes: dict[str, Any], share: float) -> None:
    """share: of what the logarithm is multiplied by."""
    if ropes.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(ropes["factor"])
        writer.add_rope_scaling_orig_ctx_len(ropes["original_max_position_embeddings"])
        if "mscale_all_dim" in ropes:
            writer.add_rope_scaling_yarn_log_mul(share * ropes["mscale_all_dim"])
