"""A prompt as token ids, with its images and videos."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from actorium.actors.errors import InvalidRequest
from actorium.actors.media.prompt_media import cut
from actorium.actors.messages import Generate, MediaItem, Tokenize, TurnPart
from actorium.actors.tokenizer.text_model import TextModel


class EncodedPrompt(NamedTuple):
    """A prompt as the scheduler takes it."""

    ids: array[int]
    media: list[MediaItem]
    """Its images and videos, in order."""

    def last(self, keep: int | None) -> EncodedPrompt:
        """The same of its last tokens; None = all. Raises `InvalidRequest` where an image would
        go."""
        dropped = 0 if keep is None else max(0, len(self.ids) - keep)
        if not dropped:
            return self
        return EncodedPrompt(self.ids[dropped:], cut(self.media, dropped))


def encoded(model: TextModel, message: Generate | Tokenize, text: str, special: bool, field: str,
            limit: int | None = None) -> EncodedPrompt:
    """The ids of a text, with the placeholders of the message's media. special, limit: as of
    `TextModel.encode`. Raises `InvalidRequest`, `ContextOverflow`, `MediaGone`."""
    media = model.media
    if message.media:
        if media is None:
            raise InvalidRequest("media: the model takes text alone", "media")
        return EncodedPrompt(*media.expand(
            text, message.media, lambda one: model.encode(one, special, field, limit), field))
    ids = model.encode(text, special, field, limit)
    if media is not None and isinstance(message, Generate):
        media.check_none(ids, field)
    return EncodedPrompt(ids, [])


def of_tokens(model: TextModel, message: Generate, tokens: bytes) -> EncodedPrompt:
    """The prompt of a message that has tokens. Raises `InvalidRequest`."""
    if message.media:
        raise InvalidRequest("media: with messages or text, not with token ids", "media")
    ids = model.ids(tokens, "prompt", check=False)
    if model.media is not None:
        model.media.check_none(ids, "prompt")
    return EncodedPrompt(ids, [])


def chars_of(content: str | list[TurnPart]) -> int:
    """Characters of a turn's text."""
    return len(content) if isinstance(content, str) else sum(len(one.text) for one in content)
