"""Fetches the media that a request names: data:, http(s): and file: URLs.

A server must be allowed by name, and every address that its name has must be public; the connection
goes to an address that has been checked, so that a name which changes its address in between gains
nothing. Redirects are followed under the same rules. One time limit is over everything, and what
is read is counted as it comes. Requests carry no credentials; proxies of the environment are not
asked, since an address that a proxy resolves has not been checked.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest, shown
from actorium.actors.media.decoding import TYPES, check_bytes, sniffed

NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052)."""
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""Of IPv6 all that is given to networks of the internet (RFC 4291)."""
NOT_PUBLIC = tuple(map(ipaddress.ip_network, (
    "168.63.129.16/32",  # Azure's platform, as each of its machines sees it
    "192.0.0.0/24",  # protocol assignments, RFC 6890; metadata of a cloud at .192
    "192.88.99.0/24",  # relays of 6to4, which are no more, RFC 7526
    "3fff::/20")))  # documentation, RFC 9637
"""Ranges that `ipaddress` takes for global, in one version of Python or all."""
ISATAP = (0x5EFE, 0x2005EFE)
"""The third quarter of an IPv6 address whose last one is an IPv4 address (RFC 5214)."""
LONGEST_HEAD = 200
"""Characters before the comma of a data: URL."""
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) -> its addresses. Raises `OSError`."""
Connect: TypeAlias = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""As `asyncio.open_connection`."""
LONGEST_URL = 8192
LONGEST_HEADERS = 64 << 10
READ = 64 << 10
REDIRECTS = (301, 302, 303, 307, 308)
_CHARACTERS = re.compile(r"[!-\[\]^-~]+")
"""What a URL may have: printable ASCII without the backslash, which readers disagree about."""
_NAME = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")


def is_allowed_host(host: str, allowed: Iterable[str]) -> bool:
    """Whether a host is one of the names: `images.example` is that host alone, as in vLLM,
    `*.example` any below it, `*` any."""
    host = host.lower().rstrip(".")
    return any(name == "*" or host == name or name.startswith("*.") and host.endswith(name[1:])
               for name in (name.lower().rstrip(".") for name in allowed))


def is_public(address: str) -> bool:
    """Whether an address is one of the internet at large: not of this machine, a private or local
    network, a group, or a reserved range; nor an IPv6 form of such an IPv4 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip not in GLOBAL_UNICAST:
            return False
        isatap = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) \
            if int(ip) >> 32 & 0xFFFFFFFF in ISATAP else None
        inner = (isatap, ip.sixtofour, *(ip.teredo or ()))
        if not all(is_public(str(each)) for each in inner if each is not None):
            return False
    if any(ip in network for network in NOT_PUBLIC):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_loopback
                                    or ip.is_link_local or ip.is_unspecified)


