"""The tensors of GGUF files by the names that they have in a checkpoint of their family
(`gguf_families.py`): as they are, as rows of a larger one, or joined.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from actorium.actors.errors import shown
from actorium.actors.models.gguf_families import GgufFamily, family
from actorium.actors.models.gguf_file import GgufFile, GgufTensor, read_tensor
from actorium.actors.models.gguf_names import (
    BEHIND_KEYS,
    COLUMNS,
    COMPUTED,
    JOINED,
    LATENT,
    NOT_WEIGHTS,
    ONE_EACH,
    QKV,
    SECOND,
    Name,
)

MAX_LAYERS = 4096
MINUS_ONE = "minus_one"
SCALES = ("scale", "input_scale")
"""Of a whole weight, and of its inputs: what names end with."""
GROUP, TERNARY_GROUP = 32, 128
"""Columns that share a scale in memory, at most: of all types, and of TQ1_0 and TQ2_0."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([\w.]+)")


class HeadOrder(NamedTuple):
    """Value heads in the order of a file: of each key head the first, then of each the second."""

    dim: int
    """0: they are rows; 1: columns."""
    first: int
    """Rows before them."""
    keys: int
    """Key heads."""
    times: int
    """Value heads of each."""
    width: int
    """Rows or columns of a value head."""


class GgufPart(NamedTuple):
    """A tensor of a checkpoint, as the file has it."""

    name: str
    """In the checkpoint."""
    stored: GgufTensor
    expert: int | None = None
    """Which part of a tensor of all experts it is."""
    rows: tuple[int, int] | None = None
    """(first, behind the last) of a tensor's; None: all."""
    heads: int = 0
    """Heads whose rows lie in pairs; 0: rows lie as in the checkpoint."""
    change: str = ""
    """What is done to it; see `GgufFamily.changes`."""
    other: GgufTensor | None = None
    """What is joined with it."""
    order: HeadOrder | None = None
    """None: value heads of a key head lie together."""
    optional: bool = False
    """A model may make nothing of it."""

    @property
    def kind(self) -> str:
        """The type in which a matrix can be held."""
        group = TERNARY_GROUP if self.stored.type.name.startswith("TQ") else GROUP
        if self.order is not None and self.order.dim and self.order.width % group:
            return "F32"
        kept = self.change == "" or self.change == JOINED and self.other is not None and (
            self.other.type == self.stored.type)
        return self.stored.type.name if kept else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        shape = self.stored.shape if self.expert is None else self.stored.shape[1:]
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        if self.other is not None and self.change == JOINED:
            return (shape[0] + self.other.shape[0], *shape[1:])
        if self.other is not None:  # [heads, rank, keys] and [heads, values, rank]
            return (shape[0] * (shape[2] + self.other.shape[1]), shape[1])
        return {"row": (1, math.prod(shape)), "convolution": (math.prod(shape[:-1]), 1, shape[-1]),
                "flat": (math.prod(shape),), "log_negated": (math.prod(shape),)
                }.get(self.change, shape)


