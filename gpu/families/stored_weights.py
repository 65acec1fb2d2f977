"""How files have the weights of modules that are held in codes, module by module, and the typed
fields of configs that say so: see `quant_config.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields
from actorium.gpu.families.fp8_config import INTEGER_FORMATS, INTEGER_METHODS, MODEL_PREFIX, MXFP4
from actorium.gpu.families.module_patterns import ModulePattern, parse_pattern
from actorium.gpu.families.tensor_specs import TensorSpec
from actorium.gpu.families.weight_formats import GroupedShape, WeightFormat

GROUPS = (16, 32, 64, 128)
"""Columns that share a scale in memory; a larger group of a file is several of the last."""
AWQ, GPTQ, BITSANDBYTES, HQQ, AUTO_ROUND = INTEGER_METHODS
GPTQ_V2 = "gptq_v2"
PACKED, INTEGERS, NAIVE, MIXED = INTEGER_FORMATS[:4]
PATTERN = "re:"
"""What a pattern of names begins with."""
IMAGES = "language_model"
"""Where checkpoints of text and images have what this engine serves."""
HEAD = "lm_head"
BNB_INT8, BNB_NF4, BNB_FP4 = "bnb-int8", "bnb-nf4", "bnb-fp4"
"""Layouts of bitsandbytes: whole numbers, and codes of two tables of 16 numbers."""
NVFP4, NVFP4_MODELOPT, MXFP4_PACKED = "nvfp4-pack-quantized", "nvfp4", "mxfp4-pack-quantized"
"""Layouts of numbers in e2m1: of compressed-tensors, ModelOpt, and compressed-tensors again."""
LOOKED_UP = {BNB_NF4: 8, BNB_FP4: 8, NVFP4: 5, NVFP4_MODELOPT: 5, MXFP4_PACKED: 5}
"""Layouts whose codes of 4 bits are indices of a table, and the bits of whole numbers that take
their places in memory."""
MAX_PARTS, MAX_PATTERNS = 10_000, 64
"""Of parts of names in a list, and of patterns, each of which is asked for every module."""


class StoredWeight(NamedTuple):
    """How the files have a weight."""

    layout: str
    """AWQ, GPTQ, GPTQ_V2, PACKED, INTEGERS, HQQ, MXFP4, BNB_INT8 or one of LOOKED_UP: which
    tensors it has, and what is in them."""
    bits: int
    """Of a code: 4 or 8; 1 to 8 where a code takes a byte, or of HQQ."""
    group: int
    """Columns that share a scale; 0: all of a row do."""
    symmetric: bool
    """No zero-points: all are the middle code."""
    ordered: bool = False
    """A group's columns may lie anywhere in a row (act-order)."""
    across: bool = False
    """Rows of a column share a scale (HQQ's axis 0): it is dequantised when it is read."""

    @property
    def held(self) -> WeightFormat:
        """The format in memory."""
        bits = LOOKED_UP.get(self.layout, 4 if self.bits <= 4 else 8)
        return WeightFormat(bits, min(self.group, GROUPS[-1]), not self.symmetric,
                            self.layout == MXFP4)

    def held_of(self, columns: int) -> WeightFormat | None:
        """That of a weight of so many columns; None where they are not whole groups."""
        own = self.held
        if self.across or self.group and self.group not in GROUPS and self.group % GROUPS[-1]:
            return None
        return own if columns % max(1, self.group) == 0 and own.takes(columns) else None


class ModuleNames(NamedTuple):
    """Some of a model's modules."""

    names: frozenset[str] = frozenset()
    """Of a module, or of what it is a part of."""
    patterns: tuple[ModulePattern, ...] = ()
    parts: tuple[str, ...] = ()
    """Of a module's name, with a dot before it and one behind."""

    def has(self, module: str) -> bool:
        """Whether this one is among them. module: its name in checkpoints of the language model
        alone; patterns may mean that of one with images."""
        dots = [i for i, char in enumerate(module) if char == "."]
        if module in self.names or any(module[:i] in self.names for i in dots):
            return True
        if any(part in f".{module}." for part in self.parts):
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
    """The method: one of `STORED` of the config's tree."""
    default: StoredWeight | None
    """Of what no rule is about; None: not quantised."""
    rules: tuple[tuple[ModuleNames, StoredWeight | None], ...]
    """The first that has a module is about it."""

    def of(self, module: str) -> StoredWeight | None:
        """How this module's weight is stored, if it is quantised at all."""
        return next((how for names, how in self.rules if names.has(module)), self.default)

    @property
    def _most(self) -> StoredWeight | None:
        """How the files have most weights."""
        return self.default or next((how for _, how in self.rules if how is not None), None)

    @property
    def bits(self) -> float:
        """Of a number in the files, its share of scales in two bytes counted."""
        own = self._most
        return 0.0 if own is None else own.bits + (16.0 * (2 - own.symmetric) / own.group
                                                   if own.group else 0)

    @property
    def estimated(self) -> GroupedShape:
        """The format in memory of most weights, of a model whose tensors are not known."""
        return GroupedShape(self.source, self._most and self._most.held)

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


# --- fields -------------------------------------------------------------------------------------

def chosen(get: Fields, name: str, known: tuple[int, ...]) -> int:
    found = get.raw.get(name)
    if isinstance(found, bool) or found not in known:
        raise get.bad(name, f"must be {' or '.join(map(str, known))}, got {shown(found)}")
    return int(found)


def group_size(get: Fields, name: str) -> int:
    """Columns that share a scale; 0: all of a row do."""
    if get.raw.get(name) == -1:
        return 0
    size = get.int(name)
    if size not in GROUPS and size % GROUPS[-1]:
        raise get.bad(name, f"must be -1, {', '.join(map(str, GROUPS))} or a multiple of "
                      f"{GROUPS[-1]}, got {size}")
    return size


def flag(get: Fields, name: str, default: bool) -> bool:
    found = get.raw.get(name)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise get.bad(name, f"must be true or false, got {shown(found)}")
    return found


def listed_names(get: Fields, name: str, most: int = MAX_PARTS) -> tuple[str, ...]:
    """The names that a field lists, at most so many; none where it is absent or null."""
    found = get.raw.get(name)
    if not isinstance(found, list | None):
        raise get.bad(name, f"must list names, got {shown(found)}")
    return checked_names(get, name, found or [], most)


def checked_names(get: Fields, name: str, found: list[Any],
             most: int = MAX_PARTS) -> tuple[str, ...]:
    if not all(isinstance(each, str) and each for each in found):
        raise get.bad(name, "must list names")
    if len(found) > most:
        raise get.bad(name, f"must list at most {most} names")
    return tuple(found)


def module_names(get: Fields, field: str, found: Iterable[str]) -> ModuleNames:
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


def named_anywhere(names: tuple[str, ...]) -> ModuleNames:
    """Modules of these names, or whose names have these as parts."""
    names = tuple(MODEL_PREFIX.sub("model.", name) for name in names)
    return ModuleNames(frozenset(names), (), tuple(f".{name}." for name in names))
