"""What images bring to a step: rows that take the place of placeholders' embeddings, and others
that are added behind the first layers (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actorium.kernels.inputs import HiddenStream


@dataclass(slots=True)
class ImageRows:
    """Of one step, in the model's dtype, on its device."""

    places: Tensor
    """i64[R]: which of the step's T rows."""
    embeddings: Tensor
    """[R, hidden]"""
    deep: tuple[Tensor, ...] = ()
    """[R, hidden] each, of the first layers; there are fewer than layers."""


def placed(images: ImageRows | None, hidden: Tensor) -> Tensor:
    """What goes into the first layer. hidden: [T, hidden], of the tokens, written to."""
    return hidden if images is None else hidden.index_copy_(0, images.places, images.embeddings)


def deepened(images: ImageRows | None, layer: int, stream: HiddenStream) -> HiddenStream:
    """What goes on behind this layer, that gave `stream` of all T rows."""
    if images is None or layer >= len(images.deep):
        return stream
    if isinstance(stream, Tensor):
        return stream.index_add(0, images.places, images.deep[layer])
    # A sum not yet made, which the next layer is ready for. Its first part may be a rank's own, of
    # a sum over all ranks, which would count the rows once for each; the second is whole on each.
    part, hidden = stream
    return part, hidden.index_add(0, images.places, images.deep[layer])
