"""The inputs of one forward pass: the rows of a step, on the device.

A step has one `ForwardBatch` for each group of layers (`ModelShape.groups`): the same rows, with
the pages that they have in the group's pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from actorium.kernels.inputs import HiddenStream
from actorium.kernels.ragged import ExtendRun


@dataclass(slots=True)
class ExtendRow:
    """One sequence's chunk of prompt; all numbers are known on the host."""

    slot: int
    start: int
    """Tokens already in the pages."""
    count: int
    """Tokens computed now; kv length after the step = start + count."""
    pages: Tensor
    """i32[ceil((start+count)/page_size)]: its page table in the group's pool, on the device.
    Entries that lie behind the window of everything computed now may name any page."""


@dataclass(slots=True)
class ForwardBatch:
    """Rows of one step as one group of layers sees them: the tokens of all extend rows first
    (ragged), then the decode rows. The groups' batches share all tensors but the pages.

    T = sum(extend counts) + decode rows * decode_q_len.
    """

    tokens: Tensor
    """i64[T]"""
    positions: Tensor
    """i64[T]: where rope turns the rows to, unless `rope_positions` says: the numbers of their
    tokens, of decodes with their slot's `ROPE_DELTA`."""
    kv_index: Tensor
    """i64[T]: page * page_size + offset where each token's K and V go; the sink page 0 for rows
    that must write nothing."""
    extends: list[ExtendRow]
    extend_tokens: int
    decode_rows: int
    decode_pages: Tensor | None
    """i32[decode_rows, P]: page table rows, P >= ceil(max_kv_len / page_size). Entries behind a
    row's window, or beyond its length, may name any page."""
    decode_kv_lens: Tensor | None
    """i32[decode_rows]: kv length with the new token(s) in it; >= 1."""
    max_kv_len: int
    """Host bound on decode_kv_lens."""
    logit_rows: Tensor
    """i64[R]: rows of T whose logits are wanted."""
    decode_q_len: int = 1
    """Rows of each decode: the last token and the drafts that follow on it."""
    all_rows: bool = False
    """The model gives every row, not only `logit_rows`: a drafter reads them all."""
    rope_positions: Tensor | None = None
    """i64[T], or i64[3, T] of time, height and width, each below the model's longest length: where
    rope turns the rows of a step whose prompts have images; see `gpu/vision/prompt_images.py`."""
    types: Tensor | None = None
    """i64[T]: which of two texts each row is of, of models that know token types; None: all are of
    the first."""
    images: ImageRows | None = None
    """What rows have of images; None where none has. Read of the first group's batch."""
    given: ImageRows | None = None
    """Likewise, of prompts given as embeddings: rows of the embedding table are replaced, before
    anything is done to them."""
    tapped: dict[int, Tensor] = field(default_factory=dict)
    """[T, hidden] of what went into layers, by their numbers: the first group's batch gets those
    that an EAGLE-3 head takes."""
    hidden: HiddenTap | None = None
    """Of the first group's batch, where requests ask for hidden states."""

    @property
    def turned_to(self) -> Tensor:
        """Where rope turns the rows to."""
        return self.positions if self.rope_positions is None else self.rope_positions


@dataclass(slots=True)
class StateRows:
    """Where the recurrent states of a step's sequences lie: rows of the state pool."""

    extends: list[ExtendRun]
    """Of the extend rows, in their order."""
    decodes: Tensor
    """i64[decode_rows]: of the decode rows; below 0 for those that fill up a batch, which have no
    state: nothing is read or written for them. A sequence that has ended still writes its own."""
    q_len: int = 1
    """Tokens of each decode row: the last one, which is certain, and drafts."""
    accepted: Tensor | None = None
    """i64[decode_rows]: how many drafts of its last window each row's sequence has accepted; what
    is below 0 counts as 0. None where nothing is ever drafted."""


@dataclass(slots=True)
class HiddenTap:
    """Keeps hidden states between layers, for requests that ask for them. They are brought to the
    host layer by layer, for which the host waits: those of all layers would not fit what the memory
    plan leaves of a device."""

    layers: frozenset[int]
    """i = what goes into the i-th layer, from 0."""
    rows: Tensor
    """i64[R]: those of the step's rows that are kept."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """[R, hidden] of each layer, on the host."""

    def keep(self, layer: int, stream: Tensor, scale: float) -> None:
        """Take what goes into a layer, [T, hidden]; scale: `ModelShape.stream_scale`."""
        own = stream.index_select(0, self.rows)
        self.kept[layer] = (own if scale == 1 else own * scale).cpu()


# --- Images --------------------------------------------------------------------------------------

@dataclass(slots=True)
class ImageRows:
    """What images bring to a step, in the model's dtype, on its device: rows that take the place of
    placeholders' embeddings, and others that are added behind the first layers (DeepStack, arXiv
    2406.04334)."""

    places: Tensor
    """i64[R]: which of the step's T rows."""
    embeddings: Tensor
    """[R, hidden]"""
    deep: tuple[Tensor, ...] = ()
    """[R, hidden] each, of the first layers; there are fewer than layers."""


def with_embeddings(images: ImageRows | None, hidden: Tensor) -> Tensor:
    """What goes into the first layer: hidden, [T, hidden], with the images' rows written in
    place of the placeholders'; or with those of prompts given as embeddings."""
    if images is None:
        return hidden
    return hidden.index_copy_(0, images.places, images.embeddings.to(hidden.dtype))


def with_deepstack(images: ImageRows | None, layer: int, stream: HiddenStream) -> HiddenStream:
    """What goes into the layer behind this one, which gave `stream` of all T rows."""
    if images is None or layer >= len(images.deep):
        return stream
    if isinstance(stream, Tensor):
        return stream.index_add(0, images.places, images.deep[layer])
    # A sum not yet made, which the next layer is ready for. Its first part may be a rank's own, of
    # a sum over all ranks, which would count the rows once for each; the second is whole on each.
    part, hidden = stream
    return part, hidden.index_add(0, images.places, images.deep[layer])
