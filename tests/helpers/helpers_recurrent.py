"""Tiny random checkpoints of the families that mix recurrent layers and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
}
MAMBA: dict[str, Any] = {
    **BASE, "rms_norm_eps": 1e-4, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 24,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32,
}
ALONE: dict[str, Any] = {
    **{name: BASE[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id",
                                     "pad_token_id")},
    "num_hidden_layers": 3, "layer_norm_epsilon": 1e-4, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [2]},
    "FalconH1ForCausalLM": {**MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 96, "mamba_d_head": 12,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                            "ssm_multipliers": [0.5, 0.7, 1.5, 2.0, 0.3],
                            "mlp_multipliers": [0.6, 1.5], "lm_head_multiplier": 0.5,
                            "embedding_multiplier": 3.0, "key_multiplier": 0.7,
                            "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.2,
                            "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6},
    "Lfm2ForCausalLM": {**BASE, "norm_eps": 1e-4, "block_multiple_of": 24, "layer_types": [
        "conv", "conv", "full_attention", "conv"]},
    "Lfm2MoeForCausalLM": {**BASE, "norm_eps": 1e-4, "num_dense_layers": 1, "num_experts": 6,
                           "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                           "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "Mamba2ForCausalLM": {**ALONE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24,
                          "chunk_size": 32},
    "MambaForCausalLM": ALONE,
    "FalconMambaForCausalLM": ALONE,
    "JambaForCausalLM": {**BASE, "rms_norm_eps": 1e-4, "attn_layer_period": 3,
                         "attn_layer_offset": 2, "num_experts": 6, "num_experts_per_tok": 2},
    "NemotronHForCausalLM": {
        **{name: value for name, value in BASE.items() if name != "num_hidden_layers"},
        "hybrid_override_pattern": "M-M*-ME", "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 32,
        "time_step_min": 1e-20, "n_routed_experts": 6, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56, "layer_norm_epsilon": 1e-4},
    "KimiLinearForCausalLM": {
        **{name: value for name, value in BASE.items() if name != "num_key_value_heads"},
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 40,
        "num_local_experts": 6, "num_experts_per_tok": 2, "linear_head_dim": 16,
        "linear_num_heads": 4, "rms_norm_eps": 1e-4, "layer_types": [
            "linear_attention", "linear_attention", "full_attention", "linear_attention"]},
}
"""Fields of a tiny config, by architecture."""


def recurrent_model(architecture: str, seed: int = 0, **options: Any) -> Any:
    """A random transformers model, fp32, in eval mode, with every parameter random: states that
    neither vanish nor stay, norms near their working point."""
    import transformers

    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
        **{**FAMILIES[architecture], **options})
    config.architectures = [architecture]
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-4.0, 0.5)
            elif name.endswith((".D", "dt_bias")):
                p.normal_(0.0, 1.0)
            elif name.endswith("dt_proj.bias"):
                p.normal_(-1.0, 1.0)
            elif "norm" in name and "proj" not in name:
                p.normal_(1.0, 0.15)
            else:
                p.normal_(0.0, 0.5 if "conv" in name and "proj" not in name else 0.08)
        for name, p in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                p.normal_(0.0, 0.2)
    return model


def write_recurrent(path: Path, architecture: str, seed: int = 0,
                    dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save a tiny random checkpoint in HF format at `path`; returns the transformers model."""
    model = recurrent_model(architecture, seed, **options).to(dtype)
    model.save_pretrained(str(path))
    return model
