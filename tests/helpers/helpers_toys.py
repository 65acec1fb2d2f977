"""A tiny random checkpoint of every model class that is served, by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers_configs import CONFIGS, SMALL, TOWER_25, VISION, name_of
from safetensors.torch import load_file, save_file

FIRST: dict[str, dict[str, Any]] = {}
"""By class, the first of `CONFIGS`."""
for _fields in CONFIGS:
    FIRST.setdefault(name_of(_fields), _fields)
NO_SPECIALS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Many classes' own lie beyond a toy's vocabulary."""
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
TOWERS = {
    "Gemma3ForConditionalGeneration": TOWER,
    "Gemma4ForConditionalGeneration": {**TOWER, "num_key_value_heads": 2, "head_dim": 16,
                                       "position_embedding_size": 16},
    "Mistral3ForConditionalGeneration": {**TOWER, "head_dim": 16},
    "Llama4ForConditionalGeneration": {**TOWER, "vision_output_dim": 32,
                                       "projector_input_dim": 32, "projector_output_dim": 32}}
"""Vision towers of classes that have another kind than Qwen's."""
WIDE = {**dict.fromkeys(("OlmoeForCausalLM", "PhiForCausalLM", "StableLmForCausalLM",
                         "HeliumForCausalLM", "FalconForCausalLM", "PersimmonForCausalLM",
                         "GPTNeoXForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM",
                         "GPTJForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
                         "MptForCausalLM"),
                        {"hidden_size": 128}),
        "Qwen2_5_VLForConditionalGeneration": {
            "hidden_size": 128, "rope_scaling": {"type": "mrope", "rope_type": "default",
                                                 "mrope_section": [4, 6, 6]},
            "vision_config": {**TOWER_25, "out_hidden_size": 128}},
        **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), {
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}),
        "Mamba2ForCausalLM": {"head_dim": 16},
        **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
                        {"global_head_dim": 64, "pad_token_id": 0}),
        "NemotronHForCausalLM": {"time_step_min": 1e-20}}
"""What heads of 32 numbers, which C's attention asks for, change in a class; Mamba-2's are others.
"""


STANDS_IN = {"InternLM3ForCausalLM": "LlamaForCausalLM",
             "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM"}
"""Classes of transformers with the tensors of those that it lacks, or whose tower it cannot make.
"""
OF_LLAMA = {"InternLM3ForCausalLM": {"attention_bias": True, "mlp_bias": True}}
"""What they ask for."""


def toy_fields(architecture: str, dtype: str, more: dict[str, Any] | None = None
               ) -> dict[str, Any]:
    """The config's fields. more: fields of its text part."""
    fields = FIRST[architecture]
    text = {**SMALL, **fields.get("text_config", fields), **NO_SPECIALS, "head_dim": 32,
            **WIDE.get(architecture, {}), "dtype": dtype, **(more or {})}
    if "kv_lora_rank" in fields:  # their heads' sizes are their own, and each has its keys
        del text["head_dim"], text["num_key_value_heads"]
    if architecture == "FalconForCausalLM":
        del text["head_dim"]
    if "text_config" not in fields:
        return text
    tower = TOWERS.get(architecture, {**VISION, "num_position_embeddings": 25})
    return {"vision_config": tower, **fields, "text_config": text, **NO_SPECIALS}


def write_toy(path: Path, architecture: str, dtype: torch.dtype = torch.float32,
              **more: Any) -> Any:
    """Writes one at `path`; returns transformers' model, in eval mode. Matrices are random and
    large enough that tokens differ; vectors (norms, biases, decays) are noise around their own
    initial values. more: fields of the config."""
    made = getattr(transformers, STANDS_IN.get(architecture, architecture))
    fields = toy_fields(architecture, str(dtype).removeprefix("torch."), more)
    torch.manual_seed(7)
    text = fields.get("text_config", fields) if architecture in STANDS_IN else fields
    model = made(made.config_class(**text, **OF_LLAMA.get(architecture, {}))).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + (weight if weight.ndim == 1 else 0))
    model.to(dtype).save_pretrained(path)
    if architecture in STANDS_IN:
        (path / "config.json").write_text(json.dumps(fields))
    if architecture in STANDS_IN and "text_config" in fields:
        file = str(path / "model.safetensors")
        save_file({name.replace("model.", "model.language_model.", 1): own
                   for name, own in load_file(file).items()}, file, {"format": "pt"})
    return model
