"""What `config.json` says of weights that torchao, HQQ and auto-round quantised: see
`quant_config.py`."""

from __future__ import annotations

from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields
from actorium.gpu.families.fp8_config import MODEL_PREFIX, TORCHAO, TORCHAO_FLOATS
from actorium.gpu.families.stored_weights import (
    AUTO_ROUND,
    AWQ,
    GPTQ,
    GPTQ_V2,
    HEAD,
    HQQ,
    INTEGERS,
    MAX_PATTERNS,
    PATTERN,
    ModuleNames,
    StoredWeight,
    StoredWeights,
    chosen,
    flag,
    group_size,
    listed_names,
    module_names,
    named_anywhere,
)

Rules = list[tuple[ModuleNames, StoredWeight | None]]

# --- torchao -------------------------------------------------------------------------------------

TORCHAO_INTEGERS = {
    "Int8WeightOnlyConfig": ("", "granularity", ""),
    "Int8DynamicActivationInt8WeightConfig": ("", "granularity", ""),
    "IntxWeightOnlyConfig": ("weight_dtype", "granularity", "mapping_type"),
    "Int8DynamicActivationIntxWeightConfig": ("weight_dtype", "weight_granularity",
                                              "weight_mapping_type"),
}
"""Its types of weights that are whole numbers, a byte each: the fields that say of what dtype,
which of them share a scale, and whether they have zero-points; "": int8, and that they have none.
"""
BY_MODULE = ("FqnToConfig", "ModuleFqnToConfig")
REST = "_default"
SYMMETRIC = ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR")


def torchao(get: Fields) -> StoredWeights | None:
    """None where weights are in FP8."""
    found = get.raw.get("quant_type")
    own = found.get("default") if isinstance(found, dict) else None
    if not isinstance(own, dict) or len(found or ()) != 1:
        raise get.bad("quant_type", "must be an object of `default` alone (files of torchao before "
                      f"0.15 are pickled, which is never read), got {shown(found)}")
    if own.get("_type") in TORCHAO_FLOATS:
        return None
    kept = () if flag(get, "include_input_output_embeddings", False) else (HEAD,)
    left = named_anywhere((*kept, *listed_names(get, "modules_to_not_convert")))
    at = "quant_type.default"
    if own.get("_type") not in BY_MODULE:
        return StoredWeights(TORCHAO, _torchao_weight(get, at, own), ((left, None),))
    modules = _data(own).get("fqn_to_config") or _data(own).get("module_fqn_to_config")
    if not isinstance(modules, dict):
        raise get.bad(at, f"{own['_type']} must name modules, got {shown(modules)}")
    at += ".fqn_to_config"
    stored = {name: None if kind is None else _torchao_weight(get, f"{at}.{name}", kind)
              for name, kind in modules.items()}
    rest = stored.pop(REST, None)
    rules = _by_name(get, at, {name.removesuffix(".weight").removesuffix("\\"): how
                               for name, how in stored.items()})
    return StoredWeights(TORCHAO, rest, (*rules, (left, None)))


def _torchao_weight(get: Fields, at: str, kind: Any) -> StoredWeight:
    """How a module is stored of whose type the config has this under the name `at`."""
    name = kind.get("_type") if isinstance(kind, dict) else kind
    if not isinstance(name, str) or name not in TORCHAO_INTEGERS:
        kinds = (*TORCHAO_INTEGERS, *(() if "fqn" in at else TORCHAO_FLOATS))
        raise get.bad(at, f"{shown(name)} is not served, of torchao's types are "
                      f"{', '.join(kind.removesuffix('Config') for kind in kinds)}")
    own, (dtype, grain, mapping) = _data(kind), TORCHAO_INTEGERS[name]
    of = Fields(own, get.where, f"{get.prefix}{at}.")
    packing = _word(own.get("intx_packing_format"), "UNPACKED_TO_INT8")
    if packing != "UNPACKED_TO_INT8":
        raise of.bad("intx_packing_format", f"must be UNPACKED_TO_INT8, got {shown(packing)}")
    bits = _word(own.get(dtype), "int8")
    if bits not in [f"int{count}" for count in range(1, 9)]:
        raise of.bad(dtype, f"must be int1 to int8, got {shown(bits)}")
    rounding = _word(own.get(mapping), SYMMETRIC[0])
    if rounding not in (*SYMMETRIC, "ASYMMETRIC"):
        raise of.bad(mapping, f"must be {', '.join(SYMMETRIC)} or ASYMMETRIC, "
                     f"got {shown(rounding)}")
    return StoredWeight(INTEGERS, int(bits[3:]), _torchao_group(of, grain), rounding in SYMMETRIC)


