"""Tokenizer and training batches of the model of pictures."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from actorium.actors.vision.patches import patchify
from actorium.actors.vision.processor_config import ImageProcessing
from actorium.gpu.vision.grids import Grid
from actorium.tools.pictures.drawn_pictures import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Figure,
    Picture,
    draw,
)
from actorium.tools.pictures.picture_questions import (
    CORNERS,
    GRIDS,
    NUMBERS,
    ORDINALS,
    PictureQuestion,
    asked,
    is_held_out,
    random_pictures,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
TURN, END_OF_TURN = SPECIAL[1], SPECIAL[2]
VOCAB = 512
NOTHING = "nothing"
"""What rows of empty cells are aligned with."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
"""In the form of the family's."""
PROCESSING = ImageProcessing(min_pixels=56 * 56, max_pixels=448 * 448, image_mean=(0.5,) * 3,
                             image_std=(0.5,) * 3)
"""As Qwen3-VL's, but for patches of 14 pixels."""
ALONE = 0.04
"""Share of training in which the tower is trained alone."""

_SPLIT = r"""\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"""


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE in which every word of questions and answers is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, show_progress=False,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


ANSWERS = (*COLOURS, *SHAPES, *DIRECTIONS, *NUMBERS, *CORNERS, *ORDINALS, NOTHING)


def spaced_words(tokenizer: Tokenizer) -> Tensor:
    """i64[words, 2]: the tokens of each word of an answer, with a space before it and without."""
    return torch.tensor([[tokenizer.encode(space + word).ids[0] for space in (" ", "")]
                         for word in ANSWERS])


def _corpus() -> Iterator[str]:
    words = (*ANSWERS, "user", "assistant", "system")
    for _ in range(50):
        for word in words:
            yield f"{word} {word}"
        yield ("What colour is left of right above below the odd square?\nWhich row column corner "
               "picture has a How many shapes are Where does point In the first picture: "
               "What shape picture:")


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False, "bos_token": None, "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": END_OF_TURN,
        "model_max_length": context, "pad_token": SPECIAL[0],
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class PictureBatch(NamedTuple):
    """Conversations about pictures of the same sizes."""

    ids: Tensor
    """[B, T], padded at their ends."""
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
    """i64[B, rows of all pictures, WORDS_OF_A_CELL]: tokens that say what is in a cell, -1 behind
    them."""
    align: float
    """Weight of the loss that aligns rows with words."""
    alone: bool = False
    """No other loss counts."""


WORDS_OF_A_CELL = 8


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
        aligned with words in the first half."""
        align = max(0.0, min(1.0, 1.5 - 2.5 * progress))
        return [self._batch(count, align)._replace(alone=progress < ALONE) for count in (1, 2)]

    def _batch(self, count: int, align: float) -> PictureBatch:
        grids = tuple(self.rng.choice(GRIDS) for _ in range(count))
        samples: list[tuple[tuple[Picture, ...], list[int], list[float]]] = []
        while len(samples) < self.size:
            pictures = random_pictures(self.rng, grids)
            if not is_held_out(pictures) and (found := asked(self.rng, pictures, self.turns)):
                samples.append((pictures, *self._conversation(grids, found)))
        length = max(len(ids) for _, ids, _ in samples)
        ids = torch.full((self.size, length), self.id[SPECIAL[0]])
        said = torch.zeros(self.size, length)
        for i, (_, own, marks) in enumerate(samples):
            ids[i, :len(own)], said[i, :len(own)] = torch.tensor(own), torch.tensor(marks)
        ahead = torch.nn.functional.pad(said[:, 1:], (0, 1)).flatten()
        where = ahead.nonzero().squeeze(1)
        pixels = [torch.from_numpy(np.stack([patchify(draw(pictures[k])[None], PROCESSING)[0]
                                             for pictures, _, _ in samples]))
                  for k in range(count)]
        words = torch.tensor([[self._words(figure, number) for picture in pictures
                               for number, row in enumerate(picture.cells) for figure in row]
                              for pictures, _, _ in samples])
        return PictureBatch(ids, ahead[where], where, ids.flatten()[where + 1], pixels,
                            [Grid(1, 2 * rows, 2 * columns) for rows, columns in grids], words,
                            align)

    def _conversation(self, grids: tuple[tuple[int, int], ...], turns: list[PictureQuestion]
                      ) -> tuple[list[int], list[float]]:
        """(ids, of each whether it is part of an answer)."""
        ids = list(self.encode(f"{TURN}user\n"))
        for rows, columns in grids:
            ids += [self.id["<|vision_start|>"], *[self.id["<|image_pad|>"]] * (rows * columns),
                    self.id["<|vision_end|>"]]
        marks = [0.0] * len(ids)
        for i, turn in enumerate(turns):
            asked_for = self.encode(f"{TURN}user\n") if i else []
            asked_for = [*asked_for, *self.encode(turn.text),
                         *self.encode(f"{END_OF_TURN}\n{TURN}assistant\n")]
            answer = [*self.encode(turn.answer), self.id[END_OF_TURN]]
            behind = self.encode("\n")
            ids += [*asked_for, *answer, *behind]
            marks += [0.0] * len(asked_for) + [1.0] * len(answer) + [0.0] * len(behind)
        return ids, marks

    def _words(self, figure: Figure | None, row: int) -> list[int]:
        names = [NUMBERS[row + 1], *((NOTHING,) if figure is None else
                                     (figure.colour, figure.shape, figure.points))]
        found = [self.encode(f"{space}{name}")[0] for name in names if name for space in (" ", "")]
        return found + [-1] * (WORDS_OF_A_CELL - len(found))


def pictures_of(pictures: tuple[Picture, ...]) -> list[Tensor]:
    """The patches of pictures, [patches, pixels] each."""
    return [torch.from_numpy(patchify(draw(picture)[None], PROCESSING)[0])
            for picture in pictures]
