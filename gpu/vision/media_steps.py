"""The images and videos of a worker's sequences, from their patches in shared memory to the rows
that steps take.

An item's frames do not see one another in the tower, so it is run over a part of an item at a time:
as many frames as have `PART_PATCHES` patches together, at least one. What it takes beside its
weights depends on the largest frame alone, however long a video is. Rows are kept part by part
(`EncoderPool`); a part that was evicted is computed again by the step that needs it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.actors.media.patch_store import patch_folder, read_patches
from actorium.actors.messages import Admit, MediaItem, StepPlan
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.non_cache_memory import encoder_rows, encoder_width
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.vision.grids import I64, Grid, Medium, RopePositions, output_rows, rope_positions
from actorium.gpu.vision.prompt_images import ChunkImages, add_images, chunk_images
from actorium.gpu.vision.tower import TowerRun, VisionRows, VisionTower

PART_PATCHES = 4096
"""Of a video's frames that the tower is run over together, unless one alone has more."""
ReadPatches = Callable[[bytes], NDArray[np.float32]]
"""key -> [patches, pixels]. Raises `OSError` and `ValueError`."""


class MediaReport(NamedTuple):
    """What a step did for images and videos: the last fields of a `StepResult`."""

    encoded: list[bytes] = []
    encode_us: int = 0
    failed: list[tuple[int, str, str]] = []


class MediaFault(NamedTuple):
    """Why a sequence cannot have its images."""

    code: str
    """An `errors.CODES` name."""
    why: str


class FramePart(NamedTuple):
    """Some frames of an item."""

    item: MediaItem
    frame: int
    """The first of them."""
    grid: Grid
    """Of these frames."""
    rows: int
    """That the tower makes of them."""

    @property
    def name(self) -> PartName:
        """By which its rows are kept."""
        return self.item.key, self.frame


@dataclass(slots=True)
class SlotMedia:
    """Those of a sequence in a slot."""

    media: Sequence[MediaItem]
    positions: RopePositions
    starts: I64
    """[items + 1]: the first row of each, of all that the prompt has."""
    fault: MediaFault | None = None

    @property
    def delta(self) -> int:
        return self.positions.delta


class ImageSlot(Protocol):
    """A sequence in a slot."""

    @property
    def images(self) -> SlotMedia | None:
        """None where its prompt has none."""


@dataclass(slots=True)
class SliceClock:
    """Whether there is time for one more slice of work."""

    us: int
    """0 = for all."""
    wait: Callable[[], None]
    """Until the device has done what was queued; called only where time is short."""
    began: float = field(default_factory=perf_counter)
    _slices: int = 0
    _last: float = 0.0

    def more(self) -> bool:
        """The first is always done, and others as far as they end in time, if they take as long as
        the one before."""
        if not self.us:
            return True
        self.wait()
        spent = perf_counter() - self.began
        slice_s, self._last = spent - self._last, spent
        self._slices += 1
        return self._slices == 1 or spent + slice_s <= self.us / 1e6


