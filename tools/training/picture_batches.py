"""Tokenizer and training batches of the model of pictures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from actorium.actors.media.image_processor import ImageProcessing
from actorium.actors.media.media_jobs import patchify
from actorium.gpu.vision.grids import Grid
from actorium.tools.pictures.drawn_pictures import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Picture,
    draw,
)
from actorium.tools.pictures.picture_questions import (
    COLUMNS,
    CORNERS,
    GRIDS,
    NUMBERS,
    ORDINALS,
    ROWS,
    PictureQuestion,
    asked,
    is_held_out,
    place_words,
    random_pictures,
)
from actorium.tools.training.trainer import END_OF_TEXT, END_OF_TURN, trained_tokenizer

SPECIAL = (END_OF_TEXT, "<|user|>", END_OF_TURN, "<|vision_start|>", "<|vision_end|>",
           "<|assistant|>", "<|image_pad|>", "<|video_pad|>", "<|system|>")
USER, ASSISTANT = SPECIAL[1], SPECIAL[5]
VOCAB = 512
NOTHING = "nothing"
"""What rows of empty cells are aligned with."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
"""In the form of the family's, with one token for each role: short prompts train fast."""
PROCESSING = ImageProcessing(min_pixels=56 * 56, max_pixels=448 * 448, image_mean=(0.5,) * 3,
                             image_std=(0.5,) * 3)
"""As Qwen3-VL's, but for patches of 14 pixels."""
ALONE = 0.04
"""Share of training in which the tower is trained alone."""

def build_tokenizer() -> Tokenizer:
    """A tokenizer to which every word of questions and answers is one token."""
    return trained_tokenizer(_corpus(), SPECIAL, VOCAB)


ANSWERS = (*COLOURS, *SHAPES, *DIRECTIONS, *NUMBERS, *ROWS, *COLUMNS, *CORNERS, *ORDINALS, NOTHING)


def spaced_words(tokenizer: Tokenizer) -> Tensor:
    """i64[words, 2]: the tokens of each word of an answer, with a space before it and without."""
    return torch.tensor([[tokenizer.encode(space + word).ids[0] for space in (" ", "")]
                         for word in ANSWERS])


def _corpus() -> Iterator[str]:
    for _ in range(50):
        for word in ANSWERS:
            yield f"{word} {word}"
        yield ("What What colour is left of right above below the odd square?\nWhich Which row "
               "column corner picture has How How many shapes are Where Where does point shape?")


class PictureBatch(NamedTuple):
    """Pictures of the same sizes, with questions that do not see one another."""

    ids: Tensor
    """[B, T]: pictures, then questions with answers, padded at their ends."""
    turns: tuple[int, int]
    """Tokens in front of the questions, and of each with its answer."""
    weights: Tensor
    """[N], of the positions that predict an answer."""
    where: Tensor
    """i64[N]: flat positions in ids."""
    targets: Tensor
    """i64[N]"""
    pixels: list[Tensor]
    """[B, patches, pixels] of the first pictures, and of the second ones."""
    grids: list[Grid]
    words: Tensor
    """i64[B, rows of all pictures, WORDS_OF_A_CELL]: tokens that say what is in a cell and where,
    -1 for none; the first `WORDS_SEEN` of them are for the tower to say."""
    around: Tensor
    """i64[B, rows of all pictures, len(ASIDE)]: what is to be known of a cell beside its own."""
    align: float
    """Weight of the losses that align rows with words, and with what is around them."""
    alone: bool = False
    """No other loss counts."""


WORDS_SEEN = 8
"""Two for each of row, colour, shape and direction."""
WORDS_OF_A_CELL = WORDS_SEEN + 4
"""And for column and picture, of which rope and what comes before tell the decoder."""
_END_WEIGHT = 0.1
"""Of the position behind an answer, beside those of answers: what comes there is soon learned."""
_BESIDE = ((0, -1), (-1, 0))
"""Neighbours that come before a cell."""
ASIDE = (1 + len(COLOURS), 1 + len(SHAPES)) * len(_BESIDE)
"""How many there are of each: colours and shapes of neighbours, with none."""


