"""Tiny random DeepSeek-V3 checkpoints, and the MTP layers of several families as oracles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DEEPSEEK = "DeepseekV3ForCausalLM"
BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7,
        "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0,
        "original_max_position_embeddings": 256}


def deepseek_config(**options: Any) -> Any:
    """A transformers config of a tiny model; options override its fields."""
    import transformers

    config = transformers.DeepseekV3Config(**{**BASE, **options})
    config.architectures = [DEEPSEEK]
    return config


def randomise(model: Any, skip: tuple[str, ...] = ()) -> None:
    """Every parameter and kept buffer at random, norms near their working point."""
    plus_one = "Qwen" in type(model.config).__name__
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith(skip):
                continue
            p.normal_(1.0 if "norm" in name and not plus_one else 0.0,
                      0.15 if "norm" in name else 0.09)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)


def deepseek_model(seed: int = 0, **options: Any) -> Any:
    """A random transformers model, fp32, in eval mode."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.DeepseekV3ForCausalLM(deepseek_config(**options)).eval()
    randomise(model)
    return model


def write_deepseek(path: Path, seed: int = 0, dtype: torch.dtype = torch.float32,
                   **options: Any) -> Any:
    """Save a tiny random checkpoint in HF format at `path`; returns the transformers model."""
    model = deepseek_model(seed, **options)
    for _, p in model.named_parameters():
        p.data = p.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(str(path))
    return model


def add_mtp(path: Path, model: Any, seed: int = 1) -> Any:
    """Give the checkpoint of `model` at `path` a random MTP layer under the names its family uses;
    returns transformers' `MtpModel` of it."""
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(seed)
    as_deepseek = model.config.model_type in ("deepseek_v3", "deepseek_v32", "glm4_moe")
    if not as_deepseek:
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel(model, 1).eval()
    randomise(mtp, ("embed_tokens", "shared_head"))
    file = path / "model.safetensors"
    tensors = load_file(str(file))
    own = {name: tensor for name, tensor in mtp.state_dict().items() if name.startswith("layers.")}
    names = _deepseek if as_deepseek else _qwen
    for name, tensor in own.items():
        for stored, part in names(name, tensor, model.config):
            tensors[stored] = part.contiguous().clone()
    save_file(tensors, str(file), metadata={"format": "pt"})
    return mtp


def _deepseek(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Each expert apart, as DeepSeek's own; the copies of embedding and head are noise here."""
    at = f"model.layers.{config.num_hidden_layers}."
    name = name.removeprefix("layers.0.")
    if name.startswith("enorm"):
        noise = torch.full((config.vocab_size, config.hidden_size), torch.nan)
        yield f"{at}embed_tokens.weight", noise
        yield f"{at}shared_head.head.weight", noise
    if name.endswith("experts.gate_up_proj"):
        for e, both in enumerate(tensor):
            for kind, part in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                yield f"{at}mlp.experts.{e}.{kind}.weight", part
    elif name.endswith("experts.down_proj"):
        for e, part in enumerate(tensor):
            yield f"{at}mlp.experts.{e}.down_proj.weight", part
    else:
        name = name.replace("post_norm.", "shared_head.norm.", 1)
        yield at + name.removeprefix("mtp_block."), tensor


def _qwen(name: str, tensor: Tensor, _: Any) -> Iterator[tuple[str, Tensor]]:
    name = name.removeprefix("layers.0.")
    other = {"enorm.weight": "pre_fc_norm_embedding.weight", "eh_proj.weight": "fc.weight",
             "hnorm.weight": "pre_fc_norm_hidden.weight", "post_norm.weight": "norm.weight"}
    yield "mtp." + (other.get(name) or name.replace("mtp_block.", "layers.0.", 1)), tensor
