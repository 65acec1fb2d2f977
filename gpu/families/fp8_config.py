"""What `config.json` says of weights in FP8: `quant_method: fp8`, and the format of
compressed-tensors (llm-compressor's, vLLM's), `format: float-quantized`."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import BadModel, shown

BLOCK = 128
"""Rows and columns of a block that shares a scale."""
NAME = "quantization_config"
KEPT_UNQUANTISED = ("in_proj_a", "in_proj_b")
"""Modules that stay as they are where weights are made FP8 at load: what gates a recurrent layer's
states (GatedDeltaNet), a row for each head."""
IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""What lists the modules whose weights are not in FP8."""
METHOD, FORMAT = "compressed-tensors", "float-quantized"
BITSANDBYTES = "bitsandbytes"
INTEGER_METHODS = ("awq", "gptq", BITSANDBYTES, "hqq", "auto-round")
MXFP4 = "mxfp4"
"""Weights are numbers of 4 bits: see `quant_config.py`, too."""
MODELOPT = "modelopt"
"""NVIDIA's Model Optimizer: `quant_algo` says what weights are in."""
TORCHAO = "torchao"
"""`quant_type` says what weights are in: see `quantiser_config.py`, too."""
TORCHAO_FLOATS = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
"""Its types of weights in FP8."""
METHODS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": MODELOPT}
"""Names of vLLM's for how it multiplies; the files are those of these methods."""
FIELDS = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's first names of them."""
INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision",
                   "nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Of compressed-tensors. Weights in these and those are held in codes: see `quant_config.py`."""
PATTERN = re.compile(r"re:\.\*([A-Za-z_][\w\\.]{0,100})(\$?)")
"""Of names of modules: those that this one ends, or is a part of. No other is read: patterns of a
file are not run."""
MODEL_PREFIX = re.compile(r"^(?:(?:model|language_model)\.)+")
"""What the names of modules begin with in checkpoints of text, or of text and images."""


class Fp8Shape(NamedTuple):
    """Weights of projections are e4m3 with scales."""

    block: int
    """Rows and columns that share one; 0: the whole weight has one."""
    ignored: tuple[str, ...] = ()
    """Modules that are not in FP8, as checkpoints of the language model alone call them."""
    online: bool = False
    """The checkpoint is not in FP8: its weights are quantised when they are read, each row by its
    own largest number."""

    def covers(self, module: str) -> bool:
        """Whether the weight of this module, by its whole name, is in FP8.

        An ignored name is a module's own, its last parts, or that of what it is a part of (nothing:
        of all); `*NAME`: or has NAME in it; `*NAME$`: or ends with it.
        """
        names, patterns = _ignored_names(self.ignored)
        if not self.ignored:
            return True
        dots = [i for i, char in enumerate(module) if char == "."]
        own = ("", module, *(module[:i] for i in dots), *(module[i + 1:] for i in dots))
        if not names.isdisjoint(own):
            return False
        return not any(module.endswith(name[:-1]) if name.endswith("$") else name in module
                       for name in patterns)


