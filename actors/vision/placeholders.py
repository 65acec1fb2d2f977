"""Where images and videos stand in a prompt: from a rendered conversation to token ids.

A chat template writes `<|vision_start|><|image_pad|><|vision_end|>` for each image, and the same
with `<|video_pad|>` for a video. Each pad becomes as many ids as its item has tokens. Text is
expanded first only as far as its tokenization depends on it (timestamps), pads afterwards as ids: a
prompt with 16,000 image tokens is tokenized as one with a single pad.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from actorium.actors.errors import InvalidRequest
from actorium.actors.vision.processor_config import QWEN3

IMAGE, VIDEO = "image", "video"
PADS = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
START, END = "<|vision_start|>", "<|vision_end|>"
_PAD = re.compile(r"<\|(image|video)_pad\|>")
_WHOLE = re.compile(r"<\|vision_start\|><\|video_pad\|><\|vision_end\|>|<\|(?:image|video)_pad\|>")
ASSUMED_FPS = 24.0
"""Of a video whose rate nobody knows, as Qwen3-VL's processor has it."""


class MediaGrid(NamedTuple):
    """What a prompt needs to know of an item."""

    kind: str
    """image | video"""
    grid: tuple[int, int, int]
    """Patches (t, h, w)."""
    merge_size: int = 2
    timestamps: tuple[float, ...] = ()
    """Of a video: seconds of each of its t temporal patches (`patch_times`)."""

    @property
    def tokens(self) -> int:
        """Tokens that stand for it, timestamps and marks apart."""
        return self.grid[0] * self.grid[1] * self.grid[2] // self.merge_size ** 2


class MediaSpan(NamedTuple):
    """A run of pads in a prompt: an image, or a video, or one temporal patch of a video that has
    timestamps."""

    item: int
    """Which of the request's items."""
    offset: int
    """The first of its ids."""
    length: int


class ExpandedText(NamedTuple):
    """A prompt's text with one pad for each span, and how many ids each pad becomes."""

    text: str
    items: tuple[int, ...]
    lengths: tuple[int, ...]


def patch_times(indices: Sequence[int], fps: float | None, temporal_patch_size: int) -> tuple[
        float, ...]:
    """Seconds of each temporal patch of a video: the middle between its first and its last frame.
    indices: the sampled frames'; fps: of the video."""
    seconds = [index / (fps or ASSUMED_FPS) for index in indices]
    seconds += seconds[-1:] * (-len(seconds) % temporal_patch_size)
    return tuple((seconds[at] + seconds[at + temporal_patch_size - 1]) / 2
                 for at in range(0, len(seconds), temporal_patch_size))


def seconds_per_patch(indices: Sequence[int], total: int, fps: float | None,
                      temporal_patch_size: int) -> float:
    """Seconds between two temporal patches of a sampled video: `second_per_grid_ts` of
    Qwen2.5-VL."""
    return temporal_patch_size / (len(indices) / total * (fps or ASSUMED_FPS))


def expand_text(text: str, media: Sequence[MediaGrid], family: str,
                param: str = "messages") -> ExpandedText:
    """Gives each pad of a rendered conversation its item, in order within images and videos.

    A video of Qwen3-VL becomes `<1.5 seconds>`, a start, pads and an end for each temporal patch,
    in place of its pad with the marks around it, as the model was trained and as transformers 4.57
    has it (5.23 leaves the outer marks standing). Raises `InvalidRequest` where text and media do
    not match: a template that knows no images, or a message whose own text has pads."""
    queues = {kind: [index for index, item in enumerate(media) if item.kind == kind]
              for kind in PADS}
    found = [match[1] for match in _PAD.finditer(text)]
    for kind, queue in queues.items():
        if found.count(kind) != len(queue):
            raise InvalidRequest(
                f"{param}: the prompt has {found.count(kind)} {PADS[kind]} for {len(queue)} "
                f"{kind}s: the chat template writes none, or a message's own text does", param)
    items: list[int] = []
    lengths: list[int] = []

    def written(match: re.Match[str]) -> str:
        kind = IMAGE if match[0] == PADS[IMAGE] else VIDEO
        index = queues[kind].pop(0)
        item = media[index]
        if kind == IMAGE or family != QWEN3:
            items.append(index)
            lengths.append(item.tokens)
            return match[0]
        if len(item.timestamps) != item.grid[0]:
            raise ValueError(f"{len(item.timestamps)} timestamps for {item.grid[0]} patches")
        items.extend([index] * item.grid[0])
        lengths.extend([item.tokens // item.grid[0]] * item.grid[0])
        return "".join(f"<{time:.1f} seconds>{START}{PADS[VIDEO]}{END}" for time in item.timestamps)

    pattern = _WHOLE if family == QWEN3 else _PAD
    return ExpandedText(pattern.sub(written, text), tuple(items), tuple(lengths))


def expand_ids(ids: Sequence[int], expanded: ExpandedText, pad_ids: Sequence[int],
               param: str = "messages") -> tuple[list[int], list[MediaSpan]]:
    """(the ids with every pad repeated, where the spans lie). ids: of `expanded.text`; pad_ids:
    those of `<|image_pad|>` and `<|video_pad|>`. Raises `InvalidRequest` if the tokenizer made
    other pads of the text than it has."""
    found: list[int] = []
    spans: list[MediaSpan] = []
    begin = 0
    for at, token in enumerate(ids):
        if token not in pad_ids:
            continue
        if len(spans) == len(expanded.lengths):
            break
        length = expanded.lengths[len(spans)]
        found += ids[begin:at]
        spans.append(MediaSpan(expanded.items[len(spans)], len(found), length))
        found += [token] * length
        begin = at + 1
    found += ids[begin:]
    if len(spans) != len(expanded.lengths) or any(token in pad_ids for token in ids[begin:]):
        raise InvalidRequest(f"{param}: the tokenizer makes other pads of the prompt than it has: "
                             f"{len(expanded.lengths)} are in its text", param)
    return found, spans
