"""The tokenizer's side of images and videos: their placeholders in a prompt, and what the scheduler
is told of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.config.media_settings import MOST_ITEMS, MediaConfig, item_limit
from actorium.actors.config.tree import Config
from actorium.actors.errors import InvalidRequest, MediaGone
from actorium.actors.messages import MediaItem
from actorium.actors.models.media_models import takes_media
from actorium.actors.vision.patch_store import MediaFacts, patch_folder, read_facts
from actorium.actors.vision.placeholders import (
    IMAGE,
    PADS,
    VIDEO,
    MediaGrid,
    MediaSpan,
    expand_ids,
    expand_text,
)
from actorium.actors.vision.processor_config import read_processing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Encode = Callable[[str], Sequence[int]]


class PromptMedia:
    """Puts items into the prompts of one model."""

    def __init__(self, model_path: Path, limits: MediaConfig, folder: Path,
                 id_of: Callable[[str], int | None]) -> None:
        """folder: of the patches; id_of: the tokenizer's id of a token. Raises `BadModel`."""
        self._family = read_processing(model_path).video.family
        self._limits, self._folder = limits, folder
        found = [id_of(pad) for pad in PADS.values()]
        self._pads = [pad for pad in found if pad is not None]

    def info(self) -> dict[str, Any]:
        """For clients: how many items of a kind a request may have."""
        return {kind: item_limit(self._limits, kind) for kind in MOST_ITEMS}

    def check_none(self, ids: array[int], param: str) -> None:
        """Raises `InvalidRequest` where a prompt without media has placeholders."""
        for pad in self._pads:
            if pad in ids:
                raise InvalidRequest(f"{param}: the prompt has placeholders of images or videos "
                                     f"(token {pad}), and no media", param)

    def expand(self, text: str, keys: Sequence[bytes], encode: Encode, param: str
               ) -> tuple[array[int], list[MediaItem]]:
        """(ids of a prompt with the placeholders of its items, where these are). text: with one pad
        for each item; encode: of the tokenizer. Raises `InvalidRequest`, and `MediaGone` where the
        media actor does not hold an item any more."""
        if len(self._pads) != len(PADS):
            raise InvalidRequest(f"media: the tokenizer has no {' and '.join(PADS.values())}",
                                 "media")
        facts = [self._facts(key, at) for at, key in enumerate(keys)]
        for kind in MOST_ITEMS:
            count = sum(one.video == (kind == VIDEO) for one in facts)
            if count > (most := item_limit(self._limits, kind)):
                raise InvalidRequest(f"{param}: {count} {kind}s; {most} are allowed "
                                     "(--limit-mm-per-prompt)", param)
        grids = [MediaGrid(VIDEO if one.video else IMAGE, one.grid, one.merge_size, one.timestamps)
                 for one in facts]
        expanded = expand_text(text, grids, self._family, param)
        ids, spans = expand_ids(encode(expanded.text), expanded, self._pads, param)
        return array("i", ids), items_of(keys, facts, spans)

    def _facts(self, key: bytes, at: int) -> MediaFacts:
        try:
            return read_facts(self._folder, key)
        except (OSError, ValueError):
            raise MediaGone(f"media[{at}]: is not held any more", "media") from None


def open_prompt_media(config: Config, model_path: Path, tokenizer: Tokenizer | None,
                      run_dir: Path | None) -> PromptMedia | None:
    """Of an engine whose model takes images; None of any other, and without a tokenizer. Raises
    `BadModel`."""
    if tokenizer is None or run_dir is None or not takes_media(config):
        return None
    return PromptMedia(model_path, config.media, patch_folder(run_dir), tokenizer.token_to_id)


def items_of(keys: Sequence[bytes], facts: Sequence[MediaFacts],
             spans: Sequence[MediaSpan]) -> list[MediaItem]:
    """What the scheduler is told, in the order of the prompt."""
    found = []
    for at, (key, one) in enumerate(zip(keys, facts, strict=True)):
        own = [span for span in spans if span.item == at]
        t, h, w = one.grid
        found.append(MediaItem(key, one.video, t, h, w, own[0].offset,
                               own[-1].offset + own[-1].length, one.seconds))
    return sorted(found, key=lambda item: item.start)


def cut(media: Sequence[MediaItem], dropped: int) -> list[MediaItem]:
    """The items of a prompt that loses its first tokens. Raises `InvalidRequest` where one would go
    with them."""
    if any(item.start < dropped for item in media):
        raise InvalidRequest("truncate_prompt_tokens: would cut an image or a video off",
                             "truncate_prompt_tokens")
    return [MediaItem(item.key, item.video, item.frames, item.rows, item.columns,
                      item.start - dropped, item.end - dropped, item.seconds) for item in media]
