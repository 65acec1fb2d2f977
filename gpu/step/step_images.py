"""What steps ask of images and videos, where the model takes any: see `gpu/vision/media_steps.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from actorium.actors.messages import Admit, StepPlan
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.staging import Array
from actorium.kernels.record import ROPE_DELTA


class MediaReport(NamedTuple):
    """What a step did for images and videos: the last fields of a `StepResult`."""

    encoded: list[bytes] = []
    encode_us: int = 0
    failed: list[tuple[int, str, str]] = []


class SlotImages(Protocol):
    """The images and videos of a sequence in a slot."""

    @property
    def delta(self) -> int:
        """See `RopePositions.delta`."""


class ImageSlot(Protocol):
    """A sequence in a slot."""

    @property
    def images(self) -> SlotImages | None:
        """None where its prompt has none."""


class StepImages(ABC):
    """The images and videos of a worker's sequences."""

    @property
    @abstractmethod
    def kept(self) -> Tensor:
        """All that is kept of what was made."""

    @abstractmethod
    def open(self, run_dir: Path) -> None:
        """Where the engine has its patches."""

    @abstractmethod
    def admit(self, admit: Admit) -> SlotImages:
        """Those of a sequence that enters a slot. Raises nothing: what is wrong with them is told
        when they are needed."""

    @abstractmethod
    def prepare(self, plan: StepPlan, extends: Sequence[tuple[int, int, int]],
                slots: Mapping[int, ImageSlot]) -> MediaReport:
        """Make what the plan wants ahead, and what its extends need: (slot, start, count) each."""

    @abstractmethod
    def place(self, batches: Sequence[ForwardBatch]) -> None:
        """Give the step that was prepared last its rows and positions."""


def turned(images: StepImages | None, record: Array, slots: Array, at: Array) -> Array:
    """Where rope turns tokens of n slots that are at these places, i32[n] or [n, more]. record: of
    all slots; images: None where the model takes none."""
    if images is None:
        return at
    delta = record[slots, ROPE_DELTA]
    return at + (delta if at.ndim == 1 else delta[:, None])
