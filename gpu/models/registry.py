"""Which architectures are served, and loading one."""

from __future__ import annotations

from pathlib import Path

import torch

from actorium.actors.config import Config
from actorium.actors.errors import BadModel
from actorium.gpu.loader import Progress, random_tensors, read_tensors
from actorium.gpu.models.llama import CausalLM, wanted_tensors
from actorium.gpu.shape import ModelShape, architecture_of, read_json, shape_from_config

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                 "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
"""Of the last one the text part alone is served."""

Model = CausalLM


def read_shape(path: Path, config: Config) -> ModelShape:
    """The shape of the checkpoint at `path`. Raises `BadModel`."""
    where = path / "config.json"
    if not path.is_dir():
        raise BadModel(f"{path}: no such directory")
    raw = read_json(where)
    name = architecture_of(raw, where)
    if name not in ARCHITECTURES:
        raise BadModel(f"{where}: architecture {name} is not supported; "
                       f"supported: {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config"):
        raise BadModel(f"{where}: quantization_config: quantized checkpoints are not supported")
    return shape_from_config(raw, where, config.model.dtype, config.model.max_model_len)


def load_model(path: Path, config: Config, device: torch.device, progress: Progress) -> Model:
    """The model at `path`, ready on the device.

    progress(what, done, of) is called once per shard. Raises `BadModel` with one line that names
    the file, field or tensor at fault.
    """
    shape = read_shape(path, config)
    wants = wanted_tensors(shape)
    if config.model.load_format == "dummy":
        tensors = random_tensors(wants, shape.dtype, device, config.model.seed, progress)
    else:
        tensors = read_tensors(path, wants, shape.dtype, device, progress)
    return CausalLM(shape, tensors, device, native=config.device.native_kernels)