class PictureSource:
    """Draws batches; what is held out is in none."""

    def __init__(self, tokenizer: Tokenizer, seed: str, size: int, turns: int) -> None:
        """size: conversations of a batch; turns: questions of each, at the most."""
        self.tokenizer, self.size, self.turns = tokenizer, size, turns
        self.rng = random.Random(f"picture-batches-{seed}")
        self.encode = lru_cache(maxsize=None)(lambda text: tokenizer.encode(text).ids)
        self.id = {each: self.encode(each)[0] for each in SPECIAL}

    def step(self, progress: float) -> list[PictureBatch]:
        """The batches of a step. progress: 0 at the start of training, 1 at its end; rows are
        aligned with words, ever less in the last two thirds."""
        align = min(1.0, 1.5 - 1.5 * progress)
        return [self._batch(count, align)._replace(alone=progress < ALONE) for count in (1, 2)]

    def _batch(self, count: int, align: float) -> PictureBatch:
        grids = tuple(self.rng.choice(GRIDS) for _ in range(count))
        samples: list[tuple[tuple[Picture, ...], list[PictureQuestion]]] = []
        while len(samples) < self.size:
            pictures = random_pictures(self.rng, grids)
            if not is_held_out(pictures) and (found := asked(self.rng, pictures, self.turns)):
                samples.append((pictures, found))
        ids, said = self._turns(grids, [found for _, found in samples])
        ahead = torch.nn.functional.pad(said[:, 1:], (0, 1)).flatten()
        where = ahead.nonzero().squeeze(1)
        pixels = [torch.from_numpy(np.stack([patchify(draw(pictures[k])[None], PROCESSING)[0]
                                             for pictures, _ in samples]))
                  for k in range(count)]
        words = torch.tensor([[self._words(picture, k, i, j) for k, picture in enumerate(pictures)
                               for i in range(picture.rows) for j in range(picture.columns)]
                              for pictures, _ in samples])
        beside = torch.tensor([[own for picture in pictures for own in around(picture)]
                               for pictures, _ in samples])
        before = len(self._before(grids))
        return PictureBatch(ids, (before, (ids.shape[1] - before) // self.turns), ahead[where],
                            where, ids.flatten()[where + 1], pixels,
                            [Grid(1, 2 * rows, 2 * columns) for rows, columns in grids], words,
                            beside, align)

    def _before(self, grids: tuple[tuple[int, int], ...]) -> list[int]:
        """Ids in front of a question."""
        ids = [self.id[USER]]
        for rows, columns in grids:
            ids += [self.id["<|vision_start|>"], *[self.id["<|image_pad|>"]] * (rows * columns),
                    self.id["<|vision_end|>"]]
        return ids

    def _turns(self, grids: tuple[tuple[int, int], ...], asked_for: list[list[PictureQuestion]]
               ) -> tuple[Tensor, Tensor]:
        """(ids, the weight of each position's token as part of an answer)."""
        before = self._before(grids)
        turns = [[[*self.encode(one.text), self.id[ASSISTANT], *self.encode(one.answer),
                   self.id[END_OF_TURN]] for one in own] for own in asked_for]
        length = max(len(turn) for own in turns for turn in own)
        ids = torch.full((self.size, len(before) + self.turns * length), self.id[SPECIAL[0]])
        said = torch.zeros(ids.shape)
        ids[:, :len(before)] = torch.tensor(before)
        for i, own in enumerate(turns):
            for k, turn in enumerate(own):
                end = len(before) + k * length + len(turn)
                ids[i, end - len(turn):end] = torch.tensor(turn)
                said[i, end - 2], said[i, end - 1] = 1.0, _END_WEIGHT
        return ids, said

    def _words(self, picture: Picture, number: int, i: int, j: int) -> list[int]:
        figure, (row, column) = picture.cells[i][j], place_words(picture, (i, j))
        seen = (NOTHING, "", "") if figure is None else figure[:3]
        return [self.encode(f"{space}{name}")[0] if name else -1
                for name in (row, *seen, column, ORDINALS[number]) for space in (" ", "")]


def around(picture: Picture) -> Iterator[list[int]]:
    """Returns for each cell what `ASIDE` counts."""
    colours = list(COLOURS)
    for i, row in enumerate(picture.cells):
        for j in range(len(row)):
            neighbours: list[int] = []
            for down, across in _BESIDE:
                inside = i + down >= 0 and j + across >= 0
                beside = picture.cells[i + down][j + across] if inside else None
                neighbours += [0, 0] if beside is None else [1 + colours.index(beside.colour),
                                                      1 + SHAPES.index(beside.shape)]
            yield neighbours
