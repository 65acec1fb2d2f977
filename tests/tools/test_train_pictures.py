"""The training model of pictures: what its checkpoints are to transformers and to the engine, and
that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_pictures import PictureReader, Seq
from tokenizers import Tokenizer

from actorium.actors.media.media_jobs import patchify
from actorium.gpu.vision.grids import Grid
from actorium.tools.pictures.drawn_pictures import COLOURS, SHAPES, Figure, Picture, draw
from actorium.tools.pictures.picture_questions import PictureItem, held_out
from actorium.tools.training.picture_batches import (
    ANSWERS,
    CHAT_TEMPLATE,
    PROCESSING,
    PictureSource,
    around,
    build_tokenizer,
    spaced_words,
)
from actorium.tools.training.picture_net import (
    Probed,
    init_looking,
    load,
    new_net,
    picture_loss,
    save,
)
from actorium.tools.training.trainer import Team, Trainer, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that has learned nothing."""
    made, tokenizer = tmp_path_factory.mktemp("pictures"), build_tokenizer()
    torch.manual_seed(3)
    model = new_net(tokenizer)
    init_looking(model, spaced_words(tokenizer))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    save_tokenizer(tokenizer, made, 1024, CHAT_TEMPLATE)
    save(model, tokenizer, made)
    return made


def pictures_of(pictures: tuple[Picture, ...]) -> list[torch.Tensor]:
    """The patches of pictures, [patches, pixels] each."""
    return [torch.from_numpy(patchify(draw(picture)[None], PROCESSING)[0])
            for picture in pictures]


def two_pictures() -> PictureItem:
    return next(item for item in held_out(9) if len(item.pictures) == 2)


def test_engine_and_transformers_compute_what_is_trained(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    item, reader = two_pictures(), PictureReader(folder)
    ids, images = reader.prompt(item)
    grids = [Grid(1, 2 * one.rows, 2 * one.columns) for one in item.pictures]
    pixels = pictures_of(item.pictures)
    model, tokens = load(folder), torch.tensor([ids])
    with torch.no_grad():
        rows = model.rows([own.unsqueeze(0) for own in pixels], grids)
        mine = model.logits(tokens, rows, grids, torch.arange(len(ids)))
        auto = transformers.AutoModelForImageTextToText.from_pretrained(
            str(folder), dtype=torch.float32)
        theirs = auto(tokens, pixel_values=torch.cat(pixels), image_grid_thw=torch.tensor(grids),
                      mm_token_type_ids=(tokens == reader.tower.shape.image_token).int()).logits[0]
    assert torch.allclose(rows[0][0], images.rows.embeddings, atol=1e-4)
    assert torch.allclose(mine, theirs, atol=2e-4, rtol=0) and mine.std() > 0.1
    engine = reader.logits([Seq(ids)], [images])
    assert torch.allclose(mine[-1], engine[0], atol=2e-4, rtol=0)


def test_the_processor_of_transformers_makes_the_same_patches(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    item = two_pictures()
    processor = transformers.AutoImageProcessor.from_pretrained(str(folder), use_fast=False)
    drawn = [image.fromarray(draw(picture)) for picture in item.pictures]
    found = processor(images=drawn, return_tensors="pt")
    assert torch.allclose(found["pixel_values"], torch.cat(pictures_of(item.pictures)), atol=1e-6)


def test_words_are_tokens_and_what_is_held_out_is_not_drawn() -> None:
    tokenizer = build_tokenizer()
    for item in held_out(40):
        assert len(tokenizer.encode(item.question.answer).ids) == 1
    for word in ANSWERS:
        assert [len(tokenizer.encode(space + word).ids) for space in ("", " ")] == [1, 1]
    batch = PictureSource(tokenizer, "t", 6, 3).step(1.0)[1]
    assert len(batch.grids) == 2 and not batch.align and len(batch.ids) == 6
    said = [tokenizer.decode([token]) for token in batch.targets.tolist()]
    assert all(word in tokenizer.decode(batch.ids.flatten().tolist()) for word in said if word)


def test_questions_of_a_batch_do_not_see_one_another(folder: Path) -> None:
    model = load(folder)
    batch = PictureSource(Tokenizer.from_file(str(folder / "tokenizer.json")), "t", 2, 3).step(0)[1]
    before, length = batch.turns
    with torch.no_grad():
        rows = model.rows(batch.pixels, batch.grids)
        every = model.logits(batch.ids, rows, batch.grids, torch.arange(batch.ids.numel()),
                             batch.turns).view(*batch.ids.shape, -1)
        for k in range(3):
            own = slice(before + k * length, before + (k + 1) * length)
            alone = torch.cat((batch.ids[:, :before], batch.ids[:, own]), 1)
            one = model.logits(alone, rows, batch.grids, torch.arange(alone.numel()))
            assert torch.allclose(one.view(2, before + length, -1)[:, before:], every[:, own],
                                  atol=1e-4, rtol=0)


def test_what_is_around_a_cell() -> None:
    bar, post = Figure("bar", "red"), Figure("post", "cyan")
    colours = list(COLOURS)
    red, cyan = 1 + colours.index("red"), 1 + colours.index("cyan")
    assert list(around(Picture(((bar, None), (None, post), (bar, None))))) == [
        [0, 0, 0, 0], [red, 1 + SHAPES.index("bar"), 0, 0],
        [0, 0, red, 1 + SHAPES.index("bar")], [0, 0, 0, 0],
        [0, 0, 0, 0], [red, 1 + SHAPES.index("bar"), cyan, 1 + SHAPES.index("post")]]


@pytest.mark.slow
def test_the_loss_falls() -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model, team = Probed(new_net(tokenizer)), Team(0, 1)
    batches = PictureSource(tokenizer, "t", 4, 2).step(0.3)
    trainer = Trainer(model, lambda batch: picture_loss(model, batch, team), lambda _: batches)
    losses = [trainer.step(0.1)[0] for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
