"""Keys of engines that listen on tcp: one pair of the server, and which clients are let in.

    <keys_dir>/server.key   the server's pair, JSON, 0600
    <keys_dir>/clients      one line for each client that is let in: "NAME PUBLIC_KEY"
    NAME.key                what a client needs: its own pair and the server's public key

Keys are curve25519, written as Z85 (40 characters). Only the standard library, msgspec and, to make
keys, pyzmq are imported: the client SDK reads its key with this.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import private_paths
from actorium.actors.runtime.security.private_paths import UnsafePath

LOG = logging.getLogger("actorium.gate")
SERVER_KEY = "server.key"
CLIENTS = "clients"
Z85_CHARS = 40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A key file."""

    public: str
    secret: str
    server: str = ""
    """The server's public key, in a client's file."""

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def directory(keys_dir: str | None = None) -> Path:
    """Where keys lie: `keys_dir`, else $XDG_CONFIG_HOME/actorium/keys, else under ~/.config."""
    if keys_dir:
        return Path(keys_dir).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "actorium" / "keys"


# --- making --------------------------------------------------------------------------------------

def make_server(where: Path, replace: bool = False) -> KeyPair:
    """Make the server's pair. Raises `BadConfig` if there is one, unless `replace`."""
    with _locked(where):
        path = where / SERVER_KEY
        if path.exists() and not replace:
            raise BadConfig(f"{path} exists; with --replace every client needs a new key", "keys")
        pair = _fresh()
        write_pair(path, pair, replace=True)
    return pair


def make_client(where: Path, name: str, out: Path, server: str = "") -> KeyPair:
    """Make a client's key file and let it in; with `server` (a public key), for the keeper of that
    server to let in. Raises `BadConfig` on a bad name, or if the file or the client exists."""
    check_name(name)
    if server:
        check_public(server)
    elif name in clients(where):
        raise BadConfig(f"a client named {name!r} is let in already: revoke it first", "name")
    pair = _fresh(server or read_server(where).public)
    write_pair(out, pair)
    if not server:
        authorise(where, name, pair.public)
    return pair


def _fresh(server: str = "") -> KeyPair:
    import zmq

    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode(), server)


def write_pair(path: Path, pair: KeyPair, replace: bool = False) -> None:
    """Write a key file, 0600. Raises `BadConfig` if it cannot, or if there is one."""
    if not replace and path.exists():
        raise BadConfig(f"{path} exists already", "out")
    _write(path, msgspec.json.encode(pair) + b"\n")


def _write(path: Path, data: bytes) -> None:
    """Replace a file as a whole, so that no reader sees half of it."""
    new = path.with_name(f".{path.name}.new")
    try:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(new, path)
    except OSError as error:
        raise BadConfig(f"cannot write {path}: {error.strerror}", "keys") from None


@contextlib.contextmanager
def _locked(where: Path) -> Iterator[None]:
    try:
        for each in (*reversed(where.parents), where):  # whatever the umask
            if not each.is_dir():
                each.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BadConfig(f"cannot use {where}: {error.strerror}", "keys_dir") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# --- reading -------------------------------------------------------------------------------------

def read_server(where: Path) -> KeyPair:
    """The server's pair. Raises `BadConfig` if there is none, or if others can read it."""
    path = where / SERVER_KEY
    if not path.exists():
        raise BadConfig(f"no server key in {where}: make one with `actorium keys server`", "keys")
    return read_pair(path)


def read_pair(path: str | os.PathLike[str]) -> KeyPair:
    """A key file. Raises `BadConfig` naming it."""
    try:
        data = private_paths.read_trusted(Path(path), 4096)
        mode = os.stat(path).st_mode
        pair = msgspec.json.decode(data, type=KeyPair)
    except UnsafePath as error:
        raise BadConfig(f"key: {error}", "key") from None
    except OSError as error:
        raise BadConfig(f"key: cannot read {os.fspath(path)}: {error.strerror}", "key") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadConfig(f"key: {os.fspath(path)} is no key file", "key") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadConfig(f"key: others can read {os.fspath(path)}: chmod 600 it", "key")
    for key in (pair.public, pair.secret, pair.server or pair.public):
        if not _KEY.fullmatch(key):
            raise BadConfig(f"key: {os.fspath(path)} is no key file", "key")
    return pair


def check_name(name: str) -> None:
    """Raises `BadConfig` unless this can be the name of a client."""
    if not _NAME.fullmatch(name):
        raise BadConfig(f"{name!r} is no name for a client: up to 64 letters, digits, '.', '_', "
                        "'-', '@', a letter or digit first", "name")


def identity(name: str, connection: bytes) -> bytes:
    """The ROUTER identity of a peer that says whose key it has. connection: tells its connections
    apart, at most 128 bytes. A socket that checks it (`curve_gate.misnamed`) refuses any other
    name."""
    return b"%s/%s" % (name.encode(), connection)


def claimed(identity: bytes) -> str:
    """Whose key a peer says it has; empty = it does not say."""
    name, slash, _ = identity.partition(b"/")
    return name.decode("ascii", "replace") if slash else ""


def check_public(key: str) -> None:
    """Raises `BadConfig` unless this can be a public key."""
    if not _KEY.fullmatch(key):
        raise BadConfig(f"{key[:60]!r} is no public key ({Z85_CHARS} characters of Z85)", "key")


# --- who is let in -------------------------------------------------------------------------------

def clients(where: Path) -> dict[str, str]:
    """Name -> public key of every client that is let in. Lines that make no sense let nobody in."""
    try:
        text = private_paths.read_trusted(where / CLIENTS).decode("ascii", "replace")
    except FileNotFoundError:
        return {}
    except UnsafePath as error:
        raise BadConfig(f"keys_dir: {error}", "keys_dir") from None
    except OSError as error:
        raise BadConfig(f"cannot read {where / CLIENTS}: {error.strerror}", "keys_dir") from None
    lines = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in lines
            if len(words) == 2 and _NAME.fullmatch(words[0]) and _KEY.fullmatch(words[1])}


def authorise(where: Path, name: str, public: str) -> None:
    """Let a client in from now on. Raises `BadConfig` on a bad name or key, or a name in use."""
    check_name(name)
    check_public(public)
    with _locked(where):
        known = clients(where)
        if known.get(name, public) != public:
            raise BadConfig(f"a client named {name!r} is let in already: revoke it first", "name")
        _write_clients(where, known | {name: public})


def revoke(where: Path, name: str) -> None:
    """Refuse a client from its next connection on. Raises `BadConfig` if nobody is called so."""
    with _locked(where):
        known = clients(where)
        if name not in known:
            raise BadConfig(f"no client named {name!r}", "name")
        del known[name]
        _write_clients(where, known)


def _write_clients(where: Path, known: dict[str, str]) -> None:
    _write(where / CLIENTS, "".join(f"{n} {k}\n" for n, k in sorted(known.items())).encode())


class AllowList:
    """The clients that are let in, as of now: the file is read again when it has changed."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._seen: tuple[int, ...] = ()
        self._names: dict[str, str] = {}

    def name_of(self, public: str) -> str | None:
        """Returns the owner of this public key; None = not on the list."""
        try:
            info = os.stat(self._where / CLIENTS)
            look: tuple[int, ...] = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_size,
                                     os.stat(self._where).st_ctime_ns)
        except OSError:
            look = ()
        if look != self._seen:
            self._names, self._seen = {}, look
            try:
                self._names = {key: name for name, key in clients(self._where).items()}
            except BadConfig as error:
                LOG.warning("no client is let in: %s", error.message)
        return self._names.get(public)
