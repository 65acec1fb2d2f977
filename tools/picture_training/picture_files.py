"""Checkpoints of the model of pictures, as transformers lays out a Qwen3-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from actorium.actors.config.tree import Config
from actorium.gpu.families.architectures import read_shape
from actorium.tools.picture_training.picture_batches import PROCESSING, SPECIAL
from actorium.tools.picture_training.picture_net import PictureNet, PictureShape

PATCHES, HEIGHTS = "visual.patch_embed.proj.weight", "visual.heights"
LEARNED = "visual.pos_embed.weight"
PREFIX = "model."


def config_of(s: PictureShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json."""
    token, v = {each: tokenizer.token_to_id(each) for each in SPECIAL}, s.tower
    text = {
        "model_type": "qwen3_vl_text", "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "dtype": "bfloat16", "eos_token_id": token["<|im_end|>"],
        "head_dim": s.head_dim, "hidden_act": "silu", "hidden_size": s.hidden,
        "initializer_range": 0.02, "intermediate_size": s.inner,
        "max_position_embeddings": s.context, "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers, "num_key_value_heads": s.kv_heads,
        "pad_token_id": token["<|endoftext|>"], "rms_norm_eps": s.eps, "rope_theta": s.theta,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": list(s.sections),
                         "rope_type": "default"},
        "tie_word_embeddings": True, "use_cache": True, "vocab_size": s.vocab}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "dtype": "bfloat16", "tie_word_embeddings": True, "text_config": text,
        "image_token_id": token["<|image_pad|>"], "video_token_id": token["<|video_pad|>"],
        "vision_start_token_id": token["<|vision_start|>"],
        "vision_end_token_id": token["<|vision_end|>"],
        "vision_config": {
            "model_type": "qwen3_vl", "depth": v.depth, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": v.hidden, "intermediate_size": v.intermediate, "num_heads": v.heads,
            "in_channels": v.channels, "out_hidden_size": v.out_hidden, "patch_size": v.patch,
            "spatial_merge_size": v.merge, "temporal_patch_size": v.frames,
            "num_position_embeddings": v.positions**2,
            "deepstack_visual_indexes": list(v.deepstack)}}


def preprocessor() -> dict[str, Any]:
    """preprocessor_config.json."""
    p = PROCESSING
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": p.patch_size, "temporal_patch_size": p.temporal_patch_size,
        "merge_size": p.merge_size, "image_mean": list(p.image_mean),
        "image_std": list(p.image_std),
        "size": {"shortest_edge": p.min_pixels, "longest_edge": p.max_pixels}}


def save(model: PictureNet, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights in bf16 and the config files; the tokenizer's are not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    v = model.shape.tower
    named = {name: p.detach() for name, p in model.named_parameters()}
    del named[HEIGHTS]
    named[LEARNED] = model.visual.learned.detach()
    named[PATCHES] = named[PATCHES].view(v.hidden, v.channels, v.frames, v.patch, v.patch)
    state = {PREFIX + name: p.bfloat16().contiguous() for name, p in named.items()}
    partial = folder / "model.safetensors.partial"
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    eos = [tokenizer.token_to_id(each) for each in ("<|im_end|>", "<|endoftext|>")]
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos[1]}
    for name, content in (("config", config_of(model.shape, tokenizer)),
                          ("preprocessor_config", preprocessor()),
                          ("generation_config", generation)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def load(folder: Path) -> PictureNet:
    """Reads a folder written by `save`."""
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    tower = read_shape(folder, Config()).vision
    assert tower is not None
    model = PictureNet(PictureShape(
        tower, c["vocab_size"], c["hidden_size"], c["num_hidden_layers"],
        c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["intermediate_size"],
        c["rope_theta"], tuple(c["rope_scaling"]["mrope_section"]),
        c["max_position_embeddings"], c["rms_norm_eps"]))
    state = {name.removeprefix(PREFIX): tensor.float() for name, tensor in
             load_file(str(folder / "model.safetensors")).items()}
    state[PATCHES] = state[PATCHES].flatten(1)
    state[HEIGHTS] = state.pop(LEARNED)[::tower.positions]
    model.load_state_dict(state)
    return model
