"""Which weights are held in 4 to 8 bits: as `config.json` says of those that a checkpoint has in
codes (AWQ, GPTQ, bitsandbytes, torchao, HQQ, auto-round, MXFP4, formats of compressed-tensors), as
a GGUF file has them, and as `--quantization int8|int4` makes them at load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_config import GGUF
from actorium.actors.models.model_classes import architecture
from actorium.gpu.families.decoder_config import Fields
from actorium.gpu.families.fp8_config import (
    FORMAT,
    INTEGER_FORMATS,
    KEPT_UNQUANTISED,
    METHOD,
    MODELOPT,
    MXFP4,
    NAME,
    TORCHAO,
    quantization_config,
)
from actorium.gpu.families.quantiser_config import auto_round, hqq, torchao
from actorium.gpu.families.stored_weights import (
    AUTO_ROUND,
    AWQ,
    BITSANDBYTES,
    BNB_FP4,
    BNB_INT8,
    BNB_NF4,
    GPTQ,
    GPTQ_V2,
    HEAD,
    HQQ,
    INTEGERS,
    MAX_PATTERNS,
    MXFP4_PACKED,
    NAIVE,
    NVFP4,
    NVFP4_MODELOPT,
    PACKED,
    PATTERN,
    ModuleNames,
    StoredWeight,
    StoredWeights,
    checked_names,
    chosen,
    flag,
    group_size,
    listed_names,
    module_names,
    named_anywhere,
)
from actorium.gpu.families.tensor_specs import EMBED, TensorSpec
from actorium.gpu.families.weight_formats import ONLINE, GroupedShape, WeightFormat

LINEAR = "Linear"
E2M1_GROUPS = {NVFP4: 16, NVFP4_MODELOPT: 16, MXFP4_PACKED: 32}
"""Columns that share a scale."""
BLOCKS = "modules_in_block_to_quantize"
LISTED = "modules_to_not_convert"
SKIPPED, STORAGE = "llm_int8_skip_modules", "bnb_4bit_quant_storage"
BLOCK_4BIT = 64
"""Numbers of a weight of bitsandbytes that share a scale, one behind the other."""
LAYOUT = "checkpoint_format"
MAX_NAMES = 100_000
"""Of modules in a list."""
GROUP = 32
"""Columns that share a scale, by default."""
STACKED_FP4 = "GptOssForCausalLM"
"""The class whose checkpoints have experts in MXFP4."""
HEAD_BITS = {"auto": 8, "int8": 8, "int4": 4}


def stored_weights(raw: dict[str, Any], where: Path) -> StoredWeights | None:
    """What a parsed config says; None where its weights are not whole numbers.

    Raises `BadModel` naming the field that is not served.
    """
    found = quantization_config(raw)
    if not isinstance(found, dict):
        return None
    get, method = Fields(found, where, f"{NAME}."), found.get("quant_method")
    if method == AWQ:
        return _awq(get)
    if method == GPTQ:
        return _gptq(get)
    if method == BITSANDBYTES:
        return _bitsandbytes(get)
    if method == HQQ:
        return hqq(get)
    if method == AUTO_ROUND:
        return auto_round(get)
    if method == TORCHAO:
        return torchao(get)
    if method == MODELOPT and found.get("quant_algo") == "NVFP4":
        return _modelopt(get)
    if method == MXFP4:
        return _mxfp4(get, architecture(raw))
    if method == METHOD and found.get("format") in INTEGER_FORMATS:
        return _compressed(get)
    return None


def stored_in(raw: dict[str, Any]) -> str:
    """What a parsed config says that the weights are stored in: a method of quantisation, `gguf`,
    or nothing."""
    found = quantization_config(raw)
    if GGUF in raw:
        return GGUF
    method = found.get("quant_method") if isinstance(found, dict) else None
    return str(method or "").removesuffix("_marlin")  # kernels of others for the same codes


# --- AWQ -----------------------------------------------------------------------------------------

def _awq(get: Fields) -> StoredWeights:
    version = str(get.raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise get.bad("version", f"only gemm is supported, got {shown(version)}")
    chosen(get, "bits", (4,))
    own = StoredWeight(AWQ, 4, group_size(get, "group_size"), not flag(get, "zero_point", True))
    left = ModuleNames(frozenset({HEAD}), (), listed_names(get, LISTED))
    return StoredWeights(AWQ, own, ((left, None),))


# --- GPTQ ----------------------------------------------------------------------------------------

def _gptq(get: Fields) -> StoredWeights:
    layout = get.raw.get(LAYOUT) or GPTQ
    if layout not in (GPTQ, GPTQ_V2) or get.raw.get("is_marlin_format"):
        raise get.bad(LAYOUT, f"must be {GPTQ} or {GPTQ_V2}, got "
                      f"{shown(layout if layout not in (GPTQ, GPTQ_V2) else 'marlin')}")
    if get.raw.get("pack_dtype", "int32") != "int32":
        raise get.bad("pack_dtype", f"must be int32, got {shown(get.raw['pack_dtype'])}")
    own, rules = _gptq_weight(get, str(layout)), _gptq_rules(get, str(layout))
    left = [] if flag(get, "lm_head", False) else [HEAD]
    rest = ModuleNames(frozenset(left), (), listed_names(get, LISTED)), None
    blocks = get.raw.get(BLOCKS)
    if blocks is None:
        return StoredWeights(GPTQ, own, (*rules, rest))
    names = [name for block in (blocks if isinstance(blocks, list) else [None])
             for name in (block if isinstance(block, list) else [block])]
    some = ModuleNames(frozenset(), (), checked_names(get, BLOCKS, names))
    return StoredWeights(GPTQ, None, (*rules, rest, (some, own)))


def _gptq_weight(get: Fields, layout: str) -> StoredWeight:
    group = group_size(get, "group_size")
    ordered = bool(group) and flag(get, "desc_act", False) and not flag(get, "static_groups",
                                                                          False)
    return StoredWeight(layout, chosen(get, "bits", (4, 8)), group, flag(get, "sym", True), ordered)


def _gptq_rules(get: Fields, layout: str) -> list[tuple[ModuleNames, StoredWeight | None]]:
    """Of modules by patterns: behind `-:` of those that are not quantised, of others (`+:` or
    nothing) fields that differ."""
    found = get.raw.get("dynamic") or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS or not all(
            isinstance(own, dict) for own in found.values()):
        raise get.bad("dynamic", f"must be an object of at most {MAX_PATTERNS} objects, "
                      f"got {shown(found)}")
    return [(module_names(get, "dynamic", [
                 f"{PATTERN}{name.removeprefix('+:').removeprefix('-:')}"]),
             None if name.startswith("-:") else _gptq_weight(
                 Fields({**get.raw, **own}, get.where, f"{get.prefix}dynamic.{name}."), layout))
            for name, own in found.items()]


# --- bitsandbytes --------------------------------------------------------------------------------

def _bitsandbytes(get: Fields) -> StoredWeights:
    four, eight = flag(get, "load_in_4bit", False), flag(get, "load_in_8bit", False)
    if four == eight:
        raise get.bad("load_in_4bit", "either this or load_in_8bit must be true, got "
                      f"{shown(four)} and {shown(eight)}")
    layout = BNB_INT8
    if four:
        kind, storage = get.raw.get("bnb_4bit_quant_type", "fp4"), get.raw.get(STORAGE, "uint8")
        layouts = {"nf4": BNB_NF4, "fp4": BNB_FP4}
        if not isinstance(kind, str) or kind not in layouts:
            raise get.bad("bnb_4bit_quant_type", f"must be nf4 or fp4, got {shown(kind)}")
        if storage != "uint8":
            raise get.bad(STORAGE, f"must be uint8, got {shown(storage)}")
        layout = layouts[kind]
    own = StoredWeight(layout, 4 if four else 8, BLOCK_4BIT if four else 0, True)
    left = named_anywhere((HEAD,) if get.raw.get(SKIPPED) is None else listed_names(get, SKIPPED))
    return StoredWeights(BITSANDBYTES, own, ((left, None),))


# --- MXFP4 ---------------------------------------------------------------------------------------

def _mxfp4(get: Fields, name: str) -> StoredWeights:
    """Of experts, all of a layer in one. name: of the model class."""
    if name != STACKED_FP4:
        raise get.bad("quant_method", f"{MXFP4} is supported of {STACKED_FP4} alone, got a {name}")
    own = StoredWeight(MXFP4, 4, GROUP, True)
    return StoredWeights(MXFP4, None, ((ModuleNames(parts=(".experts.",)), own),))


# --- ModelOpt ------------------------------------------------------------------------------------

def _modelopt(get: Fields) -> StoredWeights:
    group = E2M1_GROUPS[NVFP4_MODELOPT]
    if get.raw.get("group_size", group) != group:
        raise get.bad("group_size", f"must be {group}, got {shown(get.raw['group_size'])}")
    names = listed_names(get, "ignore")
    left = module_names(get, "ignore", (
        f"{PATTERN}{name.replace('.', chr(92) + '.').replace('*', '.*')}$" if "*" in name else name
        for name in names))
    left = left._replace(parts=tuple(f".{name}." for name in names if "*" not in name))
    return StoredWeights(MODELOPT, StoredWeight(NVFP4_MODELOPT, 4, group, True), ((left, None),))


# --- compressed-tensors --------------------------------------------------------------------------

def _compressed(get: Fields) -> StoredWeights:
    form, groups = get.raw.get("format"), get.raw.get("config_groups")
    if get.raw.get("quantization_status", "compressed") != "compressed":
        raise get.bad("quantization_status",
                      f"must be compressed, got {shown(get.raw['quantization_status'])}")
    for name in ("sparsity_config", "transform_config"):
        found = get.raw.get(name)
        if found and not (isinstance(found, dict) and found.get("format") == "dense"):
            raise get.bad(name, f"is not supported, got {shown(found)}")
    if not isinstance(groups, dict) or not groups:
        raise get.bad("config_groups", f"must name groups of modules, got {shown(groups)}")
    named: list[tuple[ModuleNames, StoredWeight | None]] = []
    matched: list[tuple[ModuleNames, StoredWeight | None]] = []
    default = None
    for name, group in groups.items():
        at = f"config_groups.{shown(name)}"
        if not isinstance(group, dict):
            raise get.bad(at, f"must be an object, got {shown(group)}")
        own = Fields(group, get.where, f"{get.prefix}{at}.")
        how, targets = _compressed_weight(own, form), list(listed_names(own, "targets", MAX_NAMES))
        if LINEAR in targets:
            targets.remove(LINEAR)
            if default is not None:
                raise own.bad("targets", f"{LINEAR} is the target of another group, too")
            default = how
        names = module_names(own, "targets", targets)
        named.append((names._replace(patterns=()), how))
        matched.append((names._replace(names=frozenset()), how))
    ignored = module_names(get, "ignore", listed_names(get, "ignore", MAX_NAMES))
    return StoredWeights(METHOD, default, ((ignored, None), *named, *matched))


def _compressed_weight(get: Fields, outer: object) -> StoredWeight:
    """How the modules of a group are stored. outer: the format of all groups."""
    form = get.raw.get("format") or outer
    if form not in (PACKED, INTEGERS, NAIVE, NVFP4, MXFP4_PACKED):
        raise get.bad("format", f"must be {PACKED}, {INTEGERS}, {NVFP4} or {MXFP4_PACKED}, got "
                      f"{shown(form)}")
    weights, inputs = get.raw.get("weights"), get.raw.get("input_activations")
    if not isinstance(weights, dict):
        raise get.bad("weights", f"must be an object, got {shown(weights)}")
    own = Fields(weights, get.where, f"{get.prefix}weights.")
    if form in (NVFP4, MXFP4_PACKED):
        return _float_weight(get, own, form)
    if weights.get("type", "int") != "int":
        raise own.bad("type", f"must be int (float only where the format of all is {FORMAT}), "
                      f"got {shown(weights['type'])}")
    bits, strategy = chosen(own, "num_bits", (4, 8)), weights.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise own.bad("strategy", f"must be tensor, channel or group, got {shown(strategy)}")
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise own.bad("actorder", f"must be weight or group, got {shown(order)}")
    if inputs is not None:
        _check_inputs(get, inputs)
    if get.raw.get("output_activations") is not None:
        raise get.bad("output_activations", "must be null")
    group = group_size(own, "group_size") if strategy == "group" else 0
    return StoredWeight(PACKED if form == PACKED else INTEGERS, bits, group,
                        flag(own, "symmetric", True),
                        bool(group) and order in (True, "group", "dynamic"))


def _float_weight(get: Fields, weights: Fields, layout: str) -> StoredWeight:
    """How the modules of a group are stored whose numbers are e2m1."""
    group = E2M1_GROUPS[layout]
    for name, wanted in (("num_bits", 4), ("type", "float"), ("symmetric", True),
                         ("group_size", group)):
        if weights.raw.get(name, wanted) != wanted:
            raise weights.bad(name, f"must be {wanted} in {layout}, got "
                              f"{shown(weights.raw[name])}")
    inputs = get.raw.get("input_activations")
    if inputs is not None and not (isinstance(inputs, dict) and inputs.get("type") == "float"):
        raise get.bad("input_activations", f"must be null, or float, got {shown(inputs)}")
    if get.raw.get("output_activations") is not None:
        raise get.bad("output_activations", "must be null")
    return StoredWeight(layout, 4, group, True)


def _check_inputs(get: Fields, inputs: object) -> None:
    """Raise `BadModel` where inputs of products are not numbers of 8 bits about 0, or of a range
    that each token has of its own."""
    if (not isinstance(inputs, dict) or inputs.get("type", "int") != "int"
            or inputs.get("num_bits", 8) != 8):
        raise get.bad("input_activations", f"must be null, or int with 8 bits, got {shown(inputs)}")
    if not inputs.get("dynamic") and not inputs.get("symmetric", True):
        raise get.bad("input_activations.symmetric", "static zero-points are not supported")


# --- GGUF ----------------------------------------------------------------------------------------

FORMATS = {
    "F32": None, "F16": None, "BF16": None,
    "Q4_0": WeightFormat(4, 32, False), "Q4_1": WeightFormat(4, 32, True),
    "Q5_0": WeightFormat(5, 32, False), "Q5_1": WeightFormat(5, 32, True),
    "Q8_0": WeightFormat(8, 32, False), "Q4_K": WeightFormat(4, 32, True),
    "Q5_K": WeightFormat(5, 32, True), "Q6_K": WeightFormat(6, 16, False),
    "Q2_K": WeightFormat(4, 16, True), "Q3_K": WeightFormat(4, 16, False),
    "TQ1_0": WeightFormat(4, 128, False), "TQ2_0": WeightFormat(4, 128, False),
    "IQ1_S": WeightFormat(5, 32, False), "IQ1_M": WeightFormat(5, 16, False),
    "IQ2_XXS": WeightFormat(8, 32, False), "IQ2_XS": WeightFormat(8, 16, False),
    "IQ2_S": WeightFormat(8, 16, False), "IQ3_XXS": WeightFormat(8, 32, False),
    "IQ3_S": WeightFormat(5, 32, False), "IQ4_NL": WeightFormat(8, 32, False),
    "IQ4_XS": WeightFormat(8, 32, False), "MXFP4": WeightFormat(4, 32, False, True),
    "NVFP4": WeightFormat(5, 16, False),
}
"""Of each type of tensor; None: it is plain. All numbers of a block are whole multiples of their
group's scale (and min), which these bits hold exactly."""


