"""Questions about drawn pictures, each with an answer of one word.

Nearly every question names a shape by colour and form and asks for a place, a neighbour or a
direction, so that an engine that takes columns for rows, mixes up the patches of a token, turns
rope on a wrong axis, exchanges channels, normalises wrongly or shifts an image's rows gives wrong
answers. Of two pictures, both have an answer to the question that is put about one of them, and
another one: pictures in the wrong order are found by it.

As with the demo model's tasks, a share of all pictures is held out from training by their content.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from actorium.tools.pictures.drawn_pictures import (
    COLOURS,
    DIRECTIONS,
    GROUNDS,
    SHAPES,
    SHIFT,
    SIZES,
    TINT,
    Figure,
    Picture,
)

COUNT = 100
"""Items of an evaluation, unless told otherwise."""
NUMBERS = ("none", "one", "two", "three", "four", "five", "six")
CORNERS = ("northwest", "northeast", "southwest", "southeast")
ORDINALS = ("first", "second")
GRIDS = ((2, 2), (2, 3), (3, 2), (3, 3), (2, 4), (4, 2), (3, 4), (4, 3))
"""Rows and columns of pictures."""
NEIGHBOURS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
HELD_OUT_MODULUS = 8
"""One item in this many is never trained on."""
WEIGHTS = {"row": 3.0, "column": 4.0, "neighbour": 4.0, "corner": 2.5, "arrow": 2.5, "colour": 1.5,
           "shape": 1.5, "count": 1.0, "odd": 2.0, "which": 1.5}
"""How often each kind of question is put."""
PALETTE = 4
"""Colours, and shapes, in the pictures of an item: few, so that they have to be told apart."""
EMPTY = 0.25
"""Share of cells with nothing in them."""
ODD = 0.12
"""Share of items whose pictures are of equal squares but for one."""


class PictureQuestion(NamedTuple):
    """A question and its answer."""

    kind: str
    text: str
    answer: str


class PictureItem(NamedTuple):
    """A question about one or two pictures."""

    pictures: tuple[Picture, ...]
    question: PictureQuestion


def questions(picture: Picture) -> Iterator[PictureQuestion]:
    """Every question that one picture by itself answers."""
    found = {(i, j): figure for i, row in enumerate(picture.cells)
             for j, figure in enumerate(row) if figure is not None}
    shapes = Counter(figure.shape for figure in found.values())
    colours = Counter(figure.colour for figure in found.values())
    both = Counter((figure.colour, figure.shape) for figure in found.values())
    for colour, count in colours.items():
        if count < len(NUMBERS):
            yield PictureQuestion("count", f"How many shapes are {colour}?", NUMBERS[count])
    if _is_odd(shapes, colours):
        at, one = next((at, one) for at, one in found.items() if colours[one.colour] == 1)
        yield from _places("odd", "odd square", at)
        yield PictureQuestion("odd", "What colour is the odd square?", one.colour)
        return
    for (i, j), one in found.items():
        if shapes[one.shape] == 1:
            yield PictureQuestion("colour", f"What colour is the {one.shape}?", one.colour)
        if colours[one.colour] == 1:
            yield PictureQuestion("shape", f"What shape is {one.colour}?", one.shape)
        if both[one.colour, one.shape] != 1:
            continue
        name = f"{one.colour} {one.shape}"
        if one.points:
            yield PictureQuestion("arrow", f"Where does the {name} point?", one.points)
        yield from _places("", name, (i, j))
        if i in (0, picture.rows - 1) and j in (0, picture.columns - 1):
            yield PictureQuestion("corner", f"Which corner has the {name}?",
                                  CORNERS[2 * (i > 0) + (j > 0)])
        for word, (down, across) in NEIGHBOURS.items():
            if beside := found.get((i + down, j + across)):
                yield PictureQuestion("neighbour", f"What colour is {word} the {name}?",
                                      beside.colour)


def _is_odd(shapes: Counter[str], colours: Counter[str]) -> bool:
    return list(shapes) == ["square"] and len(colours) == 2 and 1 in colours.values() \
        and shapes["square"] > 2


def _places(kind: str, name: str, at: tuple[int, int]) -> Iterator[PictureQuestion]:
    for axis, number in zip(("row", "column"), at, strict=True):
        yield PictureQuestion(kind or axis, f"Which {axis} has the {name}?", NUMBERS[number + 1])


def pair_questions(pictures: tuple[Picture, Picture]) -> list[PictureQuestion]:
    """Questions about two pictures whose answers are others when the pictures are exchanged."""
    each = [{one.text: one for one in questions(picture)} for picture in pictures]
    found = []
    for own, other, ordinal in zip(each, reversed(each), ORDINALS, strict=True):
        found += [one._replace(text=f"In the {ordinal} picture: {one.text}")
                  for text, one in own.items()
                  if text in other and other[text].answer != one.answer]
    have = [{(figure.colour, figure.shape) for row in picture.cells for figure in row
             if figure is not None} for picture in pictures]
    found += [PictureQuestion("which", f"Which picture has a {colour} {shape}?", ordinal)
              for own, other, ordinal in zip(have, reversed(have), ORDINALS, strict=True)
              for colour, shape in sorted(own - other)]
    return found


# --- drawing lots ---------------------------------------------------------------------------------

def random_pictures(rng: random.Random, grids: tuple[tuple[int, int], ...]) -> tuple[Picture, ...]:
    """Pictures of these sizes with the same few colours and shapes, one for each."""
    colours, shapes = rng.sample(sorted(COLOURS), PALETTE), rng.sample(SHAPES, PALETTE)
    if rng.random() < ODD:
        return tuple(_odd_picture(rng, grid) for grid in grids)
    made = []
    for rows, columns in grids:
        cells = [[_figure(rng, rng.choice(shapes), rng.choice(colours))
                  if rng.random() >= EMPTY else None for _ in range(columns)] for _ in range(rows)]
        made.append(Picture(tuple(map(tuple, cells)), rng.choice(GROUNDS)))
    return tuple(made)


def _odd_picture(rng: random.Random, grid: tuple[int, int]) -> Picture:
    usual, other = rng.sample(sorted(COLOURS), 2)
    at = rng.randrange(grid[0]), rng.randrange(grid[1])
    cells = tuple(tuple(_figure(rng, "square", other if (i, j) == at else usual)
                        for j in range(grid[1])) for i in range(grid[0]))
    return Picture(cells, rng.choice(GROUNDS))


def _figure(rng: random.Random, shape: str, colour: str) -> Figure:
    points = rng.choice(DIRECTIONS) if shape == "arrow" else ""
    shift = rng.randint(-SHIFT, SHIFT), rng.randint(-SHIFT, SHIFT)
    tint = rng.randint(-TINT, TINT), rng.randint(-TINT, TINT), rng.randint(-TINT, TINT)
    return Figure(shape, colour, points, rng.choice(SIZES), shift, tint)


def is_held_out(pictures: tuple[Picture, ...]) -> bool:
    """Whether the pictures of an item are kept from training: by shapes and colours, not by how
    they are drawn."""
    text = "/".join(",".join(f"{one.colour} {one.shape} {one.points}" if one else "-"
                             for one in row) for picture in pictures for row in picture.cells)
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_MODULUS == 0


def asked(rng: random.Random, pictures: tuple[Picture, ...], count: int) -> list[PictureQuestion]:
    """Up to `count` different questions about pictures."""
    known = (pair_questions((pictures[0], pictures[1])) if len(pictures) == 2
             else list(questions(pictures[0])))
    by_kind: dict[str, list[PictureQuestion]] = {}
    for one in known:
        by_kind.setdefault(one.kind, []).append(one)
    found: list[PictureQuestion] = []
    while by_kind and len(found) < count:
        kinds = sorted(by_kind)
        [kind] = rng.choices(kinds, [WEIGHTS[each] for each in kinds])
        found.append(by_kind[kind].pop(rng.randrange(len(by_kind[kind]))))
        if not by_kind[kind]:
            del by_kind[kind]
    return found


def held_out(count: int = COUNT, seed: int = 0) -> list[PictureItem]:
    """The items of an evaluation: four in nine have two pictures. The first ones are the same
    whatever the count."""
    rng = random.Random(f"pictures-{seed}")
    items: list[PictureItem] = []
    while len(items) < count:
        grids = tuple(rng.choice(GRIDS) for _ in range(1 + len(items) % 9 % 2))
        pictures = random_pictures(rng, grids)
        if is_held_out(pictures) and (found := asked(rng, pictures, 1)):
            items.append(PictureItem(pictures, found[0]))
    return items
