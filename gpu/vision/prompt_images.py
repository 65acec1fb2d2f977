"""From the images of prompts to what a step takes of them: its chunks may begin and end anywhere,
within an image as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from actorium.gpu.step.batch import ForwardBatch, ImageRows
from actorium.gpu.vision.grids import I64, RopePositions
from actorium.gpu.vision.tower import VisionRows


class ChunkImages(NamedTuple):
    """What a chunk of a prompt has of its images."""

    axes: I64
    """[3, count]: positions of its tokens."""
    places: I64
    """[rows]: which of its tokens are an image's, in order."""
    rows: VisionRows | None
    """Of those, on the device; None where there are none."""


def chunk_images(positions: RopePositions, start: int, count: int,
                 rows: Callable[[int, int], VisionRows]) -> ChunkImages:
    """Of the tokens from `start` on, some of which may lie behind the prompt. rows(low, high): of
    the tokens `positions.places[low:high]`, at least one."""
    known = positions.axes[:, start:start + count]
    behind = np.arange(start + known.shape[1], start + count) + positions.delta
    axes = np.concatenate((known, np.broadcast_to(behind, (3, len(behind)))), 1)
    low, high = np.searchsorted(positions.places, (start, start + count)).tolist()
    return ChunkImages(axes, positions.places[low:high] - start,
                       rows(low, high) if low < high else None)


def add_images(batches: Sequence[ForwardBatch], chunks: Mapping[int, ChunkImages]) -> None:
    """Give a step what it takes of its sequences' images: `rope_positions` and `images`. chunks: by
    the slots of the extends that have any."""
    first = batches[0]
    axes, start = np.empty((3, first.extend_tokens), np.int64), 0
    places: list[I64] = []
    image_rows: list[VisionRows] = []
    for row in first.extends:
        part, own = axes[:, start:start + row.count], chunks.get(row.slot)
        part[:] = np.arange(row.start, row.start + row.count) if own is None else own.axes
        if own is not None and own.rows is not None:
            places.append(own.places + start)
            image_rows.append(own.rows)
        start += row.count
    plain = bool((axes == axes[0]).all())  # as text: every path of a step can serve it
    decodes = first.positions[first.extend_tokens:]
    turned = torch.cat((
        torch.from_numpy(axes[0] if plain else axes).to(decodes.device),
        decodes if plain else decodes.expand(3, -1)), -1)
    for batch in batches:
        batch.rope_positions = turned
    first.images = _joined(places, image_rows, decodes.device)


def _joined(places: Sequence[I64], found: Sequence[VisionRows],
            device: torch.device) -> ImageRows | None:
    if not found:
        return None
    deep = zip(*(rows.deep for rows in found), strict=True)
    return ImageRows(torch.from_numpy(np.concatenate(places)).to(device),
                     torch.cat([rows.embeddings for rows in found]), tuple(map(torch.cat, deep)))
