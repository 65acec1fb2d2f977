"""From the images of prompts to what a step takes of them: its chunks may begin and end anywhere,
within an image as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.image_rows import ImageRows
from actorium.gpu.vision.grids import I64
from actorium.gpu.vision.mrope_positions import RopePositions
from actorium.gpu.vision.tower import VisionRows


class PromptImages(NamedTuple):
    """The images and videos of one sequence's prompt."""

    positions: RopePositions
    """On the host."""
    rows: VisionRows
    """Of all media in the order of the prompt, on the device, as many as `positions.places`."""


def add_images(batch: ForwardBatch, prompts: Mapping[int, PromptImages],
               decodes: Sequence[int] = ()) -> None:
    """Give a step what it takes of its sequences' images: `rope_positions` and `images`. Of the
    batches of all groups, the first is read.

    prompts: of the slots of `batch.extends` that have any. decodes: `RopePositions.delta` of each
    decode row's sequence, 0 of those without images; (): of all 0.
    """
    axes = np.broadcast_to(batch.positions.cpu().numpy(), (3, len(batch.tokens))).copy()
    start, places, found = 0, [], []
    for row in batch.extends:
        if own := prompts.get(row.slot):
            axes[:, start:start + row.count] = _axes(own.positions, row.start, row.count)
            low, high = np.searchsorted(own.positions.places, (row.start, row.start + row.count))
            places.append(own.positions.places[low:high] - row.start + start)
            found.append(VisionRows(own.rows.embeddings[low:high],
                                    tuple(deep[low:high] for deep in own.rows.deep)))
        start += row.count
    if len(decodes):
        axes[:, batch.extend_tokens:] += np.repeat(np.array(decodes, np.int64), batch.decode_q_len)
    plain = (axes == axes[0]).all()  # as text: every path of a step can serve it
    batch.rope_positions = torch.from_numpy(axes[0] if plain else axes).to(batch.positions.device)
    batch.images = _joined(places, found, batch.tokens.device)


def _axes(positions: RopePositions, start: int, count: int) -> I64:
    """[3, count]; behind the prompt as in text."""
    known = positions.axes[:, start:start + count]
    behind = np.arange(start + known.shape[1], start + count) + positions.delta
    return np.concatenate((known, np.broadcast_to(behind, (3, len(behind)))), 1)


def _joined(places: Sequence[I64], found: Sequence[VisionRows],
            device: torch.device) -> ImageRows | None:
    at = np.concatenate(places) if places else np.zeros(0, np.int64)
    if not len(at):
        return None
    deep = zip(*(rows.deep for rows in found), strict=True)
    return ImageRows(torch.from_numpy(at).to(device),
                     torch.cat([rows.embeddings for rows in found]), tuple(map(torch.cat, deep)))
