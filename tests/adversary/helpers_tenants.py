"""An engine with several tenants, and HTTP by hand: what no client's library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from helpers_served import Served, serving

ANN, BOB, ADMIN = "sk-ann-5e1f", "sk-bob-77c0", "sk-root-d41a"
"""Keys of two tenants and the administrator's."""
CANARY = "xyzzy-of-ann-31d8"
"""In ann's prompts, and nowhere else."""
Headers = Sequence[tuple[str, str | bytes]]


class Answer(NamedTuple):
    """Of one request."""

    status: int
    head: bytes
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def key_file(where: Path) -> str:
    path = where / "keys"
    path.write_text(f"ann {ANN}\nbob {BOB}\n")
    path.chmod(0o600)
    return str(path)


@contextmanager
def tenants(where: Path, **config: Any) -> Iterator[Served]:
    """An engine without a model, for ann, bob and an administrator."""
    with serving(**{"null_worker": True, "max_num_seqs": 8, "api_keys_file": key_file(where),
                    "admin_key": ADMIN, "crash_reports": False} | config) as served:
        yield served


def bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


def packed(method: str, target: str | bytes, headers: Headers = (), body: Any = None) -> bytes:
    """The bytes of a request, after which the server closes the connection."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [b"%b %b HTTP/1.1" % (method.encode(), _bytes(target)), b"Host: localhost",
             b"Content-Length: %d" % len(data)]
    if "connection" not in {name.lower() for name, _ in headers}:
        lines.append(b"Connection: close")
    lines += [b"%b: %b" % (name.encode(), _bytes(value)) for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + data


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def raw(served: Served, data: bytes) -> bytes:
    """All that comes back. What the server closes early is no error."""
    with socket.create_connection((served.host, served.port), timeout=60) as connection:
        found = b""
        try:
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                found += part
        except (BrokenPipeError, ConnectionResetError):
            pass
        return found


def first_of(served: Served, data: bytes) -> bytes:
    """What comes first: of a connection that may stay open."""
    with socket.create_connection((served.host, served.port), timeout=60) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


def parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    return Answer(status, head, body)


def _unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found, data = found + data[:int(size, 16)], data[int(size, 16) + 2:]
    return found


def ask(served: Served, method: str, target: str | bytes, key: str = "", body: Any = None,
        headers: Headers = ()) -> Answer:
    """One request, of whoever has the key."""
    shown = (bearer(key),) if key else ()
    return parsed(raw(served, packed(method, target, (*shown, *headers), body)))


def completion(served: Served, key: str, *headers: tuple[str, str], **more: Any) -> Answer:
    return ask(served, "POST", "/v1/completions", key,
               {"prompt": f"{CANARY} " * 30, "max_tokens": 4, "ignore_eos": True} | more, headers)
