"""The vision towers against transformers', fp32, random tiny weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import load
from helpers_vision import pixels_of, write_vl

from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.vision.grids import Grid, frame_segments, output_rows, window_segments
from actorium.gpu.vision.tower import VisionTower

GRIDS = {
    "one image": [(1, 6, 10)], "a square of one window": [(1, 4, 4)], "odd": [(1, 2, 14)],
    "a video": [(3, 4, 6)], "several": [(1, 6, 10), (1, 2, 2), (1, 8, 4), (2, 6, 2), (1, 6, 10)]}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "2.5": ("2.5", {}), "2.5, large windows": ("2.5", {"window_size": 30}),
    "2.5, squares of 3": ("2.5", {"spatial_merge_size": 3, "window_size": 24}),
    "2.5, all in windows": ("2.5", {"fullatt_block_indexes": [], "num_heads": 4}),
    "3": ("3", {}), "3, finer positions": ("3", {"num_position_embeddings": 144}),
    "3, no DeepStack": ("3", {"deepstack_visual_indexes": [], "rope_parameters": {
        "rope_type": "axial", "rope_theta": 300.0}})}


def scaled(grids: list[tuple[int, int, int]], merge: int) -> list[Grid]:
    """The same of squares of `merge`."""
    return [Grid(t, h // 2 * merge, w // 2 * merge) for t, h, w in grids]


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, options = TOWERS[name]
    theirs = write_vl(tmp_path, kind, tower=options).model.visual
    model = load(tmp_path)
    ours, shape = model.vision, model.shape.vision
    assert ours is not None and shape is not None
    for grids in GRIDS.values():
        own = scaled(grids, shape.merge)
        pixels = pixels_of(own)
        with torch.no_grad():
            want = theirs(pixels, torch.tensor(own))
        got = ours.forward(pixels, own)
        assert len(got.embeddings) == sum(output_rows(grid, shape) for grid in own)
        deep = getattr(want, "deepstack_features", [])
        assert len(got.deep) == len(deep) == len(shape.deepstack)
        for found, right in zip((got.embeddings, *got.deep), (want.pooler_output, *deep),
                                strict=True):
            assert right.std() > 0.05
            assert torch.allclose(found, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_an_image_is_the_same_beside_others(kind: str, tmp_path: Path) -> None:
    write_vl(tmp_path, kind)
    tower = load(tmp_path).vision
    assert tower is not None
    grids = [Grid(*grid) for grid in GRIDS["several"]]
    pixels = pixels_of(grids)
    together, at, row = tower.forward(pixels, grids), 0, 0
    for grid in grids:
        alone = tower.forward(pixels[at:at + grid.patches], [grid])
        rows = output_rows(grid, tower.shape)
        for one, all_ in zip((alone.embeddings, *alone.deep),
                             (together.embeddings, *together.deep), strict=True):
            assert torch.allclose(one, all_[row:row + rows], atol=2e-6, rtol=1e-5)
        at, row = at + grid.patches, row + rows


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_in_c_its_bits_are_the_same_beside_others(kind: str, tmp_path: Path) -> None:
    """In bf16, with heads, rows and patches that are no multiples of 32 numbers; a video's frames
    together and one by one."""
    write_vl(tmp_path, kind, tower={"hidden_size": 144, "intermediate_size": 100,
                                    "temporal_patch_size": 3})
    tower = load(tmp_path, dtype="bfloat16").vision
    assert tower is not None and tower.shape.pixels == 144 and tower.shape.head_dim == 72
    if tower.ops.inexact:
        pytest.skip("no C kernels here")
    grids = [Grid(*grid) for grid in GRIDS["several"]]
    pixels = pixels_of(grids, width=144)
    together, at, row = tower.forward(pixels, grids), 0, 0
    frames = [grid._replace(frames=1) for grid in grids for _ in range(grid.frames)]
    for frame in frames:
        alone = tower.forward(pixels[at:at + frame.patches], [frame])
        rows = output_rows(frame, tower.shape)
        for one, all_ in zip((alone.embeddings, *alone.deep),
                             (together.embeddings, *together.deep), strict=True):
            assert one.equal(all_[row:row + rows]), frame
        at, row = at + frame.patches, row + rows
    assert row == len(together.embeddings)


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_bf16_stays_near_fp32(kind: str, tmp_path: Path) -> None:
    write_vl(tmp_path, kind)
    grids = [Grid(*grid) for grid in GRIDS["several"]]
    full, short = (load(tmp_path, dtype=dtype).vision for dtype in ("float32", "bfloat16"))
    assert full is not None and short is not None
    want, got = (tower.forward(pixels_of(grids), grids).embeddings for tower in (full, short))
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().mean() < 0.03 * want.std()


def test_segments_hold_every_patch_once(tmp_path: Path) -> None:
    write_vl(tmp_path, "2.5")
    shape = load(tmp_path).shape.vision
    assert shape is not None
    grids = [Grid(2, 6, 10), Grid(1, 4, 4)]
    for found in (frame_segments(grids), window_segments(grids, shape)):
        assert sorted(found.order) == list(range(136)) and found.lengths.sum() == 136
        frames, at = [60, 60, 16], 0
        for length in frames:  # of several segments each: whole frames follow one another
            assert sorted(found.order[at:at + length]) == list(range(at, at + length))
            at += length
        assert set(np.cumsum(frames)) <= set(np.cumsum(found.lengths))
    assert window_segments(grids[1:], shape).lengths.tolist() == [16]


def test_without_the_tower_its_weights_take_nothing(tmp_path: Path) -> None:
    theirs = write_vl(tmp_path, "3")
    whole, text = load(tmp_path), load(tmp_path, language_model_only=True)
    assert text.vision is None and text.shape.vision is None
    tower = sum(p.nbytes for p in theirs.model.visual.parameters())
    assert weight_bytes(whole.shape) - weight_bytes(text.shape) == tower


@pytest.mark.parametrize(("rows", "grids", "message"), [
    (24, [Grid(1, 4, 4)], "pixels: (24, 96): 1 grids ask for (16, 96)"),
    (15, [Grid(1, 3, 5)], "grid: (1, 3, 5): rows and columns must be multiples of 2"),
    (0, [Grid(0, 4, 4)], "grid: (0, 4, 4)"),
    (0, [], "pixels: (0, 96): 0 grids"),
])
def test_what_does_not_fit_is_refused(rows: int, grids: list[Grid], message: str,
                                      tmp_path: Path) -> None:
    write_vl(tmp_path, "3")
    tower = load(tmp_path).vision
    assert isinstance(tower, VisionTower)
    with pytest.raises(ValueError) as caught:
        tower.forward(torch.zeros(rows, 96), grids)
    assert message in str(caught.value)
