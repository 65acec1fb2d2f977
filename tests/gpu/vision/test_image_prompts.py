"""Prompts with images and videos through the decoder, against transformers: every logit in chunks
that cut through images, beside other sequences, and greedy tokens behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_models import Seq, Stepper, generated, load, oracle_logits
from helpers_vision import END, IMAGE, START, VIDEO, pixels_of, write_vl
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.vision.grids import Grid, Medium, RopePositions, output_rows, rope_positions
from actorium.gpu.vision.prompt_images import add_images, chunk_images
from actorium.gpu.vision.tower import VisionRows

NEW = 6
MEDIA = {
    "an image": [Medium(Grid(1, 6, 8))],
    "images": [Medium(Grid(1, 2, 2)), Medium(Grid(1, 8, 4)), Medium(Grid(1, 4, 6))],
    "a long video": [Medium(Grid(3, 4, 4), True, 9.5)],
    "both": [Medium(Grid(1, 4, 4)), Medium(Grid(2, 4, 6), True, 1.0), Medium(Grid(1, 2, 6))]}


def prompt_of(media: list[Medium], shape: ModelShape) -> list[int]:
    """Text around media; frames of a video apart where the tower wants them so."""
    own = shape.vision
    assert own is not None
    ids = [3, 9, 4]
    for medium in media:
        apart = medium.video and not own.tokens_per_second
        grid = medium.grid._replace(frames=1) if apart else medium.grid
        for frame in range(medium.grid.frames if apart else 1):
            rows = [VIDEO if medium.video else IMAGE] * output_rows(grid, own)
            ids += [20 + frame, START, *rows, END]
    return [*ids, 17, 8, 30]


def inputs(ids: list[int], media: list[Medium], kind: str) -> dict[str, Any]:
    """What transformers takes beside the tokens."""
    tokens = torch.tensor([ids])
    outputs: dict[str, Any] = {
        "mm_token_type_ids": (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()}
    for video, pixels, grids in ((False, "pixel_values", "image_grid_thw"),
                                 (True, "pixel_values_videos", "video_grid_thw")):
        own = [m.grid for m in media if m.video == video]
        if own:
            outputs |= {pixels: pixels_of(own, seed=4 + video), grids: torch.tensor(own)}
    if kind == "2.5" and any(m.video for m in media):
        outputs["second_per_grid_ts"] = torch.tensor([m.seconds for m in media if m.video])
    return outputs


class PromptImages(NamedTuple):
    """The images and videos of one sequence's prompt."""

    positions: RopePositions
    rows: VisionRows

    def between(self, low: int, high: int) -> VisionRows:
        return VisionRows(self.rows.embeddings[low:high],
                          tuple(deep[low:high] for deep in self.rows.deep))


def prompt_images(model: Decoder, ids: list[int], media: list[Medium],
                  given: dict[str, Any]) -> PromptImages:
    """The tower's rows of the same pixels, in the order of the prompt."""
    tower = model.vision
    assert tower is not None
    parts: list[VisionRows] = []
    starts = {"pixel_values": 0, "pixel_values_videos": 0}
    for medium in media:
        name = "pixel_values_videos" if medium.video else "pixel_values"
        end = starts[name] + medium.grid.patches
        parts.append(tower.forward(given[name][starts[name]:end], [medium.grid]))
        starts[name] = end
    rows = VisionRows(torch.cat([part.embeddings for part in parts]),
                      tuple(torch.cat(deep) for deep in zip(*(part.deep for part in parts),
                                                            strict=True)))
    return PromptImages(rope_positions(np.array(ids), media, tower.shape), rows)


class ImageStepper(Stepper):
    """Steps whose sequences may have images."""

    def __init__(self, model: Decoder, images: dict[int, PromptImages]) -> None:
        """images: by the identity of the sequence."""
        super().__init__(model)
        self.images = images

    def _batch(self, rows: list[tuple[Seq, int]], extends: int, q_len: int, every_row: bool,
               group: int) -> ForwardBatch:
        batch = super()._batch(rows, extends, q_len, every_row, group)
        own = [self.images.get(id(seq)) for seq, _ in rows]
        deltas = [each.positions.delta if each else 0 for each in own[extends:]]
        batch.positions[batch.extend_tokens:] += torch.tensor(
            deltas, dtype=torch.int64).repeat_interleave(q_len)
        add_images([batch], {
            i + 1: chunk_images(each.positions, seq.done, count, each.between)
            for i, (each, (seq, count)) in enumerate(zip(own[:extends], rows, strict=False))
            if each})
        return batch


