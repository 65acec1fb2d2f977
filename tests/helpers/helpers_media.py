"""Requests with images through scheduler and runner in one process, and what transformers says to
the same pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers_speculation import make_runner
from helpers_vision import END, IMAGE, START, VIDEO
from helpers_worker import Output, Ring
from numpy.typing import NDArray

from actorium.actors.messages import Admit, MediaItem, PageGroup, Ready, StepPlan, Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.vision.grids import Grid, Medium, output_rows
from actorium.gpu.vision.media_steps import EncoderPool, MediaSteps

GREEDY = ResolvedParams(max_tokens=6, temperature=0.0)


class Picture(NamedTuple):
    """An image or a video: a grid, and pixels that follow from a number."""

    medium: Medium
    seed: int

    @property
    def key(self) -> bytes:
        return sha256(repr(self).encode()).digest()

    def pixels(self, width: int = 96) -> NDArray[np.float32]:
        shape = (self.medium.grid.patches, width)
        return np.random.default_rng(self.seed).standard_normal(shape).astype(np.float32)


def image(rows: int, columns: int, seed: int = 0) -> Picture:
    return Picture(Medium(Grid(1, rows, columns)), seed)


def video(frames: int, rows: int, columns: int, seed: int = 0, seconds: float = 1.0) -> Picture:
    return Picture(Medium(Grid(frames, rows, columns), True, seconds), seed)


class Question(NamedTuple):
    """A prompt: tokens and pictures between them."""

    tokens: list[int]
    media: list[MediaItem]
    pictures: list[Picture]


def question(model: Decoder, *parts: Sequence[int] | Picture) -> Question:
    """Frames of a video apart where the tower wants them so."""
    own = model.shape.vision
    assert own is not None
    ids: list[int] = []
    media, pictures = [], []
    for part in parts:
        if not isinstance(part, Picture):
            ids += part
            continue
        grid, first, last = part.medium.grid, 0, 0
        apart = part.medium.video and not own.tokens_per_second
        each = grid._replace(frames=1) if apart else grid
        for frame in range(grid.frames if apart else 1):
            rows = [VIDEO if part.medium.video else IMAGE] * output_rows(each, own)
            ids += [20 + frame, START]
            first, last = first or len(ids), len(ids) + len(rows)
            ids += [*rows, END]
        media.append(MediaItem(part.key, part.medium.video, *grid, first, last,
                               part.medium.seconds))
        pictures.append(part)
    return Question(ids, media, pictures)


@dataclass
class Patches:
    """Where the pictures lie: patches by key, and how often each was read."""

    found: dict[bytes, NDArray[np.float32]] = field(default_factory=dict)
    reads: list[bytes] = field(default_factory=list)

    def add(self, *pictures: Picture) -> None:
        for picture in pictures:
            self.found[picture.key] = picture.pixels()

    def __call__(self, key: bytes) -> NDArray[np.float32]:
        self.reads.append(key)
        if key not in self.found:
            raise FileNotFoundError(f"{key.hex()}.rows")
        return self.found[key]


def with_images(runner: ModelRunner, patches: Patches, rows: int = 4096, frame_tokens: int = 4096,
                group: RankGroup = LoneRank()) -> ModelRunner:
    """The runner, which takes images. rows: that it keeps."""
    model: Any = runner.model
    tower = model.vision
    width = tower.shape.out_hidden * (1 + len(tower.shape.deepstack))
    pool = EncoderPool(rows, width, tower.dtype, tower.device)
    runner.tables.images = MediaSteps(tower, pool, runner.tables.max_len, frame_tokens, group,
                                      patches)
    return runner


class MediaRing(Ring):
    """A ring whose requests may have images."""

    def __init__(self, runner: ModelRunner, patches: Patches, **ring: Any) -> None:
        super().__init__(runner, **ring)
        self.patches = patches
        self.plans_seen: list[StepPlan] = []
        """All that the worker was sent."""

    @property
    def admitted(self) -> list[Admit]:
        """Every sequence that entered a slot."""
        return [admit for plan in self.plans_seen for admit in plan.admit]

    def step(self) -> bool:
        self._deliver()
        self.plans_seen += list(self.plans)[:1]
        return super().step()

    def replace_worker(self, runner: ModelRunner) -> None:
        """By one that has nothing of what was computed."""
        self.runner = runner
        self.plans.clear()
        t = runner.tables
        self.core.on_message(Ready(2, [PageGroup(pool.pages) for pool in runner.pools],
                                   t.page_size, t.slots, t.max_len, t.vocab, "test"), 0.0)

    @property
    def images(self) -> MediaSteps:
        """The worker's."""
        found = self.runner.tables.images
        assert isinstance(found, MediaSteps)
        return found

    def ask(self, asked: Question, params: ResolvedParams = GREEDY, known: bool = True,
            tenant: str = "") -> None:
        """Queue a request; its pictures lie ready if they are `known`."""
        if known:
            self.patches.add(*asked.pictures)
        self.submitted += 1
        self.core.on_message(Submit(
            rid=f"r{self.submitted}", client=b"test", n=1, params=params,
            prompt=np.array(asked.tokens, np.int32).tobytes(), text=TextParams(), seed=1,
            media=asked.media, tenant=tenant), 0.0)


def media_ring(model: Decoder, rows: int = 4096, frame_tokens: int = 4096, drafts: int = 0,
               runner: dict[str, Any] | None = None, **ring: Any) -> MediaRing:
    """A ring over a model; runner: of `make_runner`; ring: of `Ring`."""
    patches = Patches()
    made = make_runner(model, drafts, **{"slots": 9, **(runner or {})})
    return MediaRing(with_images(made, patches, rows, frame_tokens), patches, **ring)


def answers(ring: MediaRing, *asked: Question, params: ResolvedParams = GREEDY) -> list[Output]:
    """Of these questions together, in order."""
    before = len(ring.outputs)
    for own in asked:
        ring.ask(own, params)
    return ring.run()[before:]


def oracle_inputs(asked: Question, kind: str) -> dict[str, Any]:
    """What transformers takes beside the tokens."""
    tokens = torch.tensor([asked.tokens])
    found: dict[str, Any] = {
        "mm_token_type_ids": (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()}
    for videos, pixels, grids in ((False, "pixel_values", "image_grid_thw"),
                                  (True, "pixel_values_videos", "video_grid_thw")):
        own = [p for p in asked.pictures if p.medium.video == videos]
        if own:
            found[pixels] = torch.from_numpy(np.concatenate([p.pixels() for p in own]))
            found[grids] = torch.tensor([p.medium.grid for p in own])
    if kind == "2.5" and any(p.medium.video for p in asked.pictures):
        found["second_per_grid_ts"] = torch.tensor(
            [p.medium.seconds for p in asked.pictures if p.medium.video])
    return found


def oracle_answer(oracle: Any, asked: Question, kind: str, new: int = 6) -> list[int]:
    """Greedy tokens by transformers' `generate`."""
    ids = torch.tensor([asked.tokens])
    oracle.model.rope_deltas = None
    full = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                           max_new_tokens=new, min_new_tokens=new, eos_token_id=None,
                           pad_token_id=0, **oracle_inputs(asked, kind))
    found: list[int] = full[0, ids.shape[1]:].tolist()
    return found