class MediaSteps:
    """What steps ask of images and videos, where the model takes any."""

    def __init__(self, tower: VisionTower, pool: EncoderPool, max_len: int, frame_tokens: int,
                 group: RankGroup = LoneRank(), read: ReadPatches | None = None) -> None:
        """max_len: positions that rope's tables have; frame_tokens: the most rows of a frame; read:
        None until `open`."""
        self.tower, self.pool, self.read = tower, pool, read
        self.encodings = 0
        """Parts that the tower was run over so far."""
        self._max_len, self._frame_tokens, self._group = max_len, frame_tokens, group
        self._chunks: dict[int, ChunkImages] = {}
        self._begun: tuple[PartName, TowerRun] | None = None
        """The part on its way through the tower."""

    @property
    def kept(self) -> Tensor:
        """All that is kept of what was made."""
        return self.pool.table

    def open(self, run_dir: Path) -> None:
        """Where the engine has its patches."""
        self.read = partial(read_patches, patch_folder(run_dir))

    def renew(self, tower: VisionTower) -> None:
        """Another tower of the same shape takes its place: what the one before made is forgotten.
        """
        self.tower, self._begun = tower, None
        self.pool.clear()

    # --- admission -------------------------------------------------------------------------------

    def admit(self, admit: Admit) -> SlotMedia:
        """Those of a sequence that enters a slot. Raises nothing: what is wrong with them is
        reported when they are needed."""
        prompt, shape = np.frombuffer(admit.tokens, np.int32)[:admit.prompt_len], self.tower.shape
        media = [Medium(_grid(item), item.video, item.seconds) for item in admit.media]
        rows = [output_rows(own.grid, shape) for own in media]
        try:
            if sum(rows) > len(prompt):
                raise ValueError(f"media: {len(prompt)} tokens have no {sum(rows)} placeholders")
            positions = rope_positions(prompt, media, shape)
        except ValueError as error:
            return _faulty(admit, MediaFault("invalid_request", str(error)))
        for number, item in enumerate(admit.media):
            if (tokens := rows[number] // item.frames) > self._frame_tokens:
                return _faulty(admit, MediaFault(
                    "invalid_request", f"media: item {number}: {tokens} tokens of an image or a "
                    f"frame are more than max_encoder_tokens={self._frame_tokens}"))
        if (reach := int(positions.axes.max()) + 1) > self._max_len:
            return _faulty(admit, MediaFault(
                "context_overflow", f"media: the prompt reaches {reach} positions in time, height "
                f"or width, max_model_len={self._max_len}"))
        return SlotMedia(admit.media, positions, np.cumsum([0, *rows]))

    # --- a step ----------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, extends: Sequence[tuple[int, int, int]],
                slots: Mapping[int, ImageSlot]) -> MediaReport:
        """Makes what the plan wants ahead, and what its extends need: (slot, start, count) each."""
        self._chunks = {}
        wanted = [(slot, start, count, images) for slot, start, count in extends
                  if isinstance(images := slots[slot].images, SlotMedia)]
        if not (plan.encode or wanted):
            return MediaReport()
        timed = plan.encode_us > 0 or self.tower.device.type == "cpu"
        self._wait(plan.encode_us > 0)
        began, before = perf_counter(), self.encodings
        encoded = self._ahead(plan.encode, plan.encode_us)
        faults: dict[int, MediaFault] = {}
        for slot, start, count, images in wanted:
            found = self._chunk(images, start, count)
            if isinstance(found, MediaFault):
                faults[slot] = found
            else:
                self._chunks[slot] = found
        self._wait(plan.encode_us > 0)
        spent = round((perf_counter() - began) * 1e6)
        timed = timed and (bool(plan.encode) or self.encodings > before)
        return MediaReport(encoded, spent if timed else 0,
                           self._failed([slot for slot, *_ in wanted], faults))

    def apply(self, batches: Sequence[ForwardBatch]) -> None:
        """Gives the step that was prepared last its rows and positions."""
        if self._chunks:
            add_images(batches, self._chunks)

    def _failed(self, slots: Sequence[int],
                faults: Mapping[int, MediaFault]) -> list[tuple[int, str, str]]:
        """The sequences that failed on any rank, and why: no rank may go on with them."""
        failed, at = [], 0
        while at < len(slots):
            own = next((i for i, slot in enumerate(slots) if i >= at and slot in faults),
                       len(slots))
            first = int(self._group.agreed(own))
            if first < len(slots):
                fault = faults.get(slots[first]) or MediaFault(
                    "unavailable", "media: another rank of the worker cannot read the patches")
                failed.append((slots[first], *fault))
                self._chunks.pop(slots[first], None)
            at = first + 1
        return failed

    def _chunk(self, images: SlotMedia, start: int, count: int) -> ChunkImages | MediaFault:
        if images.fault is not None:
            return images.fault
        try:
            return chunk_images(images.positions, start, count, partial(self._rows, images))
        except (OSError, ValueError) as error:
            return MediaFault("unavailable",
                              f"media: the patches of an item cannot be read: {error}")

    def _rows(self, images: SlotMedia, low: int, high: int) -> VisionRows:
        """Of the prompt's rows of all items, those from low to high."""
        found = []
        for item, start in zip(images.media, images.starts.tolist(), strict=False):
            for part in self._parts(item):
                if start < high and start + part.rows > low:
                    found.append(self._part_rows(part, max(low - start, 0), min(high - start,
                                                                           part.rows)))
                start += part.rows
        rows, width = torch.cat(found), self.tower.shape.out_hidden
        own = [rows[:, at:at + width] for at in range(0, rows.shape[1], width)]
        return VisionRows(own[0], tuple(own[1:]))

    # --- the tower -------------------------------------------------------------------------------

    def _parts(self, item: MediaItem) -> Iterator[FramePart]:
        grid = _grid(item)
        each = max(1, PART_PATCHES // (grid.rows * grid.columns))
        for frame in range(0, grid.frames, each):
            own = grid._replace(frames=min(each, grid.frames - frame))
            yield FramePart(item, frame, own, output_rows(own, self.tower.shape))

    def _ahead(self, items: Sequence[MediaItem], us: int) -> list[bytes]:
        """Keys of the items that are made, as far as they can be kept. What cannot be read is among
        them: the extend that needs it reports that."""
        clock, rows = SliceClock(us, self._wait), 0
        done: list[bytes] = []
        for item in items:
            for part in self._parts(item):
                rows += part.rows
                if rows > self.pool.rows:  # it would take the place of what was made before
                    if done:
                        return done
                    break
                if self.pool.holds(part.name):
                    continue
                try:
                    run = self._run(part)
                except (OSError, ValueError):
                    break
                while not run.done:
                    if not clock.more():
                        return done
                    run.advance()
                self._kept(part, run)
            done.append(item.key)
        return done

    def _part_rows(self, part: FramePart, low: int, high: int) -> Tensor:
        """[high - low, width]: rows of a part. Raises `OSError` and `ValueError`."""
        if self.pool.holds(part.name):
            return self.pool.rows_of(part.name, low, high)
        run = self._run(part)
        while not run.done:
            run.advance()
        return self._kept(part, run)[low:high]

    def _kept(self, part: FramePart, run: TowerRun) -> Tensor:
        made = run.rows()
        rows = torch.cat((made.embeddings, *made.deep), 1)
        self.pool.keep(part.name, rows)
        self._begun = None
        self.encodings += 1
        return rows

    def _run(self, part: FramePart) -> TowerRun:
        """The part on its way through the tower; another one, if it is half way, begins anew some
        time. Raises `OSError` and `ValueError`."""
        if self._begun is None or self._begun[0] != part.name:
            self._begun = part.name, TowerRun(self.tower, self._pixels(part), [part.grid])
        return self._begun[1]

    def _pixels(self, part: FramePart) -> Tensor:
        """f32[patches, pixels]"""
        assert self.read is not None
        rows, whole = self.read(part.item.key), _grid(part.item)
        if rows.shape != (whole.patches, self.tower.shape.pixels):
            raise ValueError(f"{rows.shape[0]} patches of {rows.shape[1]} numbers, of a grid of "
                             f"{tuple(whole)} with {self.tower.shape.pixels} each")
        first = part.frame * whole.rows * whole.columns
        return torch.from_numpy(np.array(rows[first:first + part.grid.patches], np.float32))

    def _wait(self, needed: bool = True) -> None:
        if needed and self.tower.device.type == "cuda":
            torch.cuda.synchronize(self.tower.device)


def make_images(tower: VisionTower | None, shape: ModelShape, demand: Demand,
                group: RankGroup = LoneRank()) -> MediaSteps | None:
    """Of a worker whose model has this tower; None without one."""
    if tower is None:
        return None
    pool = EncoderPool(encoder_rows(shape, demand), encoder_width(tower.shape), tower.dtype,
                       tower.device)
    return MediaSteps(tower, pool, shape.max_model_len, demand.encoder_tokens, group)


def _grid(item: MediaItem) -> Grid:
    return Grid(item.frames, item.rows, item.columns)


def _faulty(admit: Admit, fault: MediaFault) -> SlotMedia:
    """A sequence whose images cannot be had: it is computed as text until it is ended."""
    none = np.zeros(0, np.int64)
    return SlotMedia(admit.media, RopePositions(np.zeros((3, 0), np.int64), none, 0), none, fault)


# --- What is kept --------------------------------------------------------------------------------

PartName = tuple[bytes, int]
"""Key of an item, and the first of its frames that are in the part."""


class EncoderPool:
    """Rows of a table, shared out to parts; the one that was asked for longest ago goes first."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """rows: 0 = nothing is kept; width: of each, embedding and deep rows side by side."""
        self.table = torch.empty((rows, width), dtype=dtype, device=device)
        self._free = list(range(rows - 1, -1, -1))
        self._held: OrderedDict[PartName, tuple[list[int], Tensor]] = OrderedDict()

    @property
    def rows(self) -> int:
        """The most that it keeps."""
        return len(self.table)

    @property
    def used(self) -> int:
        """Rows that parts have."""
        return self.rows - len(self._free)

    def clear(self) -> None:
        """Keeps nothing any more."""
        self._held.clear()
        self._free = list(range(self.rows - 1, -1, -1))

    def holds(self, name: PartName) -> bool:
        """Whether a part is there; it counts as asked for."""
        if name not in self._held:
            return False
        self._held.move_to_end(name)
        return True

    def rows_of(self, name: PartName, low: int, high: int) -> Tensor:
        """[high - low, width]: a copy of these rows of a part that is there."""
        self._held.move_to_end(name)
        return self.table.index_select(0, self._held[name][1][low:high])

    def keep(self, name: PartName, rows: Tensor) -> None:
        """Keep a part, in the place of others. rows: [n, width]; more than all rows are not kept.
        """
        if len(rows) > self.rows or name in self._held:
            return
        while len(self._free) < len(rows):
            _, (numbers, _) = self._held.popitem(last=False)
            self._free += reversed(numbers)
        numbers = [self._free.pop() for _ in range(len(rows))]
        at = torch.tensor(numbers, device=self.table.device)
        self.table.index_copy_(0, at, rows)
        self._held[name] = numbers, at
