"""Names of prefixes: a number for each whole page of tokens, and all that is before it.

The number of page i is a sum over the pages up to i of a mixed hash of the page's tokens and its
place (splitmix64, Steele et al. 2014), so that numbers of a longer prefix continue those of a
shorter one, and all of them are made by a few operations on arrays. Two different prefixes share a
number once in 2**64: then a request is routed to where less is cached than was thought.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from actorium.actors.runtime.splitmix64 import FIRST_FACTOR, GOLDEN_GAMMA, SECOND_FACTOR

Hashes = NDArray[np.uint64]
_GAMMA, _FIRST, _SECOND = map(np.uint64, (GOLDEN_GAMMA, FIRST_FACTOR, SECOND_FACTOR))
_BASE = np.uint64(0x9FB21C651E98DF25)
"""Odd; its powers weigh the tokens of a page."""


def root_hash(salt: str) -> int:
    """What the numbers of a salt's prefixes are added to: caches share nothing between salts."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


def prefix_hashes(data: bytes, page_size: int, before: int, first: int = 0) -> Hashes:
    """Numbers of the whole pages of `data`, token ids as little-endian i4: u8[n].

    before: the number of the page before them, or the `root_hash`; first: the place of the first
    one, in pages from the root.
    """
    count = len(data) // (4 * page_size)
    tokens = np.frombuffer(data, "<u4", count * page_size).reshape(count, page_size)
    weights = np.cumprod(np.full(page_size, _BASE))
    pages = (tokens.astype(np.uint64) + np.uint64(1)) @ weights
    places = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    sums: Hashes = np.cumsum(_mixed(pages + places * _GAMMA), dtype=np.uint64) + np.uint64(before)
    return sums


def _mixed(z: Hashes) -> Hashes:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed
