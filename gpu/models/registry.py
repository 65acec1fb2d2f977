"""Which architectures are served, and loading one."""

from __future__ import annotations

from pathlib import Path

import torch

from actorium.actors.config import Config
from actorium.actors.errors import BadModel
from actorium.gpu.hybrid_shape import HYBRIDS
from actorium.gpu.loader import Progress, Want, random_tensors, read_tensors
from actorium.gpu.models import llama
from actorium.gpu.models.hybrid import HybridLM, hybrid_fused, hybrid_wants
from actorium.gpu.models.llama import CausalLM
from actorium.gpu.shape import ModelShape, architecture_of, read_json, shape_from_config

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                 "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", *HYBRIDS)
"""Of those with images (ConditionalGeneration) the text part alone is served."""

Model = CausalLM | HybridLM


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


def wanted_tensors(shape: ModelShape) -> list[Want]:
    """Names and shapes of every tensor the model reads from a checkpoint."""
    if shape.architecture in HYBRIDS:
        return hybrid_wants(shape)
    return llama.wanted_tensors(shape)


def load_model(path: Path, config: Config, device: torch.device, progress: Progress) -> Model:
    """The model at `path`, ready on the device.

    progress(what, done, of) is called once per shard. Raises `BadModel` with one line that names
    the file, field or tensor at fault.
    """
    shape = read_shape(path, config)
    wants, hybrid = wanted_tensors(shape), shape.architecture in HYBRIDS
    if config.model.load_format == "dummy":
        tensors = random_tensors(wants, shape.dtype, device, config.model.seed, progress)
    else:
        tensors = read_tensors(path, wants, shape.dtype, device, progress,
                               hybrid_fused(shape) if hybrid else ())
    kind = HybridLM if hybrid else CausalLM
    return kind(shape, tensors, device, native=config.device.native_kernels)
