"""What is not exact where Triton's kernels run, or a device's own libraries: see `exactness`.

Nothing here has been seen on a device. What is said to be exact is so by how its kernels are made,
and as far as Triton's interpreter and compiler show it; docs/exactness.md has the list.
"""

from __future__ import annotations

from actorium.gpu.attention.attention_backend import TritonAttention
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.deepseek import GroupedMixture
from actorium.gpu.models.recurrent import RecurrentLayer
from actorium.kernels.ops import Ops

ALIGNED = 16
"""Numbers of a row, of which norms are to have multiples: their loads, and with them the order of
their sums, follow from how rows are aligned."""


def device_departures(model: Decoder) -> list[str]:
    """What is not exact, in words; empty: everything is, as far as can be told."""
    found = _products(model.ops)
    for part in {own.name: own for own in model.attention[:2]}.values():
        if not isinstance(part, TritonAttention) or not part.exact:
            found.append(f"attention by {part.name}, whose tiles and splits follow the step")
    kinds = {type(layer.mixer).__name__ for layer in model.layers
             if isinstance(layer.mixer, RecurrentLayer)}
    found += [f"prompts through {kind} layers, which go in chunks" for kind in sorted(kinds)]
    if any(isinstance(layer.mlp, GroupedMixture) for layer in model.layers):
        found.append("the choice of experts, by torch in float32")
    shape = model.shape
    found += [f"norms of {width} numbers (exact are multiples of {ALIGNED})"
              for width in sorted({shape.hidden, shape.head_dim}) if width % ALIGNED]
    if model.group.place.size > 1:
        found.append("sums over ranks, of which nothing has been shown")
    if model.vision is not None:
        found.append("images")
    return found


def _products(ops: Ops) -> list[str]:
    inexact: set[str] | None = getattr(ops, "inexact", None)
    if inexact is not None:
        return sorted(inexact)
    return ["products, whose kernels follow the number of rows" if ops.name == "triton"
            else "products by torch"]