@lru_cache(16)
def _ignored_names(ignored: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """(names, patterns without their `*`): of ten thousands of experts each is asked for."""
    return (frozenset(name for name in ignored if not name.startswith("*")),
            tuple(name[1:] for name in ignored if name.startswith("*")))


def quantization_config(raw: dict[str, Any]) -> Any:
    """What a parsed config says of quantisation, the language model's part counted; None where it
    says nothing."""
    found, text = raw.get(NAME), raw.get("text_config")
    found = found or (text.get(NAME) if isinstance(text, dict) else None) or None
    if not isinstance(found, dict):
        return found
    named = {field: found[old] for old, field in FIELDS.items() if old in found} | found
    if "quant_method" not in found and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        return named | {"quant_method": BITSANDBYTES}  # its first configs do not say
    producer, inner = found.get("producer"), found.get("quantization")
    if isinstance(inner, dict):
        named |= inner  # as in hf_quant_config.json
    if "exclude_modules" in named:
        named |= {"ignore": named["exclude_modules"]}
    if "quant_method" not in found and isinstance(producer, dict) and (
            producer.get("name") == MODELOPT):
        return named | {"quant_method": MODELOPT}
    method = named.get("quant_method")
    known = METHODS.get(method) if isinstance(method, str) else None
    return named | {"quant_method": known} if known else named


def otherwise_quantized(raw: dict[str, Any]) -> bool:
    """Whether the checkpoint of this config is quantised in a way that is not served."""
    found = quantization_config(raw)
    if not isinstance(found, dict):
        return found is not None
    method = found.get("quant_method")
    if method == MODELOPT:
        return found.get("quant_algo") not in ("FP8", "NVFP4")
    return method not in ("fp8", MXFP4, TORCHAO, *INTEGER_METHODS) and not _is_compressed(found)


def unquantized(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model without what it says of quantisation."""
    plain, text = {**raw, NAME: None}, raw.get("text_config")
    return {**plain, "text_config": {**text, NAME: None}} if isinstance(text, dict) else plain


def served_fp8(raw: dict[str, Any], where: Path, quantization: str) -> Fp8Shape | None:
    """Which weights are in FP8 where they are served so; None: none are.

    quantization: see `ModelConfig`. Raises `BadModel` on a checkpoint that is not served.
    """
    found = fp8_shape(raw, where)
    if quantization == "none":
        return None
    return Fp8Shape(0, KEPT_UNQUANTISED, True) if found is None and quantization == "fp8" else found


def fp8_shape(raw: dict[str, Any], where: Path) -> Fp8Shape | None:
    """What a parsed config says; None where its weights are not in FP8.

    Raises `BadModel` on what is not served.
    """
    found = quantization_config(raw)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise BadModel(f"{where}: {NAME}: must be an object")
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method in (MXFP4, *INTEGER_METHODS) or (
            method == METHOD and found.get("format") in INTEGER_FORMATS):
        return None
    if method == MODELOPT:
        return _modelopt(found, where)
    if method == TORCHAO:
        return _torchao(found, where)
    if method == METHOD:
        size, modules = _compressed(found, where)
        return Fp8Shape(size, tuple(MODEL_PREFIX.sub("model.", name) for name in modules))
    if method != "fp8":
        raise BadModel(f"{where}: {NAME}.quant_method: must be fp8, {METHOD}, {MXFP4}, {MODELOPT}, "
                       f"{TORCHAO}, {', '.join(INTEGER_METHODS[:-1])} or {INTEGER_METHODS[-1]}, "
                       f"got {shown(method)}")
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
    return Fp8Shape(BLOCK if block else 0,
                    tuple(MODEL_PREFIX.sub("model.", name) for name in names))


# --- ModelOpt ------------------------------------------------------------------------------------

def _modelopt(found: dict[str, Any], where: Path) -> Fp8Shape | None:
    """None where weights are in NVFP4: see `quant_config.py`."""
    algorithm = found.get("quant_algo")
    if algorithm == "NVFP4":
        return None
    if algorithm != "FP8":
        raise BadModel(f"{where}: {NAME}.quant_algo: must be NVFP4 or FP8, got {shown(algorithm)}")
    names = found.get("ignore") or []
    if not isinstance(names, list) or not all(
            isinstance(one, str) and one.strip("*") and "*" not in one.strip("*") for one in names):
        raise BadModel(f"{where}: {NAME}.ignore: must list names, with * before and behind them "
                       f"alone, got {shown(names)}")
    return Fp8Shape(0, tuple("*" * ("*" in one) + MODEL_PREFIX.sub("model.", one.strip("*"))
                             for one in names))


# --- torchao -------------------------------------------------------------------------------------

def _torchao(found: dict[str, Any], where: Path) -> Fp8Shape | None:
    """None where weights are not in FP8: see `quantiser_config.py`."""
    kinds = found.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, dict) else None
    if not isinstance(kind, dict) or kind.get("_type") not in TORCHAO_FLOATS:
        return None
    own, at = kind.get("_data"), f"{where}: {NAME}.quant_type.default"
    own = own if isinstance(own, dict) else {}
    dtype, grains = own.get("weight_dtype"), own.get("granularity")
    if isinstance(dtype, dict) and dtype.get("_data") != "float8_e4m3fn":
        raise BadModel(f"{at}.weight_dtype: must be float8_e4m3fn, got {shown(dtype)}")
    grain = grains[-1] if isinstance(grains, list) and grains else grains  # of inputs, of weights
    name = grain.get("_type") if isinstance(grain, dict) else grain
    size = grain.get("_data") if isinstance(grain, dict) else None
    if name not in (None, "PerRow", "PerTensor") and not (
            name == "PerBlock" and isinstance(size, dict)
            and size.get("block_size") == [BLOCK, BLOCK]):
        raise BadModel(f"{at}.granularity: must be PerRow, PerTensor or PerBlock of "
                       f"{[BLOCK, BLOCK]}, got {shown(grain)}")
    names = found.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise BadModel(f"{where}: {NAME}.modules_to_not_convert: must list names")
    left = () if found.get("include_input_output_embeddings") else ("lm_head",)
    return Fp8Shape(BLOCK if name == "PerBlock" else 0,
                    (*left, *(MODEL_PREFIX.sub("model.", one) for one in names)))


# --- compressed-tensors --------------------------------------------------------------------------

def _is_compressed(found: dict[str, Any]) -> bool:
    """Whether this is one of the formats that are served."""
    return (found.get("quant_method") == METHOD
            and found.get("format") in (FORMAT, *INTEGER_FORMATS))


def _compressed(found: dict[str, Any], where: Path) -> tuple[int, list[str]]:
    """(rows and columns of a block that shares a scale, 0 where none does; modules that are not in
    FP8, `*` before and perhaps `$` behind what their names have or end with).

    found: `quantization_config`. Raises `BadModel` naming the field that is not served.
    """
    at = f"{where}: quantization_config"

    def bad(field: str, want: str, value: Any) -> BadModel:
        return BadModel(f"{at}.{field}: must be {want}, got {shown(value)}")

    if found.get("format") != FORMAT:
        raise bad("format", f"{FORMAT}, {', '.join(INTEGER_FORMATS[:-1])} or "
                  f"{INTEGER_FORMATS[-1]}", found.get("format"))
    if found.get("quantization_status", "compressed") != "compressed":
        raise bad("quantization_status", "compressed", found["quantization_status"])
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise bad("config_groups", "one group, of all Linear modules", groups)
    (name, group), = groups.items()
    where_in = f"config_groups.{shown(name)}"
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise bad(f"{where_in}.targets", "Linear alone",
                  group.get("targets") if isinstance(group, dict) else group)
    weights, inputs = group.get("weights"), group.get("input_activations")
    for field, one in (("weights", weights), ("input_activations", inputs)):
        if not (isinstance(one, dict) and one.get("type") == "float" and one.get("num_bits") == 8
                and one.get("symmetric", True) is True):
            raise bad(f"{where_in}.{field}", "float with 8 bits, symmetric", one)
    assert isinstance(weights, dict)
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block") or (
            strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]):
        raise bad(f"{where_in}.weights.strategy",
                  f"tensor, channel, or block of {[BLOCK, BLOCK]}", weights)
    ignored = found.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(one, str) for one in ignored):
        raise bad("ignore", "a list of names", ignored)
    return BLOCK if strategy == "block" else 0, [_module_name(one, bad) for one in ignored]


def _module_name(name: str, bad: Any) -> str:
    if not name.startswith("re:"):
        return name
    found = PATTERN.fullmatch(name)
    if found is None or "layers." in found[1]:
        refusal: BadModel = bad("ignore", "names, or re:.*NAME or re:.*NAME$ without a layer's "
                                "number", name)
        raise refusal
    return f"*{found[1].replace(chr(92), '')}{found[2]}"
