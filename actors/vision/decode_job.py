"""A decoder's turn: one job of the media actor's, in a process that the file may end."""

from __future__ import annotations

from actorium.actors.errors import InvalidRequest
from actorium.actors.vision.media_input import load_media
from actorium.actors.vision.media_process import MediaDecoder
from actorium.actors.vision.vision_messages import DecodedItem, DecodeMedia


def run_job(decoder: MediaDecoder, message: DecodeMedia) -> DecodedItem:
    """Decodes an item, waits, and answers in any case. For a thread with a decoder of its own;
    `decoder.close()` from another thread stops it."""
    source = message.source
    try:
        item = load_media(decoder, source.files, source.kind, message.processing, source.param)
    except InvalidRequest as error:
        return DecodedItem(message.job, error=error.message)
    except (OSError, ValueError) as error:  # no process to be had, or it was closed meanwhile
        return DecodedItem(message.job, error=f": cannot be decoded: {error}")
    return DecodedItem(message.job, item)
