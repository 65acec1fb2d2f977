"""Keys as their SHA-256 digests: what is written down of one, and what is compared."""

from __future__ import annotations

import hashlib
import re

HASHED = "sha256:"
"""Before the digest of a key that is given so, in hexadecimal."""
_WHOLE = re.compile(HASHED + "[0-9a-fA-F]{64}")


def digest_of(key: str) -> bytes:
    """The digest of a key; of one that is given as its digest that itself."""
    if _WHOLE.fullmatch(key):
        return bytes.fromhex(key.removeprefix(HASHED))
    return hashlib.sha256(key.encode()).digest()


def hashed(key: str) -> str:
    """The key, given as its digest."""
    return HASHED + digest_of(key).hex()
