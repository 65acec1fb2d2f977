"""Which names an HTTP server goes by. A page of another site can reach a server on this machine by
a name of its own that it lets point here (DNS rebinding): then the browser takes both for one site,
and the Host header alone tells.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

MOST_REMEMBERED = 256
MAX_URL, MAX_HEADERS = 8 << 10, 64 << 10
"""Bytes of a request's URL, and of its headers together."""
MAX_HEADER_LINES = 256
NAME = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]")
"""Of the setting."""
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^\x00-\x20\x7f-\xff:\[\]/@?#\\]+)(:[0-9]{0,5})?")


class HttpRefusal(NamedTuple):
    """Why a request is refused."""

    status: int
    message: str
    param: str | None
    code: str | None


def names(setting: str) -> list[str]:
    """Returns the names in `allowed_hosts`. Raises `ValueError`, naming the wrong one."""
    hosts = [host.strip().lower() for host in setting.split(",")]
    for host in hosts:
        if not NAME.fullmatch(host):
            raise ValueError(f"{host!r} is neither a host's name, *.NAME nor *")
    return hosts


def check_size(scope: Mapping[str, Any]) -> HttpRefusal | None:
    """What of the head is more than any request needs."""
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_URL:
        return HttpRefusal(414, f"the URL is longer than {MAX_URL} bytes", None, None)
    headers = scope["headers"]
    if len(headers) > MAX_HEADER_LINES:
        return HttpRefusal(431, f"the headers are more than {MAX_HEADER_LINES}", None, None)
    if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADERS:  # ": ", CR, LF
        return HttpRefusal(431, f"the headers are longer than {MAX_HEADERS} bytes", None, None)
    return None


class AllowedHosts:
    """The host names that one server accepts."""

    def __init__(self, setting: str | None, bound: str, address: str) -> None:
        """setting: `allowed_hosts`; bound: the host that is listened at, as configured; address:
        the same as an address."""
        listed = names(setting) if setting is not None else []
        self._off = "*" in listed or (setting is None and not _is_loopback(address))
        self._names = {bound.lower(), "localhost", *listed}
        self._ends = (".localhost", *(name[1:] for name in listed if name.startswith("*.")))
        self._known: set[tuple[bytes, str]] = set()

    def check(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]
              ) -> HttpRefusal | None:
        """What is wrong with the Host header. Nothing is, over a unix socket."""
        host, at = headers.get(b"host"), scope.get("server") or ("", None)
        if at[1] is None:
            return None
        if host is None:
            return _bad("HTTP/1.1 wants a Host header") if scope["http_version"] == "1.1" else None
        if (host, at[0]) in self._known:
            return None
        match = _HOST.fullmatch(host)
        if match is None:
            return _bad(f"{host[:100].decode('latin-1')!r} is no host")
        name = match[1].decode("ascii").lower().removesuffix(".")
        if not (self._off or name in self._names or name.endswith(self._ends)
                or _is_loopback(name) or name.strip("[]") == at[0]):
            return HttpRefusal(
                403, f"host: {name[:100]!r} is not a name of this server; if it is to be one (a "
                "reverse proxy's, say), start it with --allowed-hosts NAME",
                "host", "host_not_allowed")
        if len(self._known) < MOST_REMEMBERED:
            self._known.add((host, at[0]))
        return None


def check_head(scope: MutableMapping[str, Any], hosts: AllowedHosts | None) -> HttpRefusal | None:
    """What is wrong with a request's head: its size, its Host header, or the framing of the body:
    only `chunked` is known, and only in HTTP/1.1. hosts: None = any name will do."""
    headers = dict(scope["headers"])
    if wrong := check_size(scope):
        return wrong
    if len(scope["headers"]) != len(headers) and sum(
            name == b"host" for name, _ in scope["headers"]) > 1:
        return _bad("there are several Host headers")
    coding = headers.get(b"transfer-encoding")
    if coding is not None and not (coding.lower() == b"chunked" and scope["http_version"] == "1.1"):
        return HttpRefusal(501 if scope["http_version"] == "1.1" else 400,
                           "transfer-encoding: only chunked is taken, and only in HTTP/1.1",
                           "transfer-encoding", "unsupported_framing")
    return None if hosts is None else hosts.check(scope, headers)


def _bad(why: str) -> HttpRefusal:
    return HttpRefusal(400, f"host: {why}", "host", "invalid_host")


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.strip("[]")).is_loopback
    except ValueError:
        return False