class _Names(NamedTuple):
    """What a file's tensors are called."""

    file: GgufFile
    tensors: dict[str, GgufTensor]
    at: str
    family: GgufFamily
    layers: int
    heads: int

    @property
    def kv_heads(self) -> int:
        """Raises `BadModel` where layers differ in them."""
        return kv_heads_of(self.file, self.at, self.heads)

    def parts(self, name: str, stored: GgufTensor) -> Iterator[GgufPart]:
        """The tensors of a checkpoint that are in this one. Raises `BadModel`."""
        module, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(name)
        if layer is None:
            if module in self.family.outer:
                yield from self._of_none(f"{self.family.outer[module]}.{kind}", name, stored)
            elif name not in NOT_WEIGHTS:
                raise self._unknown(name)
            return
        i, inner = int(layer[1]), layer[2]
        if i < self.layers:
            yield from self._of_layer(f"model.layers.{i}.", name, inner, stored)
        elif i == self.layers and self.family.drafts:
            own, (module, _, kind) = self.family.drafts, inner.rpartition(".")
            apart = "ffn" in own and inner.startswith(("ffn_", "exp_probs_b"))
            parts = (self._named(f"{own[module].format(i)}.{kind}", inner, stored)
                     if module and module in own else
                     self._of_layer(own["ffn" * apart].format(i), name, inner, stored))
            for part in parts:
                yield part._replace(optional=True)

    def _of_none(self, own: str, name: str, stored: GgufTensor) -> Iterator[GgufPart]:
        """Those of no layer."""
        if "{}" not in own:
            yield from self._named(own, name, stored)
            return
        if len(stored.shape) != 3:
            raise self.file.bad(f"tensor {name}", "must have three dimensions")
        for i in range(stored.shape[0]):
            yield from self._named(own.format(i), name, stored, i)

    def _of_layer(self, prefix: str, name: str, inner: str,
                  stored: GgufTensor) -> Iterator[GgufPart]:
        """Those of a layer, whose names begin so."""
        if inner in COMPUTED:
            return
        module, _, kind = inner.rpartition(".")
        if inner in self.family.layer:
            yield from self._named(f"{prefix}{self.family.layer[inner]}", inner, stored)
        elif kind not in ("weight", "bias"):
            raise self._unknown(name)
        elif module in self.family.by_head and len(stored.shape) == 2 and kind == "weight":
            for head in range(stored.shape[0]):
                each = _prefixed(prefix, self.family.by_head[module], kind, head)
                yield from self._named(each, inner, stored, head)
        elif module in self.family.layer:
            own = _prefixed(prefix, self.family.layer[module], kind)
            yield from self._named(own, inner, stored)
        elif module in self.family.experts:
            if len(stored.shape) != (3 if kind == "weight" else 2):
                raise self.file.bad(f"tensor {name}", "must be weights of three dimensions, or "
                                    "biases of two")
            for expert in range(stored.shape[0]):
                each = _prefixed(prefix, self.family.experts[module], kind, expert)
                yield from self._named(each, inner, stored, expert)
        else:
            raise self._unknown(name)

    def _named(self, names: Name, inner: str, stored: GgufTensor,
               expert: int | None = None) -> Iterator[GgufPart]:
        """Each with its rows. inner: the tensor's own name, in its layer."""
        change = self.family.changes.get(inner, "")
        if not change and self.family.norm_plus_one and inner.endswith("norm.weight"):
            change = MINUS_ONE
        if isinstance(names, str):
            part = GgufPart(names, stored, expert, None, self._paired(names, stored), change,
                            order=self._order(inner, stored),
                            optional=inner.startswith("indexer."))
            if change not in (LATENT, JOINED):
                yield part
            elif inner.partition(".")[0] in SECOND:
                yield part._replace(other=self._other(part))
            return
        rows, first = stored.shape[0 if expert is None else 1], 0
        for name, size in zip(names, self._sizes(len(names), rows, inner), strict=True):
            yield GgufPart(name, stored, expert, (first, first + size),
                           self._paired(name, stored._replace(shape=(size,))), change)
            first += size

    def _order(self, inner: str, stored: GgufTensor) -> HeadOrder | None:
        """How the value heads lie. Raises `BadModel`."""
        place = self.family.tiled.get(inner)
        if place is None:
            return None
        keys, values, size, width = (self.file.number(f"{self.at}.ssm.{key}") for key in (
            "group_count", "time_step_rank", "inner_size", "state_size"))
        if keys < 1 or values % keys or values < 1 or size % values:
            raise self.file.bad(f"{self.at}.ssm.time_step_rank", f"{values} value heads are not "
                                f"those of {keys} key heads")
        first = 2 * keys * width if place == BEHIND_KEYS else 0
        order = HeadOrder(int(place == COLUMNS), first, keys, values // keys,
                          1 if place == ONE_EACH else size // values)
        if stored.shape[order.dim - len(stored.shape) if order.dim else 0] != (
                order.first + values * order.width):
            raise self.file.bad(f"tensor {stored.name}", f"has not {values} value heads")
        return order if order.times > 1 else None

    def _other(self, part: GgufPart) -> GgufTensor:
        """What is joined with this one."""
        *at, module, kind = part.stored.name.split(".")
        name, shape = ".".join((*at, SECOND[module], kind)), part.stored.shape
        other = self.tensors.get(name)
        fits = other is not None and len(shape) == len(other.shape) == 3 and (
            other.shape[0], other.shape[2]) == shape[:2]
        if part.change == JOINED:
            fits = other is not None and shape == other.shape
        if other is None or not fits:
            raise self.file.bad(f"tensor {name}", f"must be there, and fit {part.stored.name}")
        return other

    def _sizes(self, count: int, rows: int, inner: str) -> tuple[int, ...]:
        """How many rows each of the parts has."""
        key, each = 0, count
        if count == len(QKV):
            key = self.kv_heads
            each = self.heads + 2 * key
        if rows % max(1, each):
            raise self.file.bad(f"tensor {inner}", f"{rows} rows are not those of {each} parts")
        if count == len(QKV):
            width = rows // each
            return self.heads * width, key * width, key * width
        return (rows // each,) * count

    def _paired(self, name: str, stored: GgufTensor) -> int:
        """Heads whose rows lie in pairs."""
        if not self.family.permuted:
            return 0
        module = name.rpartition(".")[0]
        heads = (self.heads if module.endswith(QKV[0]) else
                 self.kv_heads if module.endswith(QKV[1]) else 0)
        if heads and stored.shape[0] % (2 * heads):
            raise self.file.bad(f"tensor {stored.name}", f"{stored.shape[0]} rows are not those of "
                                f"{heads} heads")
        return heads

    def _unknown(self, name: str) -> Exception:
        return self.file.bad(f"tensor {shown(name)}", f"is none of {self.at}'s that are served")


def _prefixed(prefix: str, names: Name, kind: str, expert: int | None = None) -> Name:
    """Names of tensors of a layer; expert: its number in them."""
    if isinstance(names, str):
        return f"{prefix}{names.format(expert)}.{kind}"
    return tuple(f"{prefix}{name.format(expert)}.{kind}" for name in names)


def checkpoint_tensors(file: GgufFile) -> Iterator[GgufPart]:
    """The file's tensors by the names that they have in a checkpoint, in the order of their bytes.
    Raises `BadModel`, also where one is not known: what it stands for would be left out."""
    own, at = family(file), file.text("general.architecture")
    heads = file.same(f"{at}.attention.head_count")
    tensors = dict(_with_factors(file, own))
    names = _Names(file, tensors, at, own, layers_of(file, at), heads)
    for key, name in own.numbers.items():
        for i, number in enumerate(file.reals(key, names.layers)):
            yield GgufPart(f"model.layers.{i}.{name}", number)
    for name, stored in tensors.items():
        yield from names.parts(name, stored)


def _with_factors(file: GgufFile, own: GgufFamily) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors by name, those in NVFP4 with the scales that lie beside them; scales of inputs
    are not used. Raises `BadModel` where one is of another tensor. Scales that a family has in all
    of its checkpoints are tensors."""
    for name, stored in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind in SCALES and not _has_scale(own, stem):
            weight = file.tensors.get(f"{stem}.weight")
            if (weight is None or weight.type.name != "NVFP4" or stored.type.name != "F32"
                    or stored.shape not in ((1,), weight.shape[:-2])):
                raise file.bad(f"tensor {shown(name)}", "is no scale of a weight in NVFP4, which "
                               "alone are served")
            continue
        scale = file.tensors.get(f"{stem}.{SCALES[0]}") if kind == "weight" and not _has_scale(
            own, stem) else None
        if scale is not None and scale.type.name == "F32":
            data = read_tensor(scale)
            stored = stored._replace(factors=struct.unpack(f"<{len(data) // 4}f", data))
        yield name, stored


def _has_scale(own: GgufFamily, stem: str) -> bool:
    return (layer := _LAYER_NAME.fullmatch(stem)) is not None and (
        f"{layer[2]}.{SCALES[0]}" in own.layer)


def kv_heads_of(file: GgufFile, at: str, heads: int) -> int:
    """Of each layer with attention."""
    return file.same(f"{at}.attention.head_count_kv", heads)


def layers_of(file: GgufFile, at: str) -> int:
    """Those that are not there to draft."""
    key, drafting = f"{at}.block_count", file.number(f"{at}.nextn_predict_layers", 0)
    if (layers := file.number(key)) > MAX_LAYERS:
        raise file.bad(key, f"{layers} layers are more than {MAX_LAYERS}")
    return max(0, layers - drafting)
