"""Who may call: keys, kept and compared as SHA-256 digests, in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

import msgspec

from actorium.actors.config import GatewayConfig
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.routes import Access, find
from actorium.actors.messages import Tenant

HASHED = "sha256:"
MAX_FILE = 4 << 20


class Keys:
    """Digests of the keys that open the doors, and whose they are."""

    def __init__(self, settings: GatewayConfig) -> None:
        """Raises `BadConfig` on a file that cannot be read."""
        self._known: dict[bytes, str] = {}
        if settings.api_keys_file is not None:
            self._known |= read(Path(settings.api_keys_file))
        if settings.api_key:
            self._known[_digest(settings.api_key.encode())] = ""
        self._locked = bool(self._known)
        self._admin = _digest(settings.admin_key.encode()) if settings.admin_key else None

    def check(self, path: str, authorization: bytes) -> str:
        """The caller's tenant. Raises `HttpError` 401 unless the header has a key that the path
        takes."""
        access = find(path).access
        admin = access is Access.ADMIN and self._admin is not None
        if access is Access.OPEN or not (self._locked or admin):
            return ""
        kind, _, given = authorization.partition(b" ")
        digest = _digest(given.strip())
        tenant = None
        # All of them are compared, whichever fits.
        for known, name in () if admin else self._known.items():
            if hmac.compare_digest(digest, known):
                tenant = name
        if self._admin is not None and hmac.compare_digest(digest, self._admin):
            tenant = ""
        if tenant is None or kind.lower() != b"bearer":
            raise HttpError(401, "the Authorization header must be `Bearer` and a valid API key",
                            None, "authentication_error", "invalid_api_key")
        return tenant

    def is_admin(self, authorization: bytes) -> bool:
        """The header has the administrator's key."""
        digest = _digest(authorization.partition(b" ")[2].strip())
        return self._admin is not None and hmac.compare_digest(digest, self._admin)


def shown(headers: Mapping[bytes, bytes]) -> bytes:
    """What a caller shows: the Authorization header, else the key as Anthropic's clients send it.
    """
    found, other = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
    return found or (b"Bearer " + other if other else b"")


def read(path: Path) -> dict[bytes, str]:
    """Digest -> name of the keys in a file. Raises `BadConfig`, which does not tell any key."""
    try:
        text = path.read_bytes()[:MAX_FILE].decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _bad(f"{path}: {why}") from None
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise _bad(f"{path}, line {number}: must be a name and a key")
        try:
            found[_key(words[1])] = msgspec.convert(words[0], Tenant)
        except (ValueError, msgspec.ValidationError):
            raise _bad(f"{path}, line {number}: a name has at most 64 ASCII characters, what "
                       f"follows {HASHED} 64 hexadecimal ones") from None
    if not found:
        raise _bad(f"{path}: there is no key in it")
    return found


def _key(word: str) -> bytes:
    if not word.startswith(HASHED):
        return _digest(word.encode())
    digest = bytes.fromhex(word.removeprefix(HASHED))
    if len(digest) != 32:
        raise ValueError
    return digest


def _bad(what: str) -> BadConfig:
    return BadConfig(f"api_keys_file: {what}", "gateway.api_keys_file")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
