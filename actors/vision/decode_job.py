"""A decoder's turn: one job of the media actor's, in a process that the file may end."""

from __future__ import annotations

import errno
import hmac
from pathlib import Path

from actorium.actors.errors import InvalidRequest
from actorium.actors.vision.media_input import MediaInput, load_media
from actorium.actors.vision.media_process import MediaDecoder
from actorium.actors.vision.patch_store import MediaFacts, write_new
from actorium.actors.vision.placeholders import VIDEO
from actorium.actors.vision.vision_messages import DecodeMedia, StoredItem

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def run_job(decoder: MediaDecoder, message: DecodeMedia, folder: Path, secret: bytes,
            most: int) -> StoredItem:
    """Decodes an item, writes its patches under the job's name, waits, and answers in any case. For
    a thread with a decoder of its own; `decoder.close()` from another thread stops it.

    secret: what keys are made with, so that nobody knows one of an item that he has not sent. most:
    bytes that an item's patches may have."""
    source = message.source
    try:
        item = load_media(decoder, source.files, source.kind, message.processing, "", most)
        facts = facts_of(item)
        write_new(folder, message.job, item.rows, facts)
    except InvalidRequest as error:
        return StoredItem(message.job, error=error.message)
    except (OSError, ValueError) as error:  # no process to be had, or it was closed meanwhile
        return StoredItem(message.job, error=f": cannot be decoded: {error}",
                          full=isinstance(error, OSError) and error.errno in NO_ROOM)
    return StoredItem(message.job, hmac.digest(secret, item.key, "sha256"), facts)


def facts_of(item: MediaInput) -> MediaFacts:
    """What is told of an item."""
    return MediaFacts(item.grid.kind == VIDEO, item.grid.grid, item.grid.merge_size,
                      item.rows.shape[1], item.seconds_per_patch, item.grid.timestamps)
