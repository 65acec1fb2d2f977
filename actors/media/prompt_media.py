"""Images and videos in a prompt: their placeholders, from a rendered conversation to token ids.

A chat template writes `<|vision_start|><|image_pad|><|vision_end|>` for each image, and the same
with `<|video_pad|>` for a video. Each pad becomes as many ids as its item has tokens. Text is
expanded first only as far as its tokenization depends on it (timestamps), pads afterwards as ids: a
prompt with 16,000 image tokens is tokenized as one with a single pad. `PromptMedia` is the
tokenizer's side: it also says what the scheduler needs to know of the items.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actorium.actors.config.media_settings import MOST_ITEMS, MediaConfig, item_limit
from actorium.actors.config.tree import Config
from actorium.actors.errors import InvalidRequest, MediaExpired
from actorium.actors.media.image_processor import QWEN3, read_processing
from actorium.actors.media.patch_store import MediaFacts, patch_folder, read_facts
from actorium.actors.messages import MediaItem
from actorium.actors.models.model_dir import takes_media

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IMAGE, VIDEO = "image", "video"
PADS = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
START, END = "<|vision_start|>", "<|vision_end|>"
_PAD = re.compile(r"<\|(image|video)_pad\|>")
_WHOLE = re.compile(r"<\|vision_start\|><\|video_pad\|><\|vision_end\|>|<\|(?:image|video)_pad\|>")
ASSUMED_FPS = 24.0
"""Of a video whose rate nobody knows, as Qwen3-VL's processor has it."""
Encode = Callable[[str], Sequence[int]]


class MediaSpan(NamedTuple):
    """A run of pads: an image, a video, or one temporal patch of a video with timestamps."""

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
    """Seconds between temporal patches of a sampled video: Qwen2.5-VL's `second_per_grid_ts`."""
    return temporal_patch_size / (len(indices) / total * (fps or ASSUMED_FPS))


def expand_text(text: str, media: Sequence[MediaFacts], family: str,
                param: str = "messages") -> ExpandedText:
    """Gives each pad of a rendered conversation its item, in order within images and videos.

    A video of Qwen3-VL becomes `<1.5 seconds>`, a start, pads and an end for each temporal patch,
    in place of its pad with the marks around it, as the model was trained and as transformers 4.57
    has it (5.23 leaves the outer marks standing). Raises `InvalidRequest` where text and media do
    not match: a template that knows no images, or a message whose own text has pads."""
    queues = {kind: [index for index, item in enumerate(media) if item.video == (kind == VIDEO)]
              for kind in PADS}
    kinds = [match[1] for match in _PAD.finditer(text)]
    for kind, queue in queues.items():
        if kinds.count(kind) != len(queue):
            raise InvalidRequest(
                f"{param}: the prompt has {kinds.count(kind)} {PADS[kind]} for {len(queue)} "
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
    expanded_ids: list[int] = []
    spans: list[MediaSpan] = []
    begin = 0
    for at, token in enumerate(ids):
        if token not in pad_ids:
            continue
        if len(spans) == len(expanded.lengths):
            break
        length = expanded.lengths[len(spans)]
        expanded_ids += ids[begin:at]
        spans.append(MediaSpan(expanded.items[len(spans)], len(expanded_ids), length))
        expanded_ids += [token] * length
        begin = at + 1
    expanded_ids += ids[begin:]
    if len(spans) != len(expanded.lengths) or any(token in pad_ids for token in ids[begin:]):
        raise InvalidRequest(f"{param}: the tokenizer makes other pads of the prompt than it has: "
                             f"{len(expanded.lengths)} are in its text", param)
    return expanded_ids, spans


class PromptMedia:
    """Puts items into the prompts of one model."""

    def __init__(self, model_path: Path, limits: MediaConfig, folder: Path,
                 id_of: Callable[[str], int | None]) -> None:
        """folder: of the patches; id_of: the tokenizer's id of a token. Raises `BadModel`."""
        self._family = read_processing(model_path).video.family
        self._limits, self._folder = limits, folder
        pad_ids = [id_of(pad) for pad in PADS.values()]
        self._pads = [pad for pad in pad_ids if pad is not None]

    def info(self) -> dict[str, Any]:
        """For clients: how many items of a kind a request may have."""
        return {kind: item_limit(self._limits, kind) for kind in MOST_ITEMS}

    def check_none(self, ids: Sequence[int], param: str) -> None:
        """Raises `InvalidRequest` where a prompt without media has placeholders."""
        for pad in self._pads:
            if pad in ids:
                raise InvalidRequest(f"{param}: the prompt has placeholders of images or videos "
                                     f"(token {pad}), and no media", param)

    def expand(self, text: str, keys: Sequence[bytes], encode: Encode, param: str
               ) -> tuple[array[int], list[MediaItem]]:
        """(ids of a prompt with the placeholders of its items, where these are). text: with one pad
        for each item; encode: of the tokenizer. Raises `InvalidRequest`, and `MediaExpired` where
        the media actor does not hold an item any more."""
        if len(self._pads) != len(PADS):
            raise InvalidRequest(f"media: the tokenizer has no {' and '.join(PADS.values())}",
                                 "media")
        facts = [self._facts(key, at) for at, key in enumerate(keys)]
        for kind in MOST_ITEMS:
            count = sum(item.video == (kind == VIDEO) for item in facts)
            if count > (most := item_limit(self._limits, kind)):
                raise InvalidRequest(f"{param}: {count} {kind}s; {most} are allowed "
                                     "(--limit-mm-per-prompt)", param)
        expanded = expand_text(text, facts, self._family, param)
        ids, spans = expand_ids(encode(expanded.text), expanded, self._pads, param)
        return array("i", ids), items_of(keys, facts, spans)

    def _facts(self, key: bytes, at: int) -> MediaFacts:
        try:
            return read_facts(self._folder, key)
        except (OSError, ValueError):
            raise MediaExpired(f"media[{at}]: is not held any more", "media") from None


def open_prompt_media(config: Config, model_path: Path, tokenizer: Tokenizer | None,
                      run_dir: Path | None) -> PromptMedia | None:
    """None if the model takes no images, or without a tokenizer. Raises `BadModel`."""
    if tokenizer is None or run_dir is None or not takes_media(config):
        return None
    return PromptMedia(model_path, config.media, patch_folder(run_dir), tokenizer.token_to_id)


def items_of(keys: Sequence[bytes], facts: Sequence[MediaFacts],
             spans: Sequence[MediaSpan]) -> list[MediaItem]:
    """The items as the scheduler gets them, in the order of the prompt."""
    items = []
    for at, (key, item) in enumerate(zip(keys, facts, strict=True)):
        item_spans = [span for span in spans if span.item == at]
        t, h, w = item.grid
        items.append(MediaItem(key, item.video, t, h, w, item_spans[0].offset,
                               item_spans[-1].offset + item_spans[-1].length, item.seconds))
    return sorted(items, key=lambda item: item.start)


def cut(media: Sequence[MediaItem], dropped: int) -> list[MediaItem]:
    """The items of a prompt without its first tokens. Raises `InvalidRequest` if one is lost."""
    if any(item.start < dropped for item in media):
        raise InvalidRequest("truncate_prompt_tokens: would cut an image or a video off",
                             "truncate_prompt_tokens")
    return [MediaItem(item.key, item.video, item.frames, item.rows, item.columns,
                      item.start - dropped, item.end - dropped, item.seconds) for item in media]