def gguf_grouped(raw: dict[str, Any], where: Path) -> GroupedShape | None:
    """Which weights are held in which format; None where the config was not made of a GGUF file, or
    all of its weights are plain. Raises `BadModel` naming the field."""
    own = raw.get(GGUF)
    if own is None:
        return None
    if not isinstance(own, dict) or not isinstance(own.get("modules"), dict):
        raise BadModel(f"{where}: {GGUF}: must name the types of modules")

    def form(name: str, kind: Any) -> WeightFormat | None:
        if not isinstance(kind, str) or kind not in FORMATS:
            raise BadModel(f"{where}: {GGUF}.{name}: must be one of {', '.join(FORMATS)}, "
                           f"got {shown(kind)}")
        return FORMATS[kind]

    modules = tuple((str(name), form("modules", kind)) for name, kind in own["modules"].items())
    default = form("default", own.get("default"))
    if default is None and not any(one for _, one in modules):
        return None
    return GroupedShape(GGUF, default, modules)


# --- Quantised at load ---------------------------------------------------------------------------

def online_format(bits: int, group: int | None) -> WeightFormat:
    """What weights are made to be."""
    return WeightFormat(bits, GROUP if group is None else group, bits == 4)


def online_grouped(bits: int, group: int | None, head: str, tied: bool,
                 specs: Iterable[TensorSpec]) -> GroupedShape:
    """All projections but those that gate a recurrent layer's states, and the head.

    group, head: see `ModelConfig`. tied: the embedding is the head as well. specs: of the model.
    """
    apart: list[tuple[str, WeightFormat | None]] = [
        (spec.module, None) for spec in specs if spec.module.endswith(KEPT_UNQUANTISED)]
    if head != "none":
        module = EMBED.removesuffix(".weight") if tied else HEAD
        group = None if group == 0 and HEAD_BITS[head] == 4 else group
        apart.append((module, online_format(HEAD_BITS[head], group)))
    return GroupedShape(ONLINE, online_format(bits, group), tuple(apart))
