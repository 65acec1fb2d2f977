"""Loading a model: its class by its architecture, and its weights from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from actorium.actors.config.parsed_values import parse_passes, parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel, shown
from actorium.actors.models.gguf_folder import gguf_source
from actorium.actors.models.model_dir import read_config
from actorium.gpu.attention.backend_choice import select_attention
from actorium.gpu.attention.capabilities import FP8_PAGES
from actorium.gpu.families.architectures import (
    ARCHITECTURES,
    LayerTensors,
    attention_modules,
    model_tensors,
    mtp_names,
    read_shape,
)
from actorium.gpu.families.deepseek_config import deepseek_layer
from actorium.gpu.families.draft_shape import draft_model_config
from actorium.gpu.families.fp8_config import fp8_shape
from actorium.gpu.families.gemma_config import gemma_layer
from actorium.gpu.families.granite_config import granite_hybrid_layer
from actorium.gpu.families.ignored_tensors import ignored_tensors
from actorium.gpu.families.llama_config import causal_layer
from actorium.gpu.families.mamba_config import parted_layer
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.quant_config import stored_weights
from actorium.gpu.families.qwen_hybrid_config import hybrid_layer
from actorium.gpu.models.decoder import Decoder, LoadedModel, load_drafter
from actorium.gpu.models.deepseek import DeepseekLM
from actorium.gpu.models.eagle_head import load_eagle
from actorium.gpu.models.gemma import GemmaLM
from actorium.gpu.models.granite import GraniteLM
from actorium.gpu.models.llama import CausalLM, HybridLM
from actorium.gpu.models.parted import PartedLM
from actorium.gpu.models.pooler import load_pooler
from actorium.gpu.models.transformers_model import load_transformers
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup, RankPlace
from actorium.gpu.parallel.rank_slices import require_rank_bits
from actorium.gpu.passes.pass_manager import PassManager, keep_all
from actorium.gpu.plan.memory_plan import as_served, demand_of
from actorium.gpu.vision.tower import VisionTower
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.fp8_weights import CacheScales, how_served, keeps
from actorium.gpu.weights.loader import Fp8, Progress, holds, read_tensors
from actorium.gpu.weights.random_weights import random_tensors
from actorium.gpu.weights.sliced_tensors import slices_of
from actorium.gpu.weights.weight_files import WeightFiles
from actorium.kernels.backends import triton_fault

LOG = logging.getLogger("actorium.model")
ChoosePasses = Callable[[Decoder, tuple[str, ...]], tuple[str, ...]]
OF_LAYERS: dict[LayerTensors, type[Decoder]] = {
    causal_layer: CausalLM, hybrid_layer: HybridLM, deepseek_layer: DeepseekLM,
    granite_hybrid_layer: GraniteLM, parted_layer: PartedLM, gemma_layer: GemmaLM}
"""What runs layers of these tensors."""

def decoder_of(name: str) -> type[Decoder]:
    """What runs a class of `ARCHITECTURES`. Raises `BadModel` where a plug-in's names nothing that
    can."""
    kind = ARCHITECTURES[name]
    if not kind.decoder and kind.layer in OF_LAYERS:
        return OF_LAYERS[kind.layer]
    try:
        decoder = resolve_name(kind.decoder)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadModel(f"{name}: decoder {kind.decoder!r}: {error}") from None
    if not (isinstance(decoder, type) and issubclass(decoder, Decoder)):
        raise BadModel(f"{name}: decoder {kind.decoder!r} is no Decoder")
    return decoder


def load_model(path: Path, config: Config, device: torch.device, progress: Progress,
               group: RankGroup = LoneRank(), choose: ChoosePasses = keep_all,
               files: WeightFiles | None = None, like: Decoder | None = None) -> LoadedModel:
    """The model at `path`, ready on the device, with what drafts for it: its own layer where that
    is asked for, or, by `auto`, where the checkpoint has it; or a smaller model. Of a group of
    several ranks, this rank's part.

    progress(what, done, of) is called once per shard. choose: of the passes that are on, those that
    are used. files: that its weights are read from, None = those at `path`. like: the same model
    with other weights, whose kernels it takes over; passes are not installed yet. Raises `BadModel`
    with one line that names the file, field or tensor at fault, and `BadConfig` for kernels or an
    attention backend that cannot run here.
    """
    if config.device.kernels == "triton" and (fault := triton_fault(device)):
        raise BadConfig(f"kernels: triton was asked for, but {fault}", "device.kernels")
    shape = read_shape(path, config)
    if files is not None:
        _check_files(path, config, shape, files)
    model = (load_transformers(path, config, device, shape, progress, group)
             if shape.by_transformers else
             _load_decoder(path, config, device, shape, progress, group, choose, files, like))
    if like is not None:
        model.draft_model = like.draft_model
    elif (own := draft_model_config(config, shape.max_model_len)) is not None:
        model.draft_model = load_model(Path(own.model.model), own, device, progress, group)
    return model


def _load_decoder(path: Path, config: Config, device: torch.device, shape: ModelShape,
                  progress: Progress, group: RankGroup, choose: ChoosePasses,
                  files: WeightFiles | None, like: Decoder | None) -> Decoder:
    """The same of a class of ours, without a smaller model. shape: of the whole model."""
    where = path / "config.json"
    if shape.mtp_layers and not _drafts(path, shape, config, device):
        shape = replace(shape, mtp_layers=0)
    asked = config.model.quantization
    raw = read_config(path)
    scaled = shape.fp8 or fp8_shape(raw, where)
    fp8 = Fp8(scaled, keeps(device, config.device.kernels, asked)) if scaled else None
    if fp8 is None or not fp8.keep:
        shape = replace(shape, fp8=None)
    elif how := how_served(device, config.device.kernels):
        LOG.warning("--quantization fp8: %s", how)
    require_rank_bits(shape, config.device.exact_ranks, parse_passes(config.device.passes),
                      device.type == "cpu" and config.device.kernels == "auto")
    group.exact_ranks = config.device.exact_ranks
    kind, dtype, whole = decoder_of(shape.architecture), TORCH_DTYPES[shape.dtype], shape
    slices, shape = slices_of(whole, group.place), whole.split(group.place.size)
    drafts = as_served(shape, demand_of(config))[1].drafts
    attention = like.attention if like else select_attention(shape, config, device, drafts)
    specs = model_tensors(shape)
    if config.model.load_format == "dummy" and files is None:
        tensors = random_tensors(specs, dtype, device, config.model.seed, progress, fp8,
                                 shape.grouped, slices)
    else:
        tensors = read_tensors(files.path if files else path, specs, dtype, device, progress,
                               kind.fused(whole), fp8,
                               _cache_scales(config, whole, group.place), shape.grouped,
                               stored_weights(raw, where), slices,
                               ARCHITECTURES[shape.architecture].names,
                               ignored_tensors(whole, raw), files.over if files else None)
    model = kind(shape, tensors, device, attention, config.device.native_kernels,
                 config.device.kernels, group, like.ops if like else None)
    model.drafter = load_drafter(model, tensors)
    if shape.eagle is not None:
        model.eagle = load_eagle(shape.eagle, config, device, progress, model.ops,
                                 model.embeddings, shape.vocabulary, drafts)
    if shape.pooling is not None:
        model.pooler = load_pooler(shape.pooling, path, device, tensors)
    model.vision = VisionTower(shape.vision, tensors, model.ops.tower) if shape.vision else None
    model.passes = choose(model, parse_passes(config.device.passes))
    model.serves_adapters = config.adapters.enable_lora
    if not model.serves_adapters:
        model.products.clear()
    elif config.device.exact == "on":
        # Of a row without an adapter others in the step would else decide how its gate is rounded.
        model.passes = tuple(own for own in model.passes if own != "gated_product")
    if like is not None:  # who has it take the other's place installs them, when no step runs
        return model
    PassManager(model, model.passes,
                Path(dump) if (dump := config.device.dump_passes) else None).install()
    return model


def _check_files(path: Path, config: Config, shape: ModelShape, files: WeightFiles) -> None:
    """Raises `BadModel` where the model at `path` cannot have its weights from these files."""
    if shape.by_transformers:
        raise BadModel(f"{files.path}: a model that transformers' classes run keeps its weights")
    if not files.path.is_dir():
        raise BadModel(f"{files.path}: no such directory")
    if (gguf_source(files.path) is None) != (gguf_source(path) is None):
        raise BadModel(f"{files.path}: the model is served from {path}, whose format is another")
    if files.path == path or not (files.path / "config.json").is_file():
        return
    theirs = read_shape(files.path, config)
    for field in fields(shape):
        one, other = getattr(shape, field.name), getattr(theirs, field.name)
        if one != other:
            raise BadModel(f"{files.path / 'config.json'}: another model than the one that is "
                           f"served: {field.name} is {shown(other)} instead of {shown(one)}")


def _cache_scales(config: Config, shape: ModelShape, place: RankPlace) -> CacheScales | None:
    """What reads a rank's; None where the KV cache is not in FP8."""
    name = config.memory.kv_cache_dtype
    if name not in FP8_PAGES:
        return None
    return CacheScales(attention_modules(shape), shape, name, place)


def _drafts(path: Path, shape: ModelShape, config: Config, device: torch.device) -> bool:
    """Whether to load the layer that drafts, which the config promises."""
    asked, names = parse_speculative(config.speculation.speculative), mtp_names(shape)
    if "mtp" not in asked.methods or names is None:
        return False
    if not asked.auto:
        return True
    if config.model.load_format == "dummy":
        return False
    if shape.eagle is not None and device.type == "cuda":
        LOG.warning("--speculative auto: the model's own MTP layer drafts nothing beside the "
                    "EAGLE-3 head, since decode steps with both are not captured as graphs; "
                    "mtp:2+eagle3:3 has both")
        return False
    found = holds(path, f"{names.join}.weight")
    if not found:
        LOG.info("%s: no tensor %s.weight, so nothing is drafted", path, names.join)
    return found
