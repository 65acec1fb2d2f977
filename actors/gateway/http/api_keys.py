"""Who may call: keys, kept and compared as SHA-256 digests, in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from actorium.actors.config.parsed_values import HASHED, digest_of
from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.routes import Access, find
from actorium.actors.messages import Tenant
from actorium.actors.runtime.security import private_paths
from actorium.actors.runtime.security.private_paths import UnsafePath

NOBODYS = bytes(32)
"""A digest that no key has."""
MAX_FILE = 4 << 20
HEADERS = {b"authorization": "Authorization", b"x-api-key": "x-api-key"}
"""Headers that may have a key; the first one present counts."""


class Keys:
    """Digests of the accepted keys, and their owners' names."""

    def __init__(self, settings: GatewayConfig) -> None:
        """Raises `BadConfig` on a file that cannot be read."""
        self._known = known(settings)
        self._locked = bool(self._known)
        admin = settings.admin_key
        self._admin = digest_of(admin) if admin is not None else None

    def guard(self, path: str) -> bool:
        """Returns whether the path requires a key."""
        access = find(path).access
        return access is not Access.OPEN and (
            self._locked or (access is Access.ADMIN and self._admin is not None))

    def check(self, path: str, authorization: bytes) -> str:
        """Returns the caller's tenant. Raises `HttpError` 401 unless the header has a key that the
        path accepts."""
        if not self.guard(path):
            return ""
        admin = find(path).access is Access.ADMIN and self._admin is not None
        digest = _shown_digest(authorization)
        tenant = None
        # Always compares all of them, so that the time does not show which one matched.
        for known, name in () if admin else self._known.items():
            if hmac.compare_digest(digest, known):
                tenant = name
        if self._admin is not None and hmac.compare_digest(digest, self._admin):
            tenant = ""
        if tenant is None:
            raise HttpError(401, "the Authorization header must be `Bearer` and a valid API key",
                            None, "authentication_error", "invalid_api_key")
        return tenant

    def is_admin(self, authorization: bytes) -> bool:
        """True if the header has the administrator's key."""
        return self._admin is not None and hmac.compare_digest(_shown_digest(authorization),
                                                               self._admin)


def shown(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the caller's credentials: the Authorization header, else the key as Anthropic's
    clients send it. Raises `HttpError` 400 where one of them comes twice: a proxy may have checked
    the other one."""
    credentials = {}
    for name, value in headers:
        if name in HEADERS:
            if name in credentials:
                raise HttpError(400, f"{HEADERS[name]}: must not be given twice", HEADERS[name])
            credentials[name] = value
    first, other = (credentials.get(name, b"") for name in HEADERS)
    return first or (b"Bearer " + other if other else b"")


def known(settings: GatewayConfig) -> dict[bytes, str]:
    """Returns digest -> name for all keys of ordinary callers. Raises `BadConfig`, which contains
    no key."""
    keys = read(Path(settings.api_keys_file)) if settings.api_keys_file is not None else {}
    one, admin = (digest_of(key) if key is not None else None
                  for key in (settings.api_key, settings.admin_key))
    if one in keys:
        raise _bad(f"{settings.api_keys_file}: has the key that is api_key, too")
    if admin in keys:
        raise _bad(f"{settings.api_keys_file}: has the key that is admin_key, too")
    return keys if one is None else keys | {one: ""}


def read(path: Path) -> dict[bytes, str]:
    """Returns digest -> name for the keys in a file. Raises `BadConfig`, which contains no key."""
    try:
        data = private_paths.read_trusted(path, MAX_FILE + 1)
        text = data.decode("utf-8-sig")
    except UnsafePath as error:
        raise _bad(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _bad(f"{path}: {why}") from None
    if len(data) > MAX_FILE:  # cut off, its last line would be a different key
        raise _bad(f"{path}: is larger than {MAX_FILE} bytes")
    keys: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise _bad(f"{path}, line {number}: must be a name and a key")
        try:
            key, name = _key(words[1]), msgspec.convert(words[0], Tenant)
        except (ValueError, msgspec.ValidationError):
            raise _bad(f"{path}, line {number}: a name has at most 64 ASCII characters, what "
                       f"follows {HASHED} 64 hexadecimal ones") from None
        if keys.setdefault(key, name) != name:
            raise _bad(f"{path}, line {number}: {keys[key]!r} has this key already")
    if not keys:
        raise _bad(f"{path}: there is no key in it")
    return keys


def _key(word: str) -> bytes:
    if word.startswith(HASHED) and len(bytes.fromhex(word.removeprefix(HASHED))) != 32:
        raise ValueError
    return digest_of(word)


def _bad(what: str) -> BadConfig:
    return BadConfig(f"api_keys_file: {what}", "gateway.api_keys_file")


def _shown_digest(authorization: bytes) -> bytes:
    """Returns the digest of the header's key; one that matches none where the scheme is another."""
    kind, _, given = authorization.partition(b" ")
    return sha256(given.strip()).digest() if kind.lower() == b"bearer" else NOBODYS