def read_data_url(url: str, limits: MediaConfig, param: str) -> bytes:
    """The bytes of `data:image/png;base64,...`. The type must be one that is read, or left out, and
    be what the bytes are; base64 is taken as RFC 4648 has it, without spaces and with its padding.
    Raises `InvalidRequest` that names `param`."""
    head, comma, body = url[len("data:"):].partition(",")
    if not comma or len(head) > LONGEST_HEAD:
        raise InvalidRequest(f"{param}: is no data: URL (data:image/png;base64,...)", param)
    declared, *options = head.lower().split(";")
    if not options or options[-1].strip() != "base64":
        raise InvalidRequest(f"{param}: a data: URL must be in base64 (data:image/png;base64,...)",
                             param)
    if declared and declared not in TYPES:
        raise InvalidRequest(f"{param}: has type {shown(declared)}; known are {', '.join(TYPES)}",
                             param)
    check_bytes(len(body) // 4 * 3 - body[-2:].count("="), limits, param)
    try:
        data = base64.b64decode(body, validate=True)
        canonical = base64.b64encode(base64.b64decode(body[-4:])).decode() == body[-4:]
    except (binascii.Error, ValueError):
        canonical = False
    if not canonical:
        raise InvalidRequest(f"{param}: is no valid base64", param)
    kind = sniffed(data)
    if declared and TYPES[declared] != kind:
        raise InvalidRequest(f"{param}: is declared as {declared} and is "
                             f"{kind or 'nothing that is known'}", param)
    return data


def read_local(url: str, limits: MediaConfig, param: str) -> bytes:
    """The bytes of a regular file below `allowed_local_media_path`, once all symbolic links are
    followed. Raises `InvalidRequest`, with the same words for what lies outside and for what is not
    there. Reads the disk."""
    root = limits.allowed_local_media_path
    if root is None:
        raise InvalidRequest(f"{param}: files are not read (--allowed-local-media-path)", param)
    refused = InvalidRequest(f"{param}: is no file below the folder that "
                             "--allowed-local-media-path names", param)
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
        if parts.netloc not in ("", "localhost") or "\0" in path or parts.query or parts.fragment:
            raise refused
        base, real = Path(root).resolve(strict=True), Path(path).resolve(strict=True)
        if not real.is_relative_to(base):
            raise refused
        # Between the check and the opening a link may be put there: what has been opened counts.
        file = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    opened = Path(os.readlink(f"/proc/self/fd/{file}"))
    if not stat.S_ISREG(os.fstat(file).st_mode) or not opened.is_relative_to(base):
        os.close(file)
        raise refused
    with os.fdopen(file, "rb") as source:
        data = source.read(limits.max_media_bytes + 1)
    check_bytes(len(data), limits, param)
    return data


class MediaUrl(NamedTuple):
    """An http(s) URL in its parts."""

    secure: bool
    host: str
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def parse_url(url: str, param: str) -> MediaUrl:
    """Raises `InvalidRequest` for what is not plainly an http(s) URL."""
    try:
        if len(url) > LONGEST_URL or not _CHARACTERS.fullmatch(url):
            raise ValueError
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
        if (parts.scheme not in ("http", "https") or "@" in parts.netloc
                or not _NAME.fullmatch(host)):
            raise ValueError
    except ValueError:
        raise InvalidRequest(f"{param}: must be a data:, http: or https: URL in ASCII, of at most "
                             f"{LONGEST_URL} characters, without a user's name, got {shown(url)}",
                             param) from None
    secure = parts.scheme == "https"
    return MediaUrl(secure, host, (443 if secure else 80) if port is None else port,
                    (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


async def resolve_host(host: str, port: int) -> list[str]:
    """The system's answer."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


class MediaFetcher:
    """Fetches under the rules of a configuration. For one event loop."""

    def __init__(self, limits: MediaConfig, resolve: Resolve = resolve_host,
                 connect: Connect = asyncio.open_connection) -> None:
        self._limits, self._resolve, self._connect = limits, resolve, connect
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, param: str) -> bytes:
        """A URL's bytes, at most `max_media_bytes`. Raises `InvalidRequest` that names `param`."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(url, self._limits, param)
        if scheme == "file":
            return await asyncio.to_thread(read_local, url, self._limits, param)
        try:
            async with asyncio.timeout(self._limits.media_timeout):
                return await self._follow(url, param)
        except TimeoutError:
            raise InvalidRequest(f"{param}: took more than {self._limits.media_timeout:g} s to "
                                 "fetch (--media-timeout)", param) from None
        except ssl.SSLError as error:
            raise InvalidRequest(f"{param}: cannot be fetched: TLS: {shown(error.reason)}",
                                 param) from None
        except OSError as error:
            raise InvalidRequest(f"{param}: cannot be fetched: "
                                 f"{error.strerror or type(error).__name__}", param) from None

    async def _follow(self, url: str, param: str) -> bytes:
        for _ in range(self._limits.media_redirects + 1):
            parsed = parse_url(url, param)
            answer = await self._get(parsed, await self._address(parsed, param), param)
            if answer.status not in REDIRECTS:
                if answer.status != 200:
                    raise InvalidRequest(f"{param}: {parsed.host} answers {answer.status}", param)
                check_bytes(len(answer.body), self._limits, param)
                return bytes(answer.body)
            url = urljoin(url, answer.header("location"))
            if parsed.secure and not url.lower().startswith("https:"):
                raise InvalidRequest(f"{param}: {parsed.host} redirects from https to another "
                                     "scheme", param)
        raise InvalidRequest(f"{param}: redirects more than {self._limits.media_redirects} times "
                             "(--media-redirects)", param)

    async def _address(self, url: MediaUrl, param: str) -> list[str]:
        """The host's addresses, all of them public."""
        if not is_allowed_host(url.host, self._limits.allowed_media_domains):
            raise InvalidRequest(f"{param}: {url.host} is none of the hosts that media may come "
                                 "from (--allowed-media-domains)", param)
        addresses = await self._resolve(url.host, url.port)
        if not addresses or not all(map(is_public, addresses)):
            raise InvalidRequest(f"{param}: {url.host} has an address that is not public", param)
        return addresses

    async def _get(self, url: MediaUrl, addresses: list[str], param: str) -> _Answer:
        """Raises `OSError` where no address answers."""
        if url.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        names: dict[str, Any] = ({"ssl": self._tls, "server_hostname": url.host}
                                 if url.secure else {})
        for at, address in enumerate(addresses):
            try:
                reader, writer = await self._connect(address, url.port, **names)
                break
            except OSError:
                if at + 1 == len(addresses):
                    raise
        try:
            writer.write(f"GET {url.target} HTTP/1.1\r\nHost: {url.authority}\r\n"
                         "User-Agent: actorium\r\nAccept: image/*, video/*\r\n"
                         "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode())
            return await _read_answer(reader, self._limits, param)
        finally:
            writer.transport.abort()


class _Answer:
    """A response, filled by the parser's callbacks. These raise nothing, since httptools would wrap
    it: what is wrong is found after each piece."""

    def __init__(self) -> None:
        import httptools

        self.parser = httptools.HttpResponseParser(self)
        self.headers: list[tuple[str, str]] = []
        self.body = bytearray()
        self.status = 0
        self.in_body = self.done = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1").strip()))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.in_body = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = self.in_body
        if not self.done:  # 100 Continue and its like: the answer follows
            self.headers.clear()

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


async def _read_answer(reader: asyncio.StreamReader, limits: MediaConfig, param: str) -> _Answer:
    """Reads up to the end of the body; of a redirect or an error the headers alone. Raises
    `InvalidRequest`."""
    import httptools

    answer, before = _Answer(), 0
    while not answer.done:
        piece = await reader.read(READ)
        try:
            if piece:
                answer.parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not answer.done:
                raise InvalidRequest(f"{param}: the server's answer is not HTTP", param) from None
        if not answer.in_body:
            before += len(piece)
            if before > LONGEST_HEADERS or not piece:
                raise InvalidRequest(f"{param}: the server's answer has no end of its headers",
                                     param)
            continue
        if answer.status != 200:
            return answer
        if answer.header("content-encoding").lower() not in ("", "identity"):
            raise InvalidRequest(f"{param}: the server sends it compressed, which it was not asked "
                                 "for", param)
        length = answer.header("content-length")
        check_bytes(max(len(answer.body), int(length) if length.isdecimal() else 0, 1), limits,
                    param)
        if not piece and not answer.done:
            if length or answer.header("transfer-encoding"):
                raise InvalidRequest(f"{param}: the server's answer breaks off", param)
            break
    return answer
