"""Which weights are held in 4 to 8 bits: as `config.json` says of those that a checkpoint has as
whole numbers (AWQ, GPTQ, the integer formats of compressed-tensors) or in MXFP4, as a GGUF file has
them, and as `--quantization int8|int4` makes them at load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_config import GGUF
from actorium.actors.models.model_classes import architecture
from actorium.gpu.families.decoder_config import Fields
from actorium.gpu.families.fp8_config import (
    FORMAT,
    INTEGER_FORMATS,
    INTEGER_METHODS,
    KEPT_UNQUANTISED,
    METHOD,
    MODEL_PREFIX,
    MXFP4,
    NAME,
    quantization_config,
)
from actorium.gpu.families.module_patterns import ModulePattern, parse_pattern
from actorium.gpu.families.tensor_specs import EMBED, TensorSpec
from actorium.gpu.families.weight_formats import ONLINE, GroupedShape, WeightFormat

AWQ, GPTQ = INTEGER_METHODS
PACKED, INTEGERS, NAIVE, MIXED = INTEGER_FORMATS
GROUPS = (16, 32, 64, 128)
"""Columns that share a scale in memory; a larger group of a file is several of the last."""
IMAGES = "language_model"
"""Where checkpoints of text and images have what this engine serves."""
HEAD, LINEAR, PATTERN = "lm_head", "Linear", "re:"
BLOCKS = "modules_in_block_to_quantize"
LISTED = "modules_to_not_convert"
LAYOUT, GPTQ_V2 = "checkpoint_format", "gptq_v2"
MAX_NAMES, MAX_PARTS, MAX_PATTERNS = 100_000, 10_000, 64
"""Of modules in a list; of parts of names and of patterns, each of which is asked for every
module."""
GROUP = 32
"""Columns that share a scale, by default."""
STACKED_FP4 = "GptOssForCausalLM"
"""The class whose checkpoints have experts in MXFP4."""
HEAD_BITS = {"auto": 8, "int8": 8, "int4": 4}


class StoredWeight(NamedTuple):
    """How the files have a weight."""

    layout: str
    """AWQ, GPTQ, GPTQ_V2, PACKED, INTEGERS or MXFP4: which tensors it has, and what is in them."""
    bits: int
    """Of a code: 4 or 8."""
    group: int
    """Columns that share a scale; 0: all of a row do."""
    symmetric: bool
    """No zero-points: all are the middle code."""
    ordered: bool = False
    """A group's columns may lie anywhere in a row (act-order)."""

    @property
    def held(self) -> WeightFormat:
        """The format in memory."""
        return WeightFormat(self.bits, min(self.group, GROUPS[-1]), not self.symmetric,
                            self.layout == MXFP4)

    def held_of(self, columns: int) -> WeightFormat | None:
        """That of a weight of so many columns; None where they are not whole groups."""
        own = self.held
        return own if columns % max(1, self.group) == 0 and own.takes(columns) else None


class ModuleNames(NamedTuple):
    """Some of a model's modules."""

    names: frozenset[str] = frozenset()
    """Of a module, or of what it is a part of."""
    patterns: tuple[ModulePattern, ...] = ()
    parts: tuple[str, ...] = ()
    """Of a module's name."""

    def has(self, module: str) -> bool:
        """Whether this one is among them. module: its name in checkpoints of the language model
        alone; patterns may mean that of one with images."""
        dots = [i for i, char in enumerate(module) if char == "."]
        if module in self.names or any(module[:i] in self.names for i in dots):
            return True
        if any(part in module for part in self.parts):
            return True
        return any(pattern.matches(name) for pattern in self.patterns
                   for name in _spellings(module, IMAGES in pattern.text))


def _spellings(module: str, images: bool) -> tuple[str, ...]:
    """The names that a module has in checkpoints of text, and of text and images."""
    if not images:
        return (module,)
    inner = module.removeprefix("model.")
    return module, f"{IMAGES}.{module}", f"model.{IMAGES}.{inner}"


