"""Drawn pictures put to our model of images, in process, and faults planted on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from helpers_models import Seq, Stepper, load
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from actorium.actors.media.image_processor import ImageProcessing, read_processing
from actorium.actors.media.media_jobs import patchify
from actorium.actors.media.patch_store import MediaFacts
from actorium.actors.media.prompt_media import IMAGE, PADS, expand_ids, expand_text
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.vision.grids import Grid, Medium, RopePositions, rope_positions
from actorium.gpu.vision.prompt_images import add_images, chunk_images
from actorium.gpu.vision.tower import VisionRows
from actorium.tools.evaluation.picture_scores import is_answer
from actorium.tools.pictures.drawn_pictures import draw
from actorium.tools.pictures.picture_questions import PictureItem

ENDS, TOGETHER = "<|im_end|>", 12


def same(x: object, *_: object) -> object:
    """As it is."""
    return x


class PictureFault(NamedTuple):
    """What is wrong on the way from pictures to logits; by default nothing."""

    processing: Callable[[ImageProcessing], ImageProcessing] = same  # type: ignore[assignment]
    patches: Callable[[Tensor, Grid], Tensor] = same  # type: ignore[assignment]
    positions: Callable[[RopePositions], RopePositions] = same  # type: ignore[assignment]
    rows: Callable[[VisionRows], VisionRows] = same  # type: ignore[assignment]
    exchanged: bool = False
    """The last picture comes first."""


class PromptImages(NamedTuple):
    """The pictures of a prompt."""

    positions: RopePositions
    rows: VisionRows

    def between(self, low: int, high: int) -> VisionRows:
        """Of some of the placeholders."""
        return VisionRows(self.rows.embeddings[low:high],
                          tuple(deep[low:high] for deep in self.rows.deep))


class ImagesStepper(Stepper):
    """Steps over prompts with pictures."""

    images: dict[int, PromptImages]
    """By the identity of the sequence."""

    def _batch(self, rows: list[tuple[Seq, int]], extends: int, q_len: int, every_row: bool,
               group: int) -> ForwardBatch:
        batch = super()._batch(rows, extends, q_len, every_row, group)
        own = [self.images[id(seq)] for seq, _ in rows]
        batch.positions[batch.extend_tokens:] += torch.tensor(
            [each.positions.delta for each in own[extends:]], dtype=torch.int64)
        add_images([batch], {
            i + 1: chunk_images(each.positions, seq.done, count, each.between)
            for i, (each, (seq, count)) in enumerate(zip(own[:extends], rows, strict=False))})
        return batch


class PictureReader:
    """A checkpoint, asked about pictures."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.model = load(folder, dtype=dtype)
        self.processing = read_processing(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ends = self.tokenizer.token_to_id(ENDS)
        assert self.model.vision is not None
        self.tower = self.model.vision

    def prompt(self, item: PictureItem, fault: PictureFault = PictureFault()
               ) -> tuple[list[int], PromptImages]:
        """Token ids, and what the tower makes of the pictures."""
        order = item.pictures[::-1] if fault.exchanged else item.pictures
        processing = fault.processing(self.processing.image)
        parts, grids = [], []
        for picture in order:
            rows, grid = patchify(draw(picture)[None], processing)
            grids.append(Grid(*grid))
            parts.append(self.tower.forward(fault.patches(torch.from_numpy(rows), grids[-1]),
                                            [grids[-1]]))
        text = ("<|user|>" + f"<|vision_start|>{PADS[IMAGE]}<|vision_end|>" * len(order)
                + f"{item.question.text}<|assistant|>")
        expanded = expand_text(text, [MediaFacts(False, grid) for grid in grids],
                               self.processing.video.family)
        ids, _ = expand_ids(self.tokenizer.encode(expanded.text).ids, expanded,
                            [self.tower.shape.image_token, self.tower.shape.video_token])
        deep = zip(*(part.deep for part in parts), strict=True)
        made = VisionRows(torch.cat([part.embeddings for part in parts]),
                          tuple(map(torch.cat, deep)))
        found = rope_positions(np.array(ids), [Medium(grid) for grid in grids], self.tower.shape)
        return list(ids), PromptImages(fault.positions(found), fault.rows(made))

    def answers(self, items: Sequence[PictureItem], fault: PictureFault = PictureFault(),
                most: int = 3) -> list[str]:
        """Greedy, several side by side: prompts at once, then decodes."""
        texts: list[str] = []
        for start in range(0, len(items), TOGETHER):
            prompts = [self.prompt(item, fault) for item in items[start:start + TOGETHER]]
            seqs = [Seq(ids) for ids, _ in prompts]
            stepper = self._stepper(seqs, [own for _, own in prompts])
            lengths = [len(seq.tokens) for seq in seqs]
            rows = stepper.step([(seq, len(seq.tokens)) for seq in seqs])
            for _ in range(most):
                for seq, token in zip(seqs, rows.argmax(-1).tolist(), strict=True):
                    seq.tokens.append(token)
                if all(self.ends in seq.tokens[n:] for seq, n in zip(seqs, lengths, strict=True)):
                    break
                rows = stepper.step([], seqs)
            for seq, n in zip(seqs, lengths, strict=True):
                said = [*seq.tokens[n:], self.ends]
                texts.append(self.tokenizer.decode(said[:said.index(self.ends)]))
        return texts

    def _stepper(self, seqs: Sequence[Seq], images: Sequence[PromptImages]) -> ImagesStepper:
        stepper = ImagesStepper(self.model)
        stepper.images = {id(seq): own for seq, own in zip(seqs, images, strict=True)}
        return stepper

    def logits(self, seqs: Sequence[Seq], images: Sequence[PromptImages]) -> Tensor:
        """Behind the prompts, [sequences, vocab]."""
        return self._stepper(seqs, images).step([(seq, len(seq.tokens)) for seq in seqs])

    def score(self, items: Sequence[PictureItem], fault: PictureFault = PictureFault()) -> float:
        """Share of right answers."""
        right = [is_answer(text, item.question.answer)
                 for text, item in zip(self.answers(items, fault), items, strict=True)]
        return sum(right) / len(right)


def by_squares(rows: Tensor, grid: Grid) -> Tensor:
    """Patches as [square row, square column, row within, column within, pixels]."""
    return rows.view(grid.rows // 2, grid.columns // 2, 2, 2, -1)


def shifted_axes(found: RopePositions, axes: NDArray[np.int64]) -> RopePositions:
    """With other positions, and what goes with them behind the prompt."""
    return found._replace(axes=axes, delta=int(axes.max()) + 1 - axes.shape[1])


def as_text(found: RopePositions) -> RopePositions:
    """Positions that know nothing of images."""
    count = found.axes.shape[1]
    return shifted_axes(found, np.broadcast_to(np.arange(count), (3, count)).copy())


def clips(own: ImageProcessing) -> ImageProcessing:
    """CLIP's mean and deviation instead of the checkpoint's."""
    return ImageProcessing(patch_size=own.patch_size, min_pixels=own.min_pixels,
                           max_pixels=own.max_pixels)


def unnormalised(own: ImageProcessing) -> ImageProcessing:
    """Levels from 0 to 1."""
    return ImageProcessing(patch_size=own.patch_size, min_pixels=own.min_pixels,
                           max_pixels=own.max_pixels, do_normalize=False)


FAULTS: dict[str, PictureFault] = {
    "columns of squares for rows": PictureFault(
        patches=lambda x, g: by_squares(x, g).transpose(0, 1).reshape(x.shape)),
    "columns for rows within squares": PictureFault(
        patches=lambda x, g: by_squares(x, g).transpose(2, 3).reshape(x.shape)),
    "patches line by line": PictureFault(
        patches=lambda x, g: by_squares(x, g).transpose(1, 2).reshape(x.shape)),
    "height and width exchanged": PictureFault(
        positions=lambda found: found._replace(axes=found.axes[[0, 2, 1]].copy())),
    "time and width exchanged": PictureFault(
        positions=lambda found: found._replace(axes=found.axes[[2, 1, 0]].copy())),
    "positions as in text": PictureFault(positions=as_text),
    "red and blue exchanged": PictureFault(
        patches=lambda x, g: x.view(len(x), 3, -1).flip(1).reshape(x.shape)),
    "normalised as by CLIP": PictureFault(processing=clips),
    "not normalised": PictureFault(processing=unnormalised),
    "pictures exchanged": PictureFault(exchanged=True),
    "a row too late": PictureFault(rows=lambda found: VisionRows(
        found.embeddings.roll(1, 0), tuple(deep.roll(1, 0) for deep in found.deep))),
    "a row too early": PictureFault(rows=lambda found: VisionRows(
        found.embeddings.roll(-1, 0), tuple(deep.roll(-1, 0) for deep in found.deep))),
    "no DeepStack": PictureFault(rows=lambda found: VisionRows(
        found.embeddings, tuple(torch.zeros_like(deep) for deep in found.deep))),
    "DeepStack in the wrong order": PictureFault(rows=lambda found: VisionRows(
        found.embeddings, found.deep[::-1])),
}
"""What an engine could get wrong."""
