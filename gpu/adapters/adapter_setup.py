"""Makes a loaded model ready for adapters, as the configuration asks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.gpu.adapters.adapted_layers import AdaptedLayers
from actorium.gpu.adapters.adapter_reader import AdapterReader
from actorium.gpu.families.architectures import ARCHITECTURES, model_tensors, read_shape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.decoder import Decoder, LoadedModel
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.weights.sliced_tensors import slices_of


class OpenedAdapters(NamedTuple):
    """What serves adapters of a model."""

    layers: AdaptedLayers
    reader: AdapterReader


def check_adapters(config: Config, shape: ModelShape) -> None:
    """Raises `BadConfig` where adapters are asked for and the model cannot have any."""
    if not config.adapters.enable_lora:
        return
    if shape.by_transformers:
        raise BadConfig("enable_lora: transformers' classes run this model, and take no adapters",
                        "adapters.enable_lora")
    if config.device.exact_ranks > 1:
        raise BadConfig("enable_lora: what adapters add is not summed in the parts that "
                        "--exact-ranks asks for", "adapters.enable_lora")


def open_adapters(path: Path, config: Config, model: LoadedModel) -> OpenedAdapters | None:
    """None where no adapters are served. path: of the model's checkpoint."""
    lora = config.adapters
    if not lora.enable_lora or not isinstance(model, Decoder):
        return None

    layers = AdaptedLayers(model, lora.max_loras, lora.max_lora_rank, _install)
    whole = read_shape(path, config)
    reader = AdapterReader(
        layers.places, {spec.name: spec.shape for spec in model_tensors(whole)},
        model.fused(whole), slices_of(whole, model.group.place),
        ARCHITECTURES[whole.architecture].names, model.dtype, (whole.heads, whole.kv_heads))
    model.products.clear()
    return OpenedAdapters(layers, reader)


def renew_adapters(layers: AdaptedLayers, model: Decoder) -> AdaptedLayers:
    """The layers of the same model with other weights, with the adapters that are in `layers`."""
    made = AdaptedLayers(model, layers.slots, layers.rank, _install, layers.stacks)
    model.products.clear()
    return made


def _install(model: Decoder) -> None:
    PassManager(model, model.passes).install()