class StoredWeights(NamedTuple):
    """How the files have the weights of all modules."""

    source: str
    """The method: AWQ, GPTQ, or compressed-tensors."""
    default: StoredWeight | None
    """Of what no rule is about; None: not quantised."""
    rules: tuple[tuple[ModuleNames, StoredWeight | None], ...]
    """The first that has a module is about it."""

    def of(self, module: str) -> StoredWeight | None:
        """How this module's weight is stored, if it is quantised at all."""
        return next((how for names, how in self.rules if names.has(module)), self.default)

    def held(self, specs: Iterable[TensorSpec]) -> GroupedShape:
        """The formats of these tensors in memory. Those of embeddings are left as they are."""
        found = [(spec, self.of(spec.module)) for spec in specs
                 if spec.projection is not None or spec.module == HEAD]
        formats = {spec.module: how and how.held_of(spec.shape[1]) for spec, how in found}
        default, = next(iter(Counter(formats.values()).most_common(1)), (None,))[:1]
        apart = tuple((module, form) for module, form in formats.items()
                      if form != default or module == HEAD and form is not None)
        return GroupedShape(self.source, default, apart,
                            any(how is not None and how.ordered for _, how in found))


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
    _chosen(get, "bits", (4,))
    own = StoredWeight(AWQ, 4, _group(get, "group_size"), not _flag(get, "zero_point", True))
    left = ModuleNames(frozenset({HEAD}), (), _names(get, LISTED))
    return StoredWeights(AWQ, own, ((left, None),))


# --- GPTQ ----------------------------------------------------------------------------------------

def _gptq(get: Fields) -> StoredWeights:
    bits = _chosen(get, "bits", (4, 8))
    layout = get.raw.get(LAYOUT) or GPTQ
    if layout not in (GPTQ, GPTQ_V2) or get.raw.get("is_marlin_format"):
        raise get.bad(LAYOUT, f"must be {GPTQ} or {GPTQ_V2}, got "
                      f"{shown(layout if layout not in (GPTQ, GPTQ_V2) else 'marlin')}")
    if get.raw.get("dynamic"):
        raise get.bad("dynamic", f"rules for single modules are not supported, "
                      f"got {shown(get.raw['dynamic'])}")
    if get.raw.get("pack_dtype", "int32") != "int32":
        raise get.bad("pack_dtype", f"must be int32, got {shown(get.raw['pack_dtype'])}")
    group = _group(get, "group_size")
    ordered = bool(group) and _flag(get, "desc_act", False) and not _flag(get, "static_groups",
                                                                          False)
    own = StoredWeight(str(layout), bits, group, _flag(get, "sym", True), ordered)
    left = [] if _flag(get, "lm_head", False) else [HEAD]
    rest = ModuleNames(frozenset(left), (), _names(get, LISTED)), None
    blocks = get.raw.get(BLOCKS)
    if blocks is None:
        return StoredWeights(GPTQ, own, (rest,))
    names = [name for block in (blocks if isinstance(blocks, list) else [None])
             for name in (block if isinstance(block, list) else [block])]
    chosen = ModuleNames(frozenset(), (), _checked(get, BLOCKS, names))
    return StoredWeights(GPTQ, None, (rest, (chosen, own)))


# --- MXFP4 ---------------------------------------------------------------------------------------

def _mxfp4(get: Fields, name: str) -> StoredWeights:
    """Of experts, all of a layer in one. name: of the model class."""
    if name != STACKED_FP4:
        raise get.bad("quant_method", f"{MXFP4} is supported of {STACKED_FP4} alone, got a {name}")
    own = StoredWeight(MXFP4, 4, GROUP, True)
    return StoredWeights(MXFP4, None, ((ModuleNames(parts=(".experts.",)), own),))


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
        how, targets = _compressed_weight(own, form), list(_names(own, "targets", MAX_NAMES))
        if LINEAR in targets:
            targets.remove(LINEAR)
            if default is not None:
                raise own.bad("targets", f"{LINEAR} is the target of another group, too")
            default = how
        names = _module_names(own, "targets", targets)
        named.append((names._replace(patterns=()), how))
        matched.append((names._replace(names=frozenset()), how))
    ignored = _module_names(get, "ignore", _names(get, "ignore", MAX_NAMES))
    return StoredWeights(METHOD, default, ((ignored, None), *named, *matched))


