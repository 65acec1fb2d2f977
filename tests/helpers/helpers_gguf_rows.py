"""What llama.cpp's converters make of the tensors and fields of architectures that are not Llama's
kin: state spaces, GPTs, and what else they turn, negate, or put into one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

Put = Callable[[Tensor], object]
Named = Iterator[tuple[str, Tensor, Put]]
"""(GGUF's name, the tensor as the file has it, what makes the model's own of one)"""
Make = Callable[[str, Tensor, Any], Named]
"""(what names begin with, the model's tensor, its config) -> those of the file"""


def as_it_is(name: str) -> Make:
    def make(at: str, weight: Tensor, _: Any) -> Named:
        yield f"{at}{name}", weight, weight.copy_
    return make


def turned(name: str) -> Make:
    """On its side."""
    def make(at: str, weight: Tensor, _: Any) -> Named:
        yield (f"{at}{name}", weight.transpose(-1, -2).contiguous(),
               lambda own: weight.copy_(own.transpose(-1, -2)))
    return make


def shaped(name: str, shape: Callable[[Tensor, Any], tuple[int, ...]]) -> Make:
    """In another shape."""
    def make(at: str, weight: Tensor, config: Any) -> Named:
        yield (f"{at}{name}", weight.reshape(shape(weight, config)),
               lambda own: weight.copy_(own.view_as(weight)))
    return make


def negated(name: str, shape: Callable[[Tensor], tuple[int, ...]] = lambda own: (*own.shape, 1)
            ) -> Make:
    """What a state fades by, of its logarithm."""
    def make(at: str, weight: Tensor, _: Any) -> Named:
        yield (f"{at}{name}", -weight.exp().view(shape(weight)),
               lambda own: weight.copy_((-own).log().view_as(weight)))
    return make


def scaled(name: str, factor: Callable[[Any, Tensor], Tensor | float]) -> Make:
    """With a factor in it."""
    def make(at: str, weight: Tensor, config: Any) -> Named:
        by = factor(config, weight)
        yield f"{at}{name}", weight * by, lambda own: weight.copy_(own / by)
    return make


def by_head(name: str, groups: Callable[[Any], int]) -> Make:
    """Of each key head its queries, its key and its value; in the file all of one kind together."""
    def make(at: str, weight: Tensor, config: Any) -> Named:
        each = weight.unflatten(0, (groups(config), -1, config.hidden_size
                                    // config.num_attention_heads))
        parts = (each[:, :-2], each[:, -2:-1], each[:, -1:])
        rows = [part.shape[0] * part.shape[1] * part.shape[2] for part in parts]

        def put(own: Tensor) -> None:
            for part, rest in zip(parts, own.split(rows), strict=True):
                part.copy_(rest.view_as(part))
        yield f"{at}{name}", torch.cat([part.flatten(0, 2) for part in parts]), put
    return make


def halves(gate: str, up: str, on_its_side: bool = False) -> Make:
    """Of all experts."""
    def make(at: str, weight: Tensor, _: Any) -> Named:
        for name, part in zip((gate, up), weight.chunk(2, -1 if on_its_side else -2), strict=True):
            turn = part.transpose(-1, -2) if on_its_side else part
            yield f"{at}{name}", turn.contiguous(), turn.copy_
    return make


def _in_proj(config: Any, _: Tensor) -> Tensor:
    """Of Falcon-H1: of z, x, B, C and the time steps."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    return (config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers)
            .repeat_interleave(sizes)[:, None])


def _convolutions(at: str, weight: Tensor, _: Any) -> Named:
    """Kimi Linear's, of queries, keys and values."""
    for name, part in zip("qkv", weight.chunk(3), strict=True):
        yield (f"{at}ssm_conv1d_{name}.weight", part.view(1, len(part), 1, -1),
               lambda own, part=part: part.copy_(own.view_as(part)))


EXPERTS = {"experts.gate_up_proj": halves("ffn_gate_exps.weight", "ffn_up_exps.weight"),
           "experts.down_proj": as_it_is("ffn_down_exps.weight")}
MAMBA: dict[str, Make] = {
    "mixer.A_log": negated("ssm_a", lambda own: tuple(own.shape)), "mixer.D": as_it_is("ssm_d"),
    "mamba.A_log": negated("ssm_a", lambda own: tuple(own.shape)), "mamba.D": as_it_is("ssm_d"),
    "conv1d.weight": shaped("ssm_conv1d.weight", lambda own, _: own.squeeze().shape),
}
MAMBA2: dict[str, Make] = {
    **MAMBA, "mixer.A_log": negated("ssm_a"), "mamba.A_log": negated("ssm_a"),
    "mixer.D": shaped("ssm_d", lambda own, _: (*own.shape, 1)),
    "mamba.D": shaped("ssm_d", lambda own, _: (*own.shape, 1)),
    "mixer.dt_bias": as_it_is("ssm_dt.bias"), "mamba.dt_bias": as_it_is("ssm_dt.bias"),
    "mixer.norm.weight": shaped("ssm_norm.weight", lambda _, config: (config.n_groups, -1)),
    "mamba.norm.weight": shaped("ssm_norm.weight", lambda _, config: (config.mamba_n_groups, -1)),
}
MAKES: dict[str, dict[str, Make]] = {
    "mamba": MAMBA, "mamba2": MAMBA2, "jamba": {**MAMBA, **EXPERTS},
    "falcon-h1": {
        **MAMBA2, "pre_ff_layernorm.weight": as_it_is("ffn_norm"),
        "down_proj.weight": scaled("ffn_down.weight", lambda own, _: own.mlp_multipliers[1]),
        "gate_proj.weight": scaled("ffn_gate.weight", lambda own, _: own.mlp_multipliers[0]),
        "k_proj.weight": scaled("attn_k.weight", lambda own, _: (
            own.key_multiplier * own.attention_in_multiplier)),
        "q_proj.weight": scaled("attn_q.weight", lambda own, _: own.attention_in_multiplier),
        "v_proj.weight": scaled("attn_v.weight", lambda own, _: own.attention_in_multiplier),
        "o_proj.weight": scaled("attn_output.weight", lambda own, _: own.attention_out_multiplier),
        "mamba.out_proj.weight": scaled("ssm_out.weight", lambda own, _: own.ssm_out_multiplier),
        "mamba.in_proj.weight": scaled("ssm_in.weight", _in_proj),
        "lm_head.weight": scaled("output.weight", lambda own, _: own.lm_head_multiplier),
        "embed_tokens.weight": scaled("token_embd.weight", lambda own, _: (
            own.embedding_multiplier))},
    "nemotron_h": MAMBA2,
    "nemotron_h_moe": {
        **MAMBA2, "experts.up_proj": as_it_is("ffn_up_exps.weight"),
        "experts.down_proj": as_it_is("ffn_down_exps.weight"),
        "fc1_latent_proj.weight": as_it_is("ffn_latent_down.weight"),
        "fc2_latent_proj.weight": as_it_is("ffn_latent_up.weight")},
    "gpt2": {f"{name}.weight": turned(f"{own}.weight") for name, own in (
        ("c_attn", "attn_qkv"), ("attn.c_proj", "attn_output"), ("c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"))},
    "gptneox": {f"query_key_value.{kind}": by_head(
        f"attn_qkv.{kind}", lambda own: own.num_attention_heads) for kind in ("weight", "bias")},
    "bloom": {f"query_key_value.{kind}": by_head(
        f"attn_qkv.{kind}", lambda own: own.num_attention_heads) for kind in ("weight", "bias")},
    "falcon": {
        "query_key_value.weight": by_head("attn_qkv.weight", lambda own: (
            own.num_kv_heads if own.new_decoder_architecture else 1))},
    "llama4": {
        "experts.gate_up_proj": halves("ffn_gate_exps.weight", "ffn_up_exps.weight", True),
        "experts.down_proj": turned("ffn_down_exps.weight")},
    "lfm2moe": {
        **EXPERTS, "conv.conv.weight": shaped("shortconv.conv.weight", lambda own, _: (
            own.squeeze(1).shape)), "expert_bias": as_it_is("exp_probs_b.bias")},
    "gemma3n": {"correct_output_scale": as_it_is("altup_correct_scale.weight")},
    "gemma4": {
        "layer_scalar": as_it_is("layer_output_scale.weight"),
        "router.scale": as_it_is("ffn_gate_inp.scale"),
        "per_expert_scale": as_it_is("ffn_down_exps.scale"),
        "experts.gate_up_proj": as_it_is("ffn_gate_up_exps.weight"),
        "experts.down_proj": as_it_is("ffn_down_exps.weight")},
    "kimi-linear": {
        **EXPERTS, "A_log": negated("ssm_a", lambda own: tuple(own.shape)),
        "dt_bias": as_it_is("ssm_dt.bias"), "conv1d.weight": _convolutions},
    **dict.fromkeys(("mistral4", "deepseek32", "glm-dsa"), EXPERTS),
}
"""By architecture, and by the end of the model's names; others are as the package names them."""
SKIPPED = (".act_fn.", "rotary_emb")
"""Parts of names of what is no tensor of a file."""
HEAD_NORM = re.compile(r"\.([qk])_layernorm\.norms\.(\d+)\.weight")
ALTUP = re.compile(r"altup_(unembed_)?projections\.\d+\.weight")


def made(name: str, weight: Tensor, config: Any, at: str) -> Named | None:
    """What these tables say of a tensor; None: nothing."""
    number = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    prefix = f"blk.{number[1]}." if number else ""
    if any(part in name for part in SKIPPED) or _stacked_as(name):
        return iter(())
    make = next((make for end, make in MAKES.get(at, {}).items() if name.endswith(end)), None)
    return None if make is None else make(prefix, weight.data, config)


def _stacked_as(name: str) -> str:
    """The file's tensor that holds this one and others; "": none."""
    if (part := HEAD_NORM.search(name)) is not None:
        return f"blk.{name.split('.')[2]}.attn_{part[1]}_norm.weight"
    if (part := ALTUP.search(name)) is not None:
        return f"altup_{'unembd_' if part[1] else ''}proj.weight"
    return ""


def stacked(model: Any) -> Named:
    """StableLM's norms of queries and keys, those of a layer's heads in one tensor, and what
    spreads and merges Gemma 3n's streams."""
    found: dict[str, list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if to := _stacked_as(name):
            found.setdefault(to, []).append(weight.data)
    for name, parts in found.items():
        yield name, torch.stack(parts), lambda own, parts=parts: [
            part.copy_(row) for part, row in zip(parts, own, strict=True)]


def drafting(checkpoint: Path, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Of the layer that drafts in a checkpoint, as DeepSeek and Qwen have it: the file's names, and
    the tensors. Of experts those of all are one."""
    qwen = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
            "norm": "shared_head_norm", "shared_head.norm": "shared_head_norm"}
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, layers + 1)
    experts: dict[str, list[Tensor]] = {}
    tensors = load_file(checkpoint / "model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(own) if own.isdecimal() else 0
                                                  for own in name.split(".")]):
        weight, stem = tensors[name], re.sub(r"^mtp\.layers\.0", f"model.layers.{layers}", name)
        if not stem.startswith(("mtp.", f"model.layers.{layers}.")):
            continue
        own = stem.removeprefix("mtp.").removeprefix(f"model.layers.{layers}.")
        if name.startswith("mtp.") and "norm" in name:
            weight = weight + 1  # as in all of Qwen's layers
        module, _, kind = own.rpartition(".")
        if module in ("eh_proj", "enorm", "hnorm") or module in qwen:
            yield f"blk.{layers}.nextn.{qwen.get(module, module)}.{kind}", weight
        elif (part := re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj", module)) is not None:
            experts.setdefault(f"blk.{layers}.ffn_{part[1]}_exps.weight", []).append(weight)
        elif not module.startswith(("embed_tokens", "shared_head")):
            to = places.get_name(stem.replace("correction_bias", "correction.bias"),
                                 try_suffixes=(".weight", ".bias"))
            assert to is not None, name
            yield to, weight
    for name, parts in experts.items():
        yield name, torch.stack(parts)


# --- metadata ------------------------------------------------------------------------------------

Writer = gguf.GGUFWriter


def _sizes(writer: Writer, config: Any, width: int | list[int] | None = None) -> None:
    """width: of the MLP, or of each layer's."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(4 * config.hidden_size if width is None else width)


def _scan(writer: Writer, config: Any, inner: int, conv: int, state: int, rank: int) -> None:
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    if (groups := getattr(config, "n_groups", getattr(config, "mamba_n_groups", None))) is not None:
        writer.add_ssm_group_count(groups)


def _alone(writer: Writer, config: Any, inner: int, rank: int) -> None:
    """Of recurrent layers alone."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    _scan(writer, config, inner, config.conv_kernel, config.state_size, rank)


def mamba(writer: Writer, config: Any) -> None:
    _alone(writer, config, config.intermediate_size, config.time_step_rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def mamba2(writer: Writer, config: Any) -> None:
    _alone(writer, config, config.expand * config.hidden_size, config.num_heads)


def _kv_heads(config: Any, attends: list[bool]) -> list[int]:
    return [config.num_key_value_heads if own else 0 for own in attends]


def bamba(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _scan(writer, config, config.mamba_expand * config.hidden_size, config.mamba_d_conv,
          config.mamba_d_state, config.mamba_n_heads)
    writer.add_head_count_kv(_kv_heads(config, [
        i in config.attn_layer_indices for i in range(config.num_hidden_layers)]))
    width = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(width * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_scaling_finetuned(True)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def falcon_h1(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _scan(writer, config, config.mamba_d_ssm, config.mamba_d_conv, config.mamba_d_state,
          config.mamba_n_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def jamba(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _scan(writer, config, config.mamba_expand * config.hidden_size, config.mamba_d_conv,
          config.mamba_d_state, config.mamba_dt_rank)
    writer.add_head_count_kv(_kv_heads(config, [
        i % config.attn_layer_period == config.attn_layer_offset
        for i in range(config.num_hidden_layers)]))
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def nemotron_h(writer: Writer, config: Any) -> None:
    kinds = config.layers_block_type
    writer.add_block_count(len(kinds))
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(2**20)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(_kv_heads(config, ["full" in kind for kind in kinds]))
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_finetuned(False)
    _scan(writer, config, config.mamba_num_heads * config.mamba_head_dim, config.conv_kernel,
          config.ssm_state_size, config.mamba_num_heads)
    if "moe" not in kinds:
        writer.add_feed_forward_length([
            config.intermediate_size if kind == "mlp" else 0 for kind in kinds])
        return
    writer.add_feed_forward_length([
        config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if getattr(config, "moe_latent_size", None):
        writer.add_moe_latent_size(config.moe_latent_size)


def gpt(writer: Writer, config: Any) -> None:
    _sizes(writer, config)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if getattr(config, "multi_query", False):
        writer.add_head_count_kv(1)


def gptneox(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    _partly(writer, config)
    writer.add_parallel_residual(config.use_parallel_residual)


def _partly(writer: Writer, config: Any) -> None:
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * (
        config.hidden_size // config.num_attention_heads)))


def phi2(writer: Writer, config: Any) -> None:
    _sizes(writer, config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_head_count_kv(config.num_attention_heads)
    _partly(writer, config)
    writer.add_add_bos_token(False)


def stablelm(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _partly(writer, config)
    writer.add_parallel_residual(config.use_parallel_residual)


def falcon(writer: Writer, config: Any) -> None:
    _sizes(writer, config)
    writer.add_tensor_data_layout("jploski")
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)


def bloom(writer: Writer, config: Any) -> None:
    _sizes(writer, config, 4 * config.hidden_size)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def mpt(writer: Writer, config: Any) -> None:
    bloom(writer, config)
    writer.add_clamp_kqv(config.attn_config.clip_qkv)
    writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)


def _usual(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def olmo(writer: Writer, config: Any) -> None:
    _usual(writer, config)
    writer.add_layer_norm_eps(1e-5)
    if config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


def jais2(writer: Writer, config: Any) -> None:
    _usual(writer, config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)


def llama4(writer: Writer, config: Any) -> None:
    _usual(writer, config)
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.attention_chunk_size is None:
        writer.add_sliding_window(0)


def apertus(writer: Writer, config: Any) -> None:
    _usual(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)


def kimi_linear(writer: Writer, config: Any) -> None:
    _sizes(writer, config, config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv([1 if "full" in kind else 0 for kind in config.layer_types])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)


def _gemma(writer: Writer, config: Any, widths: int | list[int]) -> None:
    ropes = config.rope_parameters
    _sizes(writer, config, widths)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([own == "sliding_attention" for own in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def gemma3n(writer: Writer, config: Any) -> None:
    _gemma(writer, config, config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_activation_sparsity_scale(torch.tensor(
        config.activation_sparsity_pattern).mul(2).sub(1).erfinv().mul(2 ** 0.5).tolist())


def gemma4(writer: Writer, config: Any) -> None:
    plain = config.to_dict()  # what the config has of all layers cannot be read otherwise
    full: dict[str, int] = next(iter(plain["per_layer_config"].values()))
    layers, width = config.num_hidden_layers, config.intermediate_size
    _gemma(writer, config, [width * (1 + (i >= layers - config.num_kv_shared_layers))
                            for i in range(layers)] if config.use_double_wide_mlp else width)
    heads = plain["num_key_value_heads"]
    writer.add_head_count_kv(heads if "num_key_value_heads" not in full else [
        full["num_key_value_heads"] if own == "full_attention" else heads
        for own in config.layer_types])
    for end, width in (("", full["head_dim"]), ("_swa", plain["head_dim"])):
        for add in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{add}{end}")(width)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


DESCRIBED: dict[str, Callable[[Writer, Any], None]] = {
    "mamba": mamba, "mamba2": mamba2, "granitehybrid": bamba, "falcon-h1": falcon_h1,
    "jamba": jamba, "nemotron_h": nemotron_h, "nemotron_h_moe": nemotron_h, "gpt2": gpt,
    "starcoder": gpt, "gptneox": gptneox, "phi2": phi2, "stablelm": stablelm,
    "orion": stablelm, "falcon": falcon, "bloom": bloom, "mpt": mpt,
    "olmo": olmo, "jais2": jais2, "llama4": llama4, "apertus": apertus, "kimi-linear": kimi_linear,
    "gemma3n": gemma3n, "gemma4": gemma4,
}
"""What writes the metadata of these."""


def xielu(model: Any) -> dict[str, list[float]]:
    """Numbers of Apertus's activations, by their keys."""
    return {f"xielu.{own}": [getattr(layer.mlp.act_fn, own).item() for layer in model.model.layers]
            for own in ("alpha_n", "alpha_p", "beta", "eps")}
