"""Checkpoints of the demo model, as transformers lays out a Qwen3.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actorium.tools.demo_training.training_model import DemoModel, DemoShape
from actorium.tools.demo_training.training_mtp import Mtp

_MTP = "mtp."


def config_of(s: DemoShape, eos: list[int], drafts: bool) -> dict[str, Any]:
    """Returns config.json. eos: the token that ends a turn, then the one that ends a text; drafts:
    whether there is an MTP layer."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": eos[0],
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.inner,
        "layer_types": list(s.kinds),
        "linear_conv_kernel_dim": s.width,
        "linear_key_head_dim": s.delta_key_dim,
        "linear_num_key_heads": s.delta_keys,
        "linear_num_value_heads": s.delta_values,
        "linear_value_head_dim": s.delta_value_dim,
        "max_position_embeddings": s.context,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": int(drafts),
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": s.heads,
        "num_hidden_layers": len(s.kinds),
        "num_key_value_heads": s.kv_heads,
        "pad_token_id": eos[-1],
        "rms_norm_eps": s.eps,
        "rope_parameters": {
            "partial_rotary_factor": 1.0,
            "rope_theta": s.theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": s.vocab,
    }


def _generation(eos: list[int]) -> dict[str, Any]:
    return {
        "do_sample": True,
        "eos_token_id": eos,
        "pad_token_id": eos[-1],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
    }


def save(model: DemoModel, mtp: Mtp | None, folder: Path, eos: list[int]) -> None:
    """Writes weights in bf16 and both config files."""
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(model.named_parameters())
    if mtp is not None:
        named |= {_MTP + name: p for name, p in mtp.named_parameters()}
    state = {name: p.detach().bfloat16().contiguous() for name, p in named.items()}
    partial = folder / "model.safetensors.partial"
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    config = config_of(model.shape, eos, mtp is not None)
    for name, content in (("config", config), ("generation_config", _generation(eos))):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[DemoModel, Mtp | None]:
    """Reads a folder written by `save`. dtype: of the computation."""
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = DemoShape(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        kinds=tuple(c["layer_types"]),
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        inner=c["intermediate_size"],
        delta_keys=c["linear_num_key_heads"],
        delta_values=c["linear_num_value_heads"],
        delta_key_dim=c["linear_key_head_dim"],
        delta_value_dim=c["linear_value_head_dim"],
        width=c["linear_conv_kernel_dim"],
        context=c["max_position_embeddings"],
        theta=c["rope_parameters"]["rope_theta"],
        eps=c["rms_norm_eps"],
    )
    model, state = DemoModel(shape, dtype), load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name: t for name, t in state.items() if not name.startswith(_MTP)})
    if not c.get("mtp_num_hidden_layers"):
        return model, None
    mtp = Mtp(shape)
    mtp.load_state_dict({n.removeprefix(_MTP): t for n, t in state.items() if n.startswith(_MTP)})
    return model, mtp