def theirs(oracle: Any, ids: list[int], given: dict[str, Any]) -> tuple[Tensor, list[int], Tensor]:
    """(logits of the prompt, greedy tokens, logits that gave them), by its forward over its cache.
    Its `generate` goes on behind the last token's position instead, which for a long video of
    Qwen2.5-VL is not what its own `rope_deltas` say."""
    oracle.model.rope_deltas = None
    with torch.no_grad():
        out = oracle(torch.tensor([ids]), **given, use_cache=True)
        prompt, deciding = out.logits[0], [out.logits[0, -1:]]
        while len(deciding) < NEW:
            token = deciding[-1].argmax(-1, keepdim=True)
            out = oracle(token, past_key_values=out.past_key_values, use_cache=True)
            deciding.append(out.logits[0])
    logits = torch.cat(deciding)
    return prompt, logits.argmax(-1).tolist(), logits


@pytest.mark.parametrize("kind", ["2.5", "3", "3-moe"])
def test_logits_and_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = write_vl(tmp_path, kind)
    model = load(tmp_path)
    text = [(5 * i) % 180 + 2 for i in range(40)]
    text_logits, text_new = oracle_logits(oracle, text), generated(oracle, text, NEW)
    for media in MEDIA.values():
        ids = prompt_of(media, model.shape)
        given = inputs(ids, media, kind)
        want, tokens, deciding = theirs(oracle, ids, given)
        images = prompt_images(model, ids, media, given)
        assert images.positions.delta != 0 and images.rows.embeddings.std() > 0.05
        for chunk in (512, 7, 3):
            seq, beside = Seq(list(ids)), Seq(list(text))
            stepper = ImageStepper(model, {id(seq): images})
            got: list[Tensor] = []
            while seq.done < len(ids) or beside.done < len(text):
                parts = [(each, min(chunk, len(each.tokens) - each.done)) for each in (beside, seq)]
                parts = [part for part in parts if part[1]]
                rows = stepper.step(parts, every_row=True)
                for each, count in parts:
                    if each is seq:
                        got.append(rows[:count])
                    rows = rows[count:]
            assert torch.allclose(torch.cat(got), want, atol=1e-4, rtol=0)
            for i, (token, other) in enumerate(zip(tokens, text_new, strict=True)):
                seq.tokens.append(token)
                beside.tokens.append(other)
                if i + 1 < NEW:
                    pair = stepper.step([], [seq, beside])
                    assert torch.allclose(pair[0], deciding[i + 1], atol=1e-4, rtol=0)
                    assert pair.argmax(-1).tolist() == [tokens[i + 1], text_new[i + 1]]
            assert int(want[-1].argmax()) == tokens[0]
    assert int(text_logits[-1].argmax()) == text_new[0]


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_tokens_behind_a_prompt_are_extended_as_they_are_decoded(kind: str, tmp_path: Path) -> None:
    """A sequence that was preempted: its own tokens come again in chunks."""
    write_vl(tmp_path, kind)
    model, media = load(tmp_path), MEDIA["a long video"]
    ids = prompt_of(media, model.shape)
    images = prompt_images(model, ids, media, inputs(ids, media, kind))
    seq = Seq([*ids, 40])
    stepper = ImageStepper(model, {id(seq): images})
    stepper.step([(seq, len(ids))])
    want = []
    for token in (41, 42, 43):
        want.append(stepper.step([], [seq])[0])
        seq.tokens.append(token)
    for chunk in (5, 512):
        again = Seq(seq.tokens[:-1])
        stepper = ImageStepper(model, {id(again): images})
        got: list[Tensor] = []
        while again.done < len(again.tokens):
            count = min(chunk, len(again.tokens) - again.done)
            got.append(stepper.step([(again, count)], every_row=True))
        assert torch.allclose(torch.cat(got)[-3:], torch.stack(want), atol=1e-4, rtol=0)


def test_only_what_is_of_an_image_takes_the_long_way(tmp_path: Path) -> None:
    """Chunks of text, and decodes, have one position a row, so that graphs serve them."""
    write_vl(tmp_path, "3")
    model, media = load(tmp_path), MEDIA["an image"]
    ids = prompt_of(media, model.shape)
    seq = Seq(list(ids))
    images = prompt_images(model, ids, media, inputs(ids, media, "3"))
    stepper, delta = ImageStepper(model, {id(seq): images}), images.positions.delta
    found = []
    for start, count in ((0, 4), (4, 6), (10, 7), (17, 3)):
        seq.done, seq.pages = start, [1, 2, 3]
        found.append(stepper._batch([(seq, count)], 1, 1, False, 0))
    assert [batch.images is None for batch in found] == [True, False, False, True]
    assert [batch.turned_to.dim() for batch in found] == [1, 2, 2, 1]
    assert found[0].turned_to.tolist() == [0, 1, 2, 3]
    assert found[3].turned_to.tolist() == [17 + delta, 18 + delta, 19 + delta]
    assert [len(batch.images.places) for batch in found[1:3] if batch.images] == [5, 7]
    seq.done = 20
    decode = stepper._batch([(seq, 1)], 0, 1, False, 0)
    assert decode.images is None and decode.turned_to.tolist() == [20 + delta]
