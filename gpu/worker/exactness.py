"""What of a model's results depends on more than the tokens they are of, on this device.

Exact: a token's numbers have the same bits alone and in any batch, at any place of it, in chunks
of any size, behind a prefix that was cached or computed, decoded, verified as a draft, or computed
again as part of a prompt after its pages were taken or a worker died. docs/exactness.md says what
makes them so."""

from __future__ import annotations

from typing import Any

from actorium.actors.errors import BadConfig
from actorium.gpu.attention.attention_backend import NativeAttention, TritonAttention
from actorium.gpu.models.decoder import Decoder, LoadedModel
from actorium.gpu.models.kimi import Kda
from actorium.gpu.models.mamba1 import Mamba1
from actorium.gpu.models.mlp import GroupedMixture
from actorium.gpu.models.parted import RecurrentBesideAttention
from actorium.gpu.models.recurrent import GatedDelta, Mamba2, RecurrentLayer
from actorium.gpu.models.short_conv import ShortConv
from actorium.kernels.cpu.delta_native import NativeDelta
from actorium.kernels.cpu.native_ops import MAX_SCORED, NativeOps
from actorium.kernels.reference.torch_ops import TorchOps

CHOICE = "the tokens that an indexer chooses, by products of torch in float32"
NAMED = 3
"""Shapes of weights that are named, at most."""
ALIGNED = 16
"""Numbers of a row, of which norms are to have multiples: their loads, and with them the order of
their sums, follow from how rows are aligned."""

TWO_PASSES = 32_768
"""Numbers that torch sums on one thread where they are a row alone, as of several rows."""


def departures(model: LoadedModel, asked: str) -> list[str]:
    """What is not exact, in words; empty: everything is. asked: `--exact`."""
    if asked == "off":
        return ["--exact off"]
    if not isinstance(model, Decoder):
        return [f"layers by {model.layers_by}"]
    ops = model.ops
    if model.device.type != "cpu" or ops.name == "triton":
        return device_departures(model)
    if not isinstance(ops, NativeOps):
        return [f"products and attention in {model.shape.dtype} are torch's here"]
    found = []
    pages = model.shape.attention_layers and not model.shape.bidirectional
    attention = model.attention[:2] if pages else ()
    if model.shape.bidirectional and (why := prompts_by_torch(model)):
        found.append(f"attention within prompts by torch ({why})")
    if ops.inexact:
        named = sorted(ops.inexact)
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        found.append(f"products by oneDNN (weights of {', '.join(named[:NAMED])}{more})")
    for part in {own.name: own for own in attention}.values():
        if not isinstance(part, NativeAttention):
            found.append(f"attention by {part.name}")
        elif not part.exact:
            found.append("decodes, which prompts' attention would round otherwise")
    mixers = _mixers(model)
    kinds = {type(own).__name__ for own in mixers
             if isinstance(own, RecurrentLayer) and not _by_steps(own)}
    found += [f"prompts through {kind} layers, which go in chunks" for kind in sorted(kinds)]
    if any(isinstance(own, Mamba2) and own.shared_by > 1 for own in mixers):
        found.append("the norm over a group of Mamba-2's heads, which ranks share")
    if model.group.place.size > 1 and model.shape.whole_qk_norm:
        found.append("the norms over all heads of queries and keys, which ranks share")
    if model.group.place.size > 1 and not model.group.replays:
        found.append("sums over ranks by torch's gloo")
    if ops.uncut:
        found.append(f"bits of other numbers of ranks (weights of {', '.join(sorted(ops.uncut))})")
    if model.shape.index is not None and model.shape.index.dim > MAX_SCORED:
        found.append(CHOICE)
    if model.vision is not None:
        found += model.vision.ops.inexact
    return found


def prompts_by_torch(model: Decoder) -> str:
    """Why the attention of a bidirectional model is torch's on a CPU; "": it is C's."""
    shape, ops = model.shape, model.ops
    if not isinstance(ops, NativeOps) or not ops.attends_prompts(shape.head_dim):
        return f"heads of {shape.head_dim} numbers"
    if shape.distance_buckets:
        return "scores that depend on distance"
    return "windows" if any(0 < own < shape.max_model_len for own in shape.windows) else ""


def _mixers(model: Decoder) -> list[Any]:
    """Those of all layers; of a recurrent layer beside attention, the former."""
    mixers = [layer.mixer for layer in model.layers]
    return [own.recurrent if isinstance(own, RecurrentBesideAttention) else own for own in mixers]


def _by_steps(layer: RecurrentLayer) -> bool:
    """Whether its prompts go token by token, by the kernel of its decodes."""
    if isinstance(layer, GatedDelta):
        return layer.native is not None and layer.native.exact
    return isinstance(layer, Kda | Mamba1 | Mamba2 | ShortConv) and layer.native is not None


def set_exact(model: LoadedModel, on: bool) -> None:
    """Lets the kernels of a loaded model that have two ways take this one."""
    if isinstance(model, Decoder):
        for part in two_way_kernels(model):
            part.exact = on


def two_way_kernels(model: Decoder) -> list[NativeAttention | NativeDelta]:
    """Those that have an exact and a fast way."""
    attention = [own for own in model.attention[:2] if not model.shape.bidirectional
                 and isinstance(own, NativeAttention) and own.two_ways]
    return [*attention, *(own.native for own in _mixers(model)
                          if isinstance(own, GatedDelta) and own.native is not None)]


def extends_two_ways(model: Decoder) -> bool:
    """Whether prompts take kernels that have two ways."""
    return any(isinstance(own, GatedDelta) and own.native is not None for own in _mixers(model))


def require_exact(model: LoadedModel, asked: str) -> None:
    """Raise `BadConfig` where everything was asked to be exact and something is not."""
    if asked == "on" and (found := departures(model, asked)):
        raise BadConfig(f"exact: on was asked for, but not exact here: {'; '.join(found)} "
                        "(--exact auto serves, and says so)", "device.exact")


# --- Devices, and Triton -------------------------------------------------------------------------

def device_departures(model: Decoder) -> list[str]:
    """What is not exact, in words; empty: everything is, as far as is known."""
    found = _products(model.ops)
    for part in {own.name: own for own in model.attention[:2]}.values():
        if not isinstance(part, TritonAttention) or not part.exact:
            found.append(f"attention by {part.name}, whose tiles and splits follow the step")
    kinds = {type(own).__name__ for own in _mixers(model) if isinstance(own, RecurrentLayer)}
    found += [f"prompts through {kind} layers, which go in chunks" for kind in sorted(kinds)]
    if any(isinstance(layer.mlp, GroupedMixture) for layer in model.layers):
        found.append("the choice of experts, by torch in float32")
    shape = model.shape
    found += [f"norms of {width} numbers (exact are multiples of {ALIGNED})"
              for width in sorted({shape.hidden, *(own.head_dim for own in shape.kinds)})
              if width % ALIGNED]
    if shape.altup is not None and (model.ops.name != "native" or shape.intermediate >= TWO_PASSES):
        found.append("means over streams and gates, by torch")
    if model.group.place.size > 1:
        found.append("sums over ranks, of which nothing has been shown")
    if shape.index is not None:
        found.append(CHOICE)
    if model.vision is not None:
        found.append("images")
    return found


def _products(ops: TorchOps) -> list[str]:
    inexact: set[str] | None = getattr(ops, "inexact", None)
    if inexact is not None:
        return sorted(inexact)
    return ["products, whose kernels follow the number of rows" if ops.name == "triton"
            else "products by torch"]
