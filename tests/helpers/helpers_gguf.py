"""GGUF files of tiny models, written with the `gguf` package: its names and its quantisation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from helpers_models import tiny_model
from torch import Tensor

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
                 "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
                 "Gemma3ForCausalLM": "gemma3"}
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
                embedding: str | None = None, tensors_each: int = 0, **options: Any) -> Any:
    """A tiny random model as a GGUF file, its matrices in this type; returns the transformers model
    of what the file is worth. embedding: type of the embedding and the head; more: writes metadata
    beside that of the architecture; tensors_each: of a file, of several that the package makes
    (PATH-00001-of-00007.gguf, ...)."""
    model = tiny_model(architecture, seed, **options)
    at, config = ARCHITECTURES[architecture], model.config
    writer = gguf.GGUFWriter(str(path), at, split_max_tensors=tensors_each)
    describe(writer, config, at)
    if more is not None:
        more(writer)
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[at], config.num_hidden_layers)
    found = dict(model.named_parameters())
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    with torch.no_grad():
        for name, weight in _split_experts(found):
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert own is not None, name
            _write(writer, own, weight, config, at, kind, embedding or kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _split_experts(found: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Of all experts the gates and ups apart, as views."""
    parts = []
    for name, weight in found.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = weight.data.chunk(2, 1)
            parts += [(name.replace("gate_up", "gate") + ".weight", gate),
                      (name.replace("gate_up", "up") + ".weight", up)]
        elif name.endswith("experts.down_proj"):
            parts.append((name + ".weight", weight.data))
        else:
            parts.append((name, weight.data))
    return parts


def _write(writer: gguf.GGUFWriter, name: str, weight: Tensor, config: Any, at: str, kind: str,
           embedding: str) -> None:
    """A tensor; `weight` becomes what the file has."""
    heads = 0
    if at == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
    plus = 1 if at == "gemma3" and "norm" in name else 0
    if name in ("token_embd.weight", "output.weight"):
        kind = embedding
    if weight.dim() == 1 or "gate_inp" in name:
        kind = "F32"
    raw, worth = stored(paired(weight, heads) if heads else weight + plus, kind)
    writer.add_tensor(name, raw, raw_dtype=Type[kind])
    weight.copy_(unpaired(worth, heads) if heads else worth - plus)


def describe(writer: gguf.GGUFWriter, config: Any, at: str) -> None:
    """The architecture's metadata."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    near = ropes.get("sliding_attention")
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if near is not None:
        writer.add_float32("gemma3.rope.freq_base_swa", near["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
    if at == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
