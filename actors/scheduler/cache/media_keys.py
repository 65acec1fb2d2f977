"""What prompts with images and videos have of the prefix cache: pages are shared where both tokens
and images are the same, and not before it is known that the images were there.

A placeholder's id says nothing about its image. So in the key of a prefix the ids of a page that
holds placeholders give way to a hash of them and of the items they stand for. All that a page holds
follows from it and from the pages before: which rows of an item are in it depends on the tokens
between the item's beginning and its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from actorium.actors.messages import MediaItem

TOKEN = 4
"""Bytes of an id."""
HASHED = 0x80
"""In the last byte of a page's first id: no id has it, so that no text's page equals an image's."""
ALL = 2**31 - 1


def media_key(tokens: bytes, media: Sequence[MediaItem], page_size: int) -> bytes:
    """The bytes of a `PrefixKey`. tokens: i4[n], of a sequence whose prompt has these items.

    Of a page of p tokens 32 p - 1 bits are hashed, 255 at most.
    """
    size, data = page_size * TOKEN, bytearray(tokens)
    for page in sorted({page for item in media
                        for page in range(item.start // page_size, -(-item.end // page_size))}):
        first, at = page * page_size, page * size
        if at + size > len(data):
            break  # no whole page: nobody shares it
        digest = sha256(data[at:at + size])
        for item in media:
            if item.start < first + page_size and item.end > first:
                about = f"{item.start - first} {item.video} {item.seconds}"
                digest.update(item.key + about.encode())
        own = bytearray((digest.digest() * -(-size // digest.digest_size))[:size])
        own[TOKEN - 1] |= HASHED
        data[at:at + size] = own
    return bytes(data)


def shareable(media: Sequence[MediaItem], computed: int) -> int:
    """Tokens whose pages may be shared when so many are known to be computed of their own images:
    those, and text up to the next item."""
    return next((max(item.start, computed) for item in media if item.end > computed), ALL)
