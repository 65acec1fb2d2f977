"""Positions of prompts with images and videos against transformers' get_rope_index, over drawn
mixtures; and the rope rows that they give."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers_configs import CONFIGS, shape_of
from helpers_vision import END, IMAGE, START, VIDEO, vl_model
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.gpu.families.layer_shapes import RopeShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.rotary import rope_tables
from actorium.gpu.vision.grids import Grid, Medium, output_rows, rope_positions
from actorium.kernels.reference.rope import axis_rows, rope_rows


@cache
def oracle(kind: str) -> Any:
    return vl_model(kind)


@cache
def shape(kind: str) -> ModelShape:
    name = {"2.5": "Qwen2_5_VL", "3": "Qwen3VL"}[kind] + "ForConditionalGeneration"
    return shape_of(next(c for c in CONFIGS if c["architectures"] == [name]) | {
        "image_token_id": IMAGE, "video_token_id": VIDEO})


sides = st.integers(1, 5).map(lambda n: 2 * n)
images = st.builds(Grid, st.just(1), sides, sides).map(Medium)
videos = st.builds(Medium, st.builds(Grid, st.integers(1, 4), sides, sides), st.just(True),
                   st.sampled_from([0.5, 1.0, 0.3, 2.0, 11.7]))
mixtures = st.lists(st.tuples(st.integers(0, 5), images | videos), max_size=5)


def prompt(mixture: list[tuple[int, Medium]], end: int, kind: str) -> list[int]:
    """Text, media with what stands around them, and text; Qwen3-VL's frames apart."""
    own = shape(kind).vision
    assert own is not None
    ids: list[int] = []
    for text, medium in mixture:
        token, grid = VIDEO if medium.video else IMAGE, medium.grid
        apart = medium.video and kind == "3"
        parts = [output_rows(grid._replace(frames=1), own)] * grid.frames if apart else [
            output_rows(grid, own)]
        ids += [5] * text
        for number, rows in enumerate(parts):
            ids += [*([7] * (1 + number % 2) if apart else []), START, *[token] * rows, END]
    return ids + [6] * end


@pytest.mark.parametrize("kind", ["2.5", "3"])
@settings(max_examples=40, deadline=None)
@given(mixture=mixtures, end=st.integers(1, 4))
def test_positions_are_those_of_transformers(kind: str, mixture: list[tuple[int, Medium]],
                                             end: int) -> None:
    own = shape(kind).vision
    assert own is not None
    ids = prompt(mixture, end, kind)
    media = [medium for _, medium in mixture]
    found = rope_positions(np.array(ids), media, own)
    tokens = torch.tensor([ids])
    still, moving = ([m for m in media if m.video == video] for video in (False, True))
    seconds = {"second_per_grid_ts": torch.tensor([m.seconds for m in moving])}
    want, delta = oracle(kind).model.get_rope_index(
        tokens, (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
        torch.tensor([m.grid for m in still]) if still else None,
        torch.tensor([m.grid for m in moving]) if moving else None,
        **(seconds if moving and kind == "2.5" else {}))
    assert np.array_equal(found.axes, want[:, 0].numpy())
    assert found.delta == int(delta)
    assert found.places.tolist() == [i for i, t in enumerate(ids) if t in (IMAGE, VIDEO)]


@pytest.mark.parametrize(("ids", "media", "message"), [
    ([5, IMAGE, IMAGE], [Medium(Grid(1, 2, 6))], "media: 0: the prompt has not 3 placeholders of "
     "id 190"),
    ([5, VIDEO, 5], [Medium(Grid(1, 2, 2))], "media: 0: the prompt has not 1 placeholders of id "
     "190"),
    ([5, IMAGE, 5, IMAGE], [Medium(Grid(1, 2, 2))], "media: token 3 of the prompt is the"),
    ([5, IMAGE, 5], [Medium(Grid(1, 2, 2))] * 2, "media: 1: the prompt has not 1"),
    ([5, IMAGE], [Medium(Grid(1, 2, 3))], "grid: (1, 2, 3)"),
])
def test_what_does_not_fit_is_named(ids: list[int], media: list[Medium], message: str) -> None:
    own = shape("2.5").vision
    assert own is not None
    with pytest.raises(ValueError) as caught:
        rope_positions(np.array(ids), media, own)
    assert message in str(caught.value)


def test_neighbours_need_nothing_between_them() -> None:
    own = shape("3").vision
    assert own is not None
    found = rope_positions(np.array([IMAGE] * 4), [Medium(Grid(1, 4, 2)), Medium(Grid(1, 2, 4))],
                           own)
    assert found.axes.tolist() == [[0, 0, 2, 2], [0, 1, 2, 2], [0, 0, 2, 3]]


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_rope_rows_of_three_axes(kind: str) -> None:
    """Each pair's angle is its frequency times its own position."""
    whole = shape(kind)
    [table], [rope] = rope_tables(whole), whole.ropes
    assert isinstance(rope, RopeShape) and set(rope.axes) == {0, 1, 2}
    positions = torch.randint(0, 512, (3, 9), generator=torch.Generator().manual_seed(2))
    rows = axis_rows(table, positions, rope.axes)
    for token in range(9):
        for pair, axis in enumerate(rope.axes):
            for column in (pair, pair + len(rope.axes)):
                want = table[positions[axis, token], ..., column]
                assert torch.equal(rows[token, ..., column], want)
    text = positions[:1].expand(3, -1)
    assert torch.equal(axis_rows(table, text, rope.axes), rope_rows(table, text[0]))
