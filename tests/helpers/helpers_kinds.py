"""Tiny checkpoints by a word: one for each kind of layer."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers_deepseek import add_mtp, write_deepseek
from helpers_drafting import follow_tokens
from helpers_hybrid import DENSE, MOE, SPARSE, write_hybrid
from helpers_mamba import write_granite
from helpers_models import write_checkpoint
from helpers_text import byte_level, write_tokenizer
from helpers_toys import write_toy
from safetensors.torch import load_file, save_file

LOUD = 8
"""Times that what experts give is made larger."""
EXPERTS_OUT = (".experts.", ".down_proj.weight"), (".block_sparse_moe.", ".output_linear.weight")
"""In and at the end of their last matrices' names."""


def write_kind(path: Path, kind: str) -> None:
    """A tiny random checkpoint with layers of a kind; "hybrid" and "deepseek" have an MTP layer."""
    if kind == "hybrid":
        add_mtp(path, write_hybrid(path, DENSE, 5, mtp_num_hidden_layers=1))
    elif kind == "deepseek":
        add_mtp(path, write_deepseek(path, 3))
    elif kind == "windows":
        write_checkpoint(path, "Gemma3ForCausalLM", seed=5, sliding_window=9,
                         layer_types=["sliding_attention", "full_attention"] * 2,
                         num_hidden_layers=4)
    elif kind == "capped":
        write_checkpoint(path, "Gemma2ForCausalLM", seed=5, sliding_window=9, head_dim=32,
                         attn_logit_softcapping=2.0, final_logit_softcapping=4.0)
    elif kind == "shared-pages":
        write_checkpoint(path, "Gemma4ForCausalLM", seed=5, sliding_window=9, head_dim=32,
                         global_head_dim=64, num_hidden_layers=6, attention_k_eq_v=True,
                         num_global_key_value_heads=1, num_kv_shared_layers=2,
                         hidden_size_per_layer_input=32, vocab_size_per_layer_input=199,
                         layer_types=["sliding_attention", "full_attention"] * 3)
    elif kind == "mamba":
        write_granite(path, seed=5, num_local_experts=0, num_experts_per_tok=0)
    elif kind == "latent":
        write_deepseek(path, seed=5)
    elif kind in ("experts", "sparse"):
        write_hybrid(path, MOE if kind == "experts" else SPARSE, 5)
    elif kind == "llama":
        write_checkpoint(path, "LlamaForCausalLM", seed=5)
    elif kind == "chunks":
        write_checkpoint(path, "Llama4ForCausalLM", seed=5, intermediate_size_mlp=80,
                         interleave_moe_layer_step=2, num_local_experts=5, floor_scale=7,
                         attention_chunk_size=32, no_rope_layer_interval=3)
    elif kind == "scaled-queries":
        write_checkpoint(path, "Ministral3ForCausalLM", seed=5, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 8})
    elif kind == "norm-behind-rope":
        write_checkpoint(path, "HunYuanDenseV1ForCausalLM", seed=5)
    elif kind == "norms-after":
        write_checkpoint(path, "Olmo3ForCausalLM", seed=5, sliding_window=9)
    elif kind == "layer-norms":
        write_checkpoint(path, "CohereForCausalLM", seed=5, use_qk_norm=True)
    elif kind == "positions":
        write_checkpoint(path, "GPT2LMHeadModel", seed=5)
    else:
        write_checkpoint(path, seed=5)


def write_bf16_kind(path: Path, kind: str) -> None:
    """One of a kind, or of a class by its name, in bfloat16, of a size that `--exact on` may take,
    with a byte-level tokenizer (and a few tokens that it does not know); "qwen35" and "deepseek"
    have an MTP layer whose drafts are often right. A token of a mixture has eight experts, whose
    sum weighs as much as what it is added to, as in trained models: else faults of that sum would
    not show (that of two or three is the same in whichever order; and one of little weight is
    rounded away)."""
    dtype, tokenizer = torch.bfloat16, byte_level()
    # An odd number of tokens: with ranks the head has rows that are padding.
    common = {"vocab_size": 283, "eos_token_id": tokenizer.token_to_id("<eos>")}
    if kind == "llama":
        write_checkpoint(path, "LlamaForCausalLM", dtype=dtype, head_dim=32, **common)
    elif kind == "gemma3":
        write_checkpoint(path, "Gemma3ForCausalLM", dtype=dtype, head_dim=32, sliding_window=32,
                         sliding_window_pattern=2, **common)
    elif kind == "moe":
        write_hybrid(path, MOE, 5, dtype, head_dim=32, num_experts=16, num_experts_per_tok=8,
                     **common)
        _let_experts_weigh(path)
    elif kind == "qwen35":
        add_mtp(path, write_hybrid(
            path, DENSE, 5, dtype, mtp_num_hidden_layers=1, head_dim=32, num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2, **common))
        follow_tokens(path)
    elif kind == "granite":
        write_granite(path, 5, dtype, num_local_experts=16, num_experts_per_tok=8,
                      mamba_n_groups=2, hidden_size=128, mamba_n_heads=16, **common)
        _let_experts_weigh(path)
    elif kind == "deepseek":
        add_mtp(path, write_deepseek(path, 3, dtype, n_routed_experts=32, num_experts_per_tok=8,
                                     **common))
        follow_tokens(path)
    elif kind == "qwen3":
        write_checkpoint(path, dtype=dtype, head_dim=32, **common)
    else:
        write_toy(path, kind, dtype, **common)
    write_tokenizer(path, tokenizer)


def _let_experts_weigh(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(str(file))
    last = [name for name in tensors
            if any(part in name and name.endswith(end) for part, end in EXPERTS_OUT)]
    assert last, "no mixture"
    save_file(tensors | {name: tensors[name] * LOUD for name in last}, str(file), {"format": "pt"})