def _torchao_group(get: Fields, field: str) -> int:
    """Columns that share a scale; 0: all of a row do."""
    found = get.raw.get(field)
    grain = found[-1] if isinstance(found, list) and found else found  # of inputs, and of weights
    kind, own = _word(grain and {"_data": grain.get("_type")} if isinstance(grain, dict) else grain,
                      "PerRow"), _data(grain)
    if kind == "PerGroup":
        return group_size(Fields(own, get.where, f"{get.prefix}{field}."), "group_size")
    if kind not in ("PerRow", "PerTensor", "PerAxis") or own.get("dim", -1) != -1 \
            or own.get("axis", 0) != 0:
        raise get.bad(field, "must be PerRow, PerTensor, PerGroup or PerAxis of axis 0, "
                      f"got {shown(grain)}")
    return 0


def _data(own: Any) -> dict[str, Any]:
    found = own.get("_data") if isinstance(own, dict) else None
    return found if isinstance(found, dict) else {}


def _word(own: Any, default: str) -> Any:
    """The value of an enumeration, or of a dtype."""
    found = own.get("_data") if isinstance(own, dict) else own
    return default if found is None else found


# --- HQQ -----------------------------------------------------------------------------------------

HQQ_BITS = (1, 2, 3, 4, 5, 6, 8)
OF_SCALES = ("scale_quant_params", "zero_quant_params")


def hqq(get: Fields) -> StoredWeights:
    found = get.raw.get("quant_config")
    if not isinstance(found, dict) or not found:
        raise get.bad("quant_config", f"must be an object, got {shown(found)}")
    left = named_anywhere((HEAD,) if get.raw.get("skip_modules") is None else
                          listed_names(get, "skip_modules"))
    if "weight_quant_params" in found:
        return StoredWeights(HQQ, _hqq_weight(get, "quant_config", found), ((left, None),))
    rules: Rules = [(named_anywhere((name,)), _hqq_weight(get, f"quant_config.{name}", own))
                    for name, own in found.items()]
    return StoredWeights(HQQ, None, ((left, None), *rules))


def _hqq_weight(get: Fields, at: str, found: Any) -> StoredWeight | None:
    """How a module is stored of which the config has this under the name `at`."""
    if found is None:
        return None
    outer = Fields(found if isinstance(found, dict) else {}, get.where, f"{get.prefix}{at}.")
    own = outer.raw.get("weight_quant_params")
    if not isinstance(own, dict):
        raise outer.bad("weight_quant_params", f"must be an object, got {shown(own)}")
    for name in OF_SCALES:
        if outer.raw.get(name):
            raise outer.bad(name, f"must be null, got {shown(outer.raw[name])}")
    of = Fields(own, get.where, f"{outer.prefix}weight_quant_params.")
    bits, axis = chosen(of, "nbits", HQQ_BITS), chosen(of, "axis", (0, 1))
    if not flag(of, "channel_wise", True):
        raise of.bad("channel_wise", "must be true")
    group = 0 if own.get("group_size") is None else of.int("group_size")
    return StoredWeight(HQQ, bits, group, False, across=axis == 0)


# --- auto-round ----------------------------------------------------------------------------------

