"""Which architectures are served, and loading one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actorium.actors.config.speculative import parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.model_dir import read_json
from actorium.gpu.families.base import Reader, limited
from actorium.gpu.families.cache_dtype import CacheScales, kv_dtype
from actorium.gpu.families.deepseek import deepseek
from actorium.gpu.families.fp8_shape import fp8_shape, served_fp8
from actorium.gpu.families.gemma3 import gemma3
from actorium.gpu.families.granite import granite
from actorium.gpu.families.hybrid_shape import HYBRIDS
from actorium.gpu.families.llama import llama, mistral, qwen2, qwen3
from actorium.gpu.families.model_shape import ModelShape, architecture_of
from actorium.gpu.families.qwen_hybrid import qwen_hybrid
from actorium.gpu.models.decoder import Decoder as Model
from actorium.gpu.models.deepseek import DeepseekLM
from actorium.gpu.models.granite import GraniteLM
from actorium.gpu.models.hybrid import HybridLM
from actorium.gpu.models.llama import CausalLM
from actorium.gpu.weights.loader import Fp8, Progress, Want, holds, random_tensors, read_tensors
from actorium.gpu.weights.quantized import how_served, keeps
from actorium.kernels.ops import triton_fault

__all__ = ["ARCHITECTURES", "FAMILIES", "Family", "Model", "load_model", "read_shape",
           "shape_from_config", "wanted_tensors"]

LOG = logging.getLogger("actorium.model")


class Family(NamedTuple):
    """How an architecture is served."""

    read: Reader
    model: type[Model]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama, CausalLM),
    "MistralForCausalLM": Family(mistral, CausalLM),
    "Qwen2ForCausalLM": Family(qwen2, CausalLM),
    "Qwen3ForCausalLM": Family(qwen3, CausalLM),
    "Gemma3ForCausalLM": Family(gemma3, CausalLM),
    "Gemma3ForConditionalGeneration": Family(gemma3, CausalLM),
    "DeepseekV3ForCausalLM": Family(deepseek, DeepseekLM),
    **{name: Family(qwen_hybrid, HybridLM) for name in HYBRIDS},
    "GraniteMoeHybridForCausalLM": Family(granite, GraniteLM),
}
"""By the model class that a config names. Of those with images (ConditionalGeneration) the text
part alone is served."""
ARCHITECTURES = tuple(FAMILIES)


def shape_from_config(
    raw: dict[str, Any], where: Path, dtype: str = "auto", max_model_len: int | None = None
) -> ModelShape:
    """`ModelShape` of a parsed `config.json`.

    dtype: "auto" takes the checkpoint's. max_model_len: None takes the model's own limit.
    Raises `BadModel` naming the field that is missing or wrong.
    """
    name = architecture_of(raw, where)
    if name not in FAMILIES:
        raise BadModel(f"{where}: architecture {name} is not supported; "
                       f"supported: {', '.join(ARCHITECTURES)}")
    fp8_shape(raw, where)  # says what is not served
    return limited(FAMILIES[name].read(raw, where, dtype), max_model_len)


def read_shape(path: Path, config: Config) -> ModelShape:
    """The shape of the checkpoint at `path`. Raises `BadModel`."""
    where = path / "config.json"
    if not path.is_dir():
        raise BadModel(f"{path}: no such directory")
    return shape_from_config(read_json(where), where, config.model.dtype,
                             config.model.max_model_len)


def wanted_tensors(shape: ModelShape) -> list[Want]:
    """Names and shapes of every tensor the model reads from a checkpoint."""
    return FAMILIES[shape.architecture].model.wants(shape)


def load_model(path: Path, config: Config, device: torch.device, progress: Progress) -> Model:
    """The model at `path`, ready on the device; with the layer that drafts where it is asked for,
    or, by `auto`, where the checkpoint has it.

    progress(what, done, of) is called once per shard. Raises `BadModel` with one line that names
    the file, field or tensor at fault, and `BadConfig` for kernels that cannot run here.
    """
    if config.device.kernels == "triton" and (fault := triton_fault(device)):
        raise BadConfig(f"kernels: triton was asked for, but {fault}", "device.kernels")
    shape = read_shape(path, config)
    kind = FAMILIES[shape.architecture].model
    if shape.mtp_layers and not _drafts(path, shape, kind, config):
        shape = replace(shape, mtp_layers=0)
    wants, where = kind.wants(shape), path / "config.json"
    raw, asked = read_json(where), config.model.quantization
    scaled = served_fp8(raw, where, asked) or fp8_shape(raw, where)
    fp8 = Fp8(scaled, keeps(device, config.device.kernels, asked)) if scaled else None
    if fp8 and fp8.keep and (how := how_served(device, config.device.kernels)):
        LOG.warning("--quantization fp8: %s", how)
    if config.model.load_format == "dummy":
        tensors = random_tensors(wants, shape.dtype, device, config.model.seed, progress, fp8)
    else:
        tensors = read_tensors(path, wants, shape.dtype, device, progress, kind.fused(shape), fp8,
                               _cache_scales(config, kind, shape))
    return kind(shape, tensors, device, config.device.native_kernels, config.device.kernels)


def _cache_scales(config: Config, kind: type[Model], shape: ModelShape) -> CacheScales | None:
    """What reads them; None where the KV cache is not in FP8."""
    name = config.memory.kv_cache_dtype
    if kv_dtype(name, shape.dtype).itemsize > 1:
        return None
    return CacheScales(kind.attention_modules(shape), shape, name)


def _drafts(path: Path, shape: ModelShape, kind: type[Model], config: Config) -> bool:
    """Whether to load the layer that drafts, of which the config tells."""
    asked, names = parse_speculative(config.speculation.speculative), kind.draft_names(shape)
    if not asked.drafts or names is None:
        return False
    if not asked.auto:
        return True
    if config.model.load_format == "dummy":
        return False
    found = holds(path, f"{names.join}.weight")
    if not found:
        LOG.info("%s: no tensor %s.weight, so nothing is drafted", path, names.join)
    return found
