"""Fetches the media that a request names: data:, http(s): and file: URLs.

A server must be allowed by name, and every address that its name has must be public; the connection
goes to an address that has been checked, so that a name which changes its address in between gains
nothing. Redirects are followed under the same rules. One time limit is over everything, and what
is read is counted as it comes. Requests carry no credentials; proxies of the environment are not
asked, since an address that a proxy resolves has not been checked.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urljoin, urlsplit

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest, shown
from actorium.actors.vision.address_rules import is_allowed_host, is_public
from actorium.actors.vision.data_urls import read_data_url, read_local
from actorium.actors.vision.image_decoding import check_bytes

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
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class MediaFetcher:
    """Fetches under the rules of a configuration. For one event loop."""

    def __init__(self, limits: MediaConfig, resolve: Resolve = resolve_host,
                 connect: Connect = asyncio.open_connection) -> None:
        self._limits, self._resolve, self._connect = limits, resolve, connect
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, param: str) -> bytes:
        """The bytes that a URL names, at most `max_media_bytes`. Raises `InvalidRequest` that names
        `param`."""
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