PACKING = "packing_format"
PACKINGS = {"auto_round:auto_gptq": GPTQ, "auto_round:gptq": GPTQ, "auto_round:auto_awq": AWQ,
            "auto_round:awq": AWQ, "auto_round:gptqmodel": GPTQ_V2, "auto_round": GPTQ_V2}
"""Which layouts the names of packings mean. Of its own one zero-points are stored as they are."""
PLAIN_BITS = 16
"""From which on a module is not quantised."""


def auto_round(get: Fields) -> StoredWeights:
    packing = get.raw.get(PACKING, "auto_round:auto_gptq")
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise get.bad(PACKING, f"must be {', '.join(PACKINGS)}, got {shown(packing)}")
    for name in ("rotation_config", "super_bits", "super_group_size"):
        if get.raw.get(name):
            raise get.bad(name, f"is not supported, got {shown(get.raw[name])}")
    own, extra = _auto_round_weight(get, packing), get.raw.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        raise get.bad("extra_config", f"must be an object of objects, got {shown(extra)}")
    base = {name: value for name, value in get.raw.items() if name != "extra_config"}
    rules = _by_name(get, "extra_config", {name: _auto_round_weight(
        Fields({**base, **changed}, get.where, f"{get.prefix}extra_config.{name}."), packing)
        for name, changed in extra.items()}, ".*")
    left = named_anywhere((HEAD, *listed_names(get, "modules_to_not_convert")))
    rules.append((left, None))
    blocks = get.raw.get("block_name_to_quantize")
    if blocks is None:
        return StoredWeights(AUTO_ROUND, own, tuple(rules))
    names: list[Any] = blocks.split(",") if isinstance(blocks, str) else [
        each for block in (blocks if isinstance(blocks, list) else [None])
        for each in (block if isinstance(block, list) else [block])]
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise get.bad("block_name_to_quantize", f"must list names, got {shown(blocks)}")
    # Of blocks 10 to 19 the name is what theirs begin with: model.layers.1.
    starts = sorted({MODEL_PREFIX.sub("model.", name.strip()) for name in names})
    joined = [f"{PATTERN}{name.replace('.', chr(92) + '.')}" for name in starts]
    some = module_names(get, "block_name_to_quantize", joined) if len(joined) <= MAX_PATTERNS \
        else ModuleNames(frozenset(starts))
    return StoredWeights(AUTO_ROUND, None, (*rules, (some, own)))


def _auto_round_weight(get: Fields, packing: str) -> StoredWeight | None:
    bits = get.raw.get("bits")
    if isinstance(bits, int) and bits >= PLAIN_BITS:
        return None
    inputs = get.raw.get("act_bits")
    if isinstance(inputs, int) and inputs < PLAIN_BITS:
        raise get.bad("act_bits", f"must be {PLAIN_BITS}, got {inputs}")
    if get.raw.get("data_type", "int") != "int":
        raise get.bad("data_type", f"must be int, got {shown(get.raw['data_type'])}")
    layout = PACKINGS[packing]
    return StoredWeight(layout, chosen(get, "bits", (4,) if layout == AWQ else (4, 8)),
                        group_size(get, "group_size"), flag(get, "sym", True))


# --- rules for modules ----------------------------------------------------------------------------

def _by_name(get: Fields, at: str, stored: dict[str, StoredWeight | None],
             begin: str = PATTERN) -> Rules:
    """Rules for modules by their names, then by patterns, which begin as `begin` says."""
    names: Rules = []
    patterns: Rules = []
    for name, how in stored.items():
        text = name if begin == PATTERN or not name.startswith(begin) else f"{PATTERN}{name}"
        (patterns if text.startswith(PATTERN) else names).append(
            (module_names(get, at, [text]), how))
    if len(patterns) > MAX_PATTERNS:
        raise get.bad(at, f"has more than {MAX_PATTERNS} patterns")
    return [*names, *patterns]