def _compressed_weight(get: Fields, outer: object) -> StoredWeight:
    """How the modules of a group are stored. outer: the format of all groups."""
    form = get.raw.get("format") or outer
    if form not in (PACKED, INTEGERS, NAIVE):
        raise get.bad("format", f"must be {PACKED} or {INTEGERS}, got {shown(form)}")
    weights, inputs = get.raw.get("weights"), get.raw.get("input_activations")
    if not isinstance(weights, dict):
        raise get.bad("weights", f"must be an object, got {shown(weights)}")
    own = Fields(weights, get.where, f"{get.prefix}weights.")
    if weights.get("type", "int") != "int":
        raise own.bad("type", f"must be int (float only where the format of all is {FORMAT}), "
                      f"got {shown(weights['type'])}")
    bits, strategy = _chosen(own, "num_bits", (4, 8)), weights.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise own.bad("strategy", f"must be tensor, channel or group, got {shown(strategy)}")
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise own.bad("actorder", f"must be weight or group, got {shown(order)}")
    if inputs is not None:
        _check_inputs(get, inputs)
    if get.raw.get("output_activations") is not None:
        raise get.bad("output_activations", "must be null")
    group = _group(own, "group_size") if strategy == "group" else 0
    return StoredWeight(PACKED if form == PACKED else INTEGERS, bits, group,
                        _flag(own, "symmetric", True),
                        bool(group) and order in (True, "group", "dynamic"))


def _check_inputs(get: Fields, inputs: object) -> None:
    """Raise `BadModel` where inputs of products are not numbers of 8 bits about 0, or of a range
    that each token has of its own."""
    if (not isinstance(inputs, dict) or inputs.get("type", "int") != "int"
            or inputs.get("num_bits", 8) != 8):
        raise get.bad("input_activations", f"must be null, or int with 8 bits, got {shown(inputs)}")
    if not inputs.get("dynamic") and not inputs.get("symmetric", True):
        raise get.bad("input_activations.symmetric", "static zero-points are not supported")


def _module_names(get: Fields, field: str, found: Iterable[str]) -> ModuleNames:
    """Modules by name, or by pattern behind `re:`."""
    names, patterns = [], []
    for name in found:
        if not name.startswith(PATTERN):
            names.append(MODEL_PREFIX.sub("model.", name))
        elif (pattern := parse_pattern(name[len(PATTERN):])) is not None:
            patterns.append(pattern)
        else:
            raise get.bad(field, "patterns may have characters, classes, groups of alternatives "
                          f"and repeated characters, got {shown(name)}")
    if len(patterns) > MAX_PATTERNS:
        raise get.bad(field, f"lists more than {MAX_PATTERNS} patterns")
    return ModuleNames(frozenset(names), tuple(patterns))


# --- fields --------------------------------------------------------------------------------------

def _chosen(get: Fields, name: str, known: tuple[int, ...]) -> int:
    found = get.raw.get(name)
    if isinstance(found, bool) or found not in known:
        raise get.bad(name, f"must be {' or '.join(map(str, known))}, got {shown(found)}")
    return int(found)


def _group(get: Fields, name: str) -> int:
    """Columns that share a scale; 0: all of a row do."""
    if get.raw.get(name) == -1:
        return 0
    size = get.int(name)
    if size not in GROUPS and size % GROUPS[-1]:
        raise get.bad(name, f"must be -1, {', '.join(map(str, GROUPS))} or a multiple of "
                      f"{GROUPS[-1]}, got {size}")
    return size


def _flag(get: Fields, name: str, default: bool) -> bool:
    found = get.raw.get(name)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise get.bad(name, f"must be true or false, got {shown(found)}")
    return found


def _names(get: Fields, name: str, most: int = MAX_PARTS) -> tuple[str, ...]:
    """The names that a field lists, at most so many; none where it is absent or null."""
    found = get.raw.get(name)
    if not isinstance(found, list | None):
        raise get.bad(name, f"must list names, got {shown(found)}")
    return _checked(get, name, found or [], most)


def _checked(get: Fields, name: str, found: list[Any],
             most: int = MAX_PARTS) -> tuple[str, ...]:
    if not all(isinstance(each, str) and each for each in found):
        raise get.bad(name, "must list names")
    if len(found) > most:
        raise get.bad(name, f"must list at most {most} names")
    return tuple(found)


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
    "IQ4_XS": WeightFormat(8, 32, False), "MXFP4": WeightFormat(5, 32, False),
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
