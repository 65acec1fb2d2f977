"""What `config.json` says of weights in FP8."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import BadModel, shown
from actorium.gpu.families.compressed_shape import FORMAT, METHOD, compressed_shape, is_served

BLOCK = 128
"""Rows and columns of a block that shares a scale."""
NAME = "quantization_config"
MADE_APART = ("in_proj_a", "in_proj_b")
"""Modules that stay as they are where weights are made FP8 at load: what gates a recurrent layer's
states (GatedDeltaNet), a row for each head."""
IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""What lists the modules whose weights are not in FP8."""
_OUTER = re.compile(r"^(?:(?:model|language_model)\.)+")
_LAYER = re.compile(r"^model\.layers\.(\d+)(?:\.|$)")


class Fp8Shape(NamedTuple):
    """Weights of projections are e4m3 with scales."""

    block: int
    """Rows and columns that share one; 0: the whole weight has one."""
    ignored: tuple[str, ...] = ()
    """Modules that are not in FP8, as checkpoints of the language model alone call them."""
    made: bool = False
    """The checkpoint is not in FP8: its weights are quantised when they are read, each row by its
    own largest number."""

    def covers(self, module: str) -> bool:
        """Whether the weight of this module, by its whole name, is in FP8."""
        return not any(_is(module, name) for name in self.ignored)

    def share(self, module: str, layers: int, of: int) -> float:
        """Of a module, named as `mlp.up_proj`, that so many of the model's `of` layers have: in how
        many of them its weight is in FP8, as a share."""
        found = [(name, _LAYER.match(name)) for name in set(self.ignored)]
        if any(_is(module, name) for name, layer in found if layer is None):
            return 0.0
        apart = sum(_is(module, name[layer.end():]) for name, layer in found
                    if layer and int(layer[1]) < of)
        return max(0.0, 1 - apart / max(1, layers))


def _is(module: str, name: str) -> bool:
    """Whether `name` is this module's, its last parts, or that of what it is a part of (nothing:
    of all); `*NAME`: or has NAME in it; `*NAME$`: or ends with it."""
    if name.startswith("*"):
        return module.endswith(name[1:-1]) if name.endswith("$") else name[1:] in module
    return not name or f".{module}".endswith(f".{name}") or module.startswith(f"{name}.")


def quantization_config(raw: dict[str, Any]) -> Any:
    """What a parsed config says of quantisation, the language model's part counted; None where it
    says nothing."""
    found, text = raw.get(NAME), raw.get("text_config")
    return found or (text.get(NAME) if isinstance(text, dict) else None) or None


def otherwise_quantized(raw: dict[str, Any]) -> bool:
    """Whether the checkpoint of this config is quantised in a way that is not served."""
    found = quantization_config(raw)
    return found is not None and not (isinstance(found, dict) and (
        found.get("quant_method") == "fp8" or is_served(found)))


def served_fp8(raw: dict[str, Any], where: Path, quantization: str) -> Fp8Shape | None:
    """Which weights are in FP8 where they are served so; None: none are.

    quantization: see `ModelConfig`. Raises `BadModel` on a checkpoint that is not served.
    """
    found = fp8_shape(raw, where)
    if quantization == "none":
        return None
    return Fp8Shape(0, MADE_APART, True) if found is None and quantization == "fp8" else found


def fp8_shape(raw: dict[str, Any], where: Path) -> Fp8Shape | None:
    """What a parsed config says; None where its weights are not quantised.

    Raises `BadModel` on what is not served.
    """
    found = quantization_config(raw)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise BadModel(f"{where}: {NAME}: must be an object")
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == METHOD:
        size, modules = compressed_shape(found, where)
        return Fp8Shape(size, tuple(_OUTER.sub("model.", name) for name in modules))
    if method != "fp8":
        raise BadModel(f"{where}: {NAME}.quant_method: of quantized checkpoints those in fp8 alone "
                       f"are supported (fp8, or {METHOD} in {FORMAT}), got {shown(method)}")
    if block is not None and block != [BLOCK, BLOCK]:
        raise BadModel(f"{where}: {NAME}.weight_block_size: only [{BLOCK}, {BLOCK}] is supported, "
                       f"got {shown(block)}")
    if found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise BadModel(f"{where}: {NAME}.fmt: only e4m3 is supported, "
                       f"got {shown(found['fmt'])}")
    lists = [found.get(key) or [] for key in IGNORED]
    names = [name for own in lists if isinstance(own, list) for name in own]
    if not all(isinstance(own, list) for own in lists) \
            or not all(isinstance(name, str) for name in names):
        raise BadModel(f"{where}: {NAME}: {' and '.join(IGNORED)} must list names")
    return Fp8Shape(BLOCK if block else 0, tuple(_OUTER.sub("model.", name) for name in names))
