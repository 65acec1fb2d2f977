"""Questions about drawn pictures, each with an answer of one word.

Nearly every question names a shape by its colour or its form, which no other one in the picture
has, and asks for a place, a neighbour or a direction, so that an engine that takes columns for
rows, mixes up the patches of a token, turns rope on a wrong axis, exchanges channels, normalises
wrongly or shifts an image's rows gives wrong answers. Of two pictures, nearly all questions ask
which of them has something: pictures in the wrong order are found by it. No two kinds of questions
have an answer in common, but for colours and shapes of neighbours: a small model soon learns to say
one of the words that belong to a cell.

As with the demo model's tasks, a share of all pictures is held out from training by their content.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
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
"""Default number of items of an evaluation."""
NUMBERS = ("none", "one", "two", "three", "four", "five", "six")
ROWS = ("top", "middle", "bottom")
"""Of two there is no one in the middle."""
COLUMNS = ("west", "centre", "east")
CORNERS = ("northwest", "northeast", "southwest", "southeast")
ORDINALS = ("first", "second")
GRIDS = ((2, 3), (3, 3))
"""Rows and columns of pictures; `ROWS` and `COLUMNS` have words for two or three."""
NEIGHBOURS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
HELD_OUT_MODULUS = 8
"""One item in this many is never trained on."""
WEIGHTS = {"row": 2.0, "column": 5.0, "neighbour": 4.0, "corner": 2.0, "arrow": 4.0, "colour": 1.5,
           "shape": 2.0, "count": 0.7, "odd": 0.7, "which": 60.0}
"""How often each kind of question is put in training."""
ASKED = {"row": 4.0, "column": 5.0, "neighbour": 5.0, "corner": 4.0, "arrow": 4.0, "colour": 1.5,
         "shape": 3.0, "count": 0.7, "odd": 0.5, "which": 60.0}
"""The same of an evaluation: most are of those that a wrong order of patches or a wrong axis of
rope answers wrongly."""
PALETTE = 6
"""Colours, and shapes, in the pictures of an item: few, so that two pictures share them."""
LIKELY = ("arrow", "bar", "post")
"""Shapes that are drawn twice as often: those that are others, or point elsewhere, when rows are
taken for columns."""
EMPTY = 0.25
"""Share of cells with nothing in them."""
ODD = 0.12
"""Share of items whose pictures are of equal squares but for one."""


class PictureQuestion(NamedTuple):
    kind: str
    text: str
    answer: str


class PictureItem(NamedTuple):
    pictures: tuple[Picture, ...]
    question: PictureQuestion


def questions(picture: Picture) -> Iterator[PictureQuestion]:
    """Every question that one picture by itself answers."""
    found = {(i, j): figure for i, row in enumerate(picture.cells)
             for j, figure in enumerate(row) if figure is not None}
    shapes = Counter(figure.shape for figure in found.values())
    colours = Counter(figure.colour for figure in found.values())
    for colour, count in colours.items():
        if count < len(NUMBERS):
            yield PictureQuestion("count", f"How many shapes are {colour}?", NUMBERS[count])
    if _is_odd(shapes, colours):
        at, one = next((at, one) for at, one in found.items() if colours[one.colour] == 1)
        yield from _places("odd", "the odd square", picture, at)
        yield PictureQuestion("odd", "What colour is the odd square?", one.colour)
        return
    for at, one in found.items():
        if shapes[one.shape] == 1:
            yield PictureQuestion("colour", f"What colour is the {one.shape}?", one.colour)
            yield from _around(picture, found, at, "shape", f"the {one.shape}")
        if colours[one.colour] == 1:
            yield PictureQuestion("shape", f"What shape is {one.colour}?", one.shape)
            yield from _around(picture, found, at, "colour", one.colour)


def _around(picture: Picture, found: dict[tuple[int, int], Figure], at: tuple[int, int],
            kind: str, name: str) -> Iterator[PictureQuestion]:
    """Where a shape is, where it points, and what is beside it; kind: of what it is named by."""
    i, j = at
    if found[at].points:
        yield PictureQuestion("arrow", f"Where does {name} point?", found[at].points)
    yield from _places("", name, picture, at)
    if i in (0, picture.rows - 1) and j in (0, picture.columns - 1):
        yield PictureQuestion("corner", f"Which corner has {name}?",
                              CORNERS[2 * (i > 0) + (j > 0)])
    for word, (down, across) in NEIGHBOURS.items():
        if beside := found.get((i + down, j + across)):
            yield PictureQuestion("neighbour", f"Which {kind} is {word} {name}?",
                                  beside.colour if kind == "colour" else beside.shape)


def _is_odd(shapes: Counter[str], colours: Counter[str]) -> bool:
    return list(shapes) == ["square"] and len(colours) == 2 and 1 in colours.values() \
        and shapes["square"] > 2


def _places(kind: str, name: str, picture: Picture, at: tuple[int, int]
            ) -> Iterator[PictureQuestion]:
    for axis, word in zip(("row", "column"), place_words(picture, at), strict=True):
        yield PictureQuestion(kind or axis, f"Which {axis} has {name}?", word)


def place_words(picture: Picture, at: tuple[int, int]) -> tuple[str, str]:
    """Names of the row and the column of a cell. The last ones are named as such."""
    i, j = at
    return (ROWS[-1] if i and i == picture.rows - 1 else ROWS[i],
            COLUMNS[-1] if j and j == picture.columns - 1 else COLUMNS[j])


def pair_questions(pictures: tuple[Picture, Picture]) -> list[PictureQuestion]:
    """Questions about two pictures: which one has something, and those about shapes whose colour or
    form one of them alone has."""
    have = [{name for row in picture.cells for figure in row if figure is not None
             for name in (figure.colour, f"the {figure.shape}")} for picture in pictures]
    found = []
    for picture, own, other, ordinal in zip(pictures, have, reversed(have), ORDINALS, strict=True):
        names = sorted(own - other)
        found += [PictureQuestion("which", f"Which picture has {name}?", ordinal)
                  for name in names]
        found += [one for one in questions(picture) if one.kind not in ("count", "odd")
                  and any(f" {name}{end}" in one.text for name in names for end in ("?", " "))]
    return found


# --- drawing lots ---------------------------------------------------------------------------------

def random_pictures(rng: random.Random, grids: tuple[tuple[int, int], ...]) -> tuple[Picture, ...]:
    """Pictures of these sizes with the same few colours and shapes, one for each."""
    colours, shapes = rng.sample(sorted(COLOURS), PALETTE), rng.sample(SHAPES, PALETTE)
    shapes += [shape for shape in shapes if shape in LIKELY]
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


def asked(rng: random.Random, pictures: tuple[Picture, ...], count: int,
          weights: Mapping[str, float] = WEIGHTS) -> list[PictureQuestion]:
    """Up to `count` different questions about pictures. weights: how often of each kind."""
    known = (pair_questions((pictures[0], pictures[1])) if len(pictures) == 2
             else list(questions(pictures[0])))
    by_kind: dict[str, list[PictureQuestion]] = {}
    for one in known:
        by_kind.setdefault(one.kind, []).append(one)
    chosen: list[PictureQuestion] = []
    while by_kind and len(chosen) < count:
        kinds = sorted(by_kind)
        [kind] = rng.choices(kinds, [weights[each] for each in kinds])
        chosen.append(by_kind[kind].pop(rng.randrange(len(by_kind[kind]))))
        if not by_kind[kind]:
            del by_kind[kind]
    return chosen


def held_out(count: int = COUNT, seed: int = 0) -> list[PictureItem]:
    """The items of an evaluation: one in five has two pictures. The first ones are the same
    whatever the count."""
    rng = random.Random(f"pictures-{seed}")
    items: list[PictureItem] = []
    while len(items) < count:
        grids = tuple(rng.choice(GRIDS) for _ in range(1 + (len(items) % 5 == 1)))
        pictures = random_pictures(rng, grids)
        if is_held_out(pictures) and (found := asked(rng, pictures, 1, ASKED)):
            items.append(PictureItem(pictures, found[0]))
    return items
