"""Media are fetched from whom the rules allow, and from nobody else."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from helpers_hostile_media import noise, saved

from actorium.actors.config.media_settings import MediaConfig, media_rules
from actorium.actors.errors import InvalidRequest
from actorium.actors.media.fetching import MediaFetcher, is_allowed_host, is_public

PART = "messages[0].content[0].image_url.url"
PUBLIC = "93.184.215.14"
PNG = saved(noise(random.Random(1)), "PNG")
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = PNG, status: str = "200 OK", *headers: str, length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Internet:
    """Names, addresses and servers, of which all are one on loopback: what it answers to is found
    by the path that is asked for."""

    def __init__(self, pages: dict[str, bytes | Server], addresses: dict[str, list[str]]) -> None:
        self.pages, self.addresses = pages, addresses
        self.connected: list[tuple[str, int]] = []
        self.tls: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.requests: list[bytes] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.addresses:
            raise OSError(-2, "Name or service not known")
        return self.addresses[host]

    async def connect(self, address: str, port: int, **tls: Any) -> Any:
        self.connected.append((address, port))
        self.tls.append(tls)
        if address == "1.1.1.1":
            raise ConnectionRefusedError(111, "Connection refused")
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            page = self.pages[request.split()[1].decode()]
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def fetch(self, url: str, **settings: Any) -> bytes:
        limits = MediaConfig(**{"allowed_media_domains": ("*.example", "one.test"),
                                "media_timeout": 5.0, **settings})

        async def run() -> bytes:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            async with server:
                return await MediaFetcher(limits, self.resolve, self.connect).fetch(url, PART)

        return asyncio.run(run())


def internet(**pages: bytes | Server) -> Internet:
    return Internet({f"/{path}": page for path, page in pages.items()}, {
        "a.example": [PUBLIC], "b.example": ["1.1.1.1", "2606:2800:21f:cb07::1"],
        "inside.example": ["10.0.0.7"], "mixed.example": [PUBLIC, "127.0.0.1"],
        "meta.example": ["169.254.169.254"], "gone.example": [], "one.test": [PUBLIC],
        "other.test": [PUBLIC], "127.0.0.1": ["127.0.0.1"]})


def refused(world: Internet, url: str, **settings: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        world.fetch(url, **settings)
    assert error.value.param == PART and error.value.message.startswith(f"{PART}: ")
    return error.value.message.removeprefix(f"{PART}: ")


# --- hosts and addresses -------------------------------------------------------------------------

@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.9.9", "169.254.169.254", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "::127.0.0.1", "2001:db8::1", "nonsense",
    "192.0.2.1", "198.18.0.1", "100.64.0.1", "168.63.129.16", "::ffff:168.63.129.16",
    "64:ff9b::a83f:8110", "2002:a83f:8110::", "100.100.100.200", "192.0.0.192", "192.0.0.9",
    "192.88.99.1", "fec0::1", "feff::1", "64:ff9b:1::a00:1", "3fff::1", "5f00::1", "4000::1",
    "2606:2800::5efe:7f00:1", "2606:2800::200:5efe:a9fe:a9fe", "2001:0:7f00:1::1"])
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:2800:21f:cb07::1", "::ffff:8.8.8.8",
                                     "64:ff9b::808:808", "168.63.129.17", "2002:808:808::",
                                     "2606:2800::5efe:808:808"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


def test_hosts_are_exact_or_below_a_star() -> None:
    assert is_allowed_host("Images.Example.", ["images.example"])
    assert not is_allowed_host("x.images.example", ["images.example"])
    assert is_allowed_host("x.y.example", ["*.example"]) and is_allowed_host("anything", ["*"])
    for host in ("example", "evilexample", "x.example.evil", ""):
        assert not is_allowed_host(host, ["*.example"])


def test_what_is_allowed_is_fetched_from_the_address_that_was_checked() -> None:
    world = internet(i=answer())
    assert world.fetch("http://a.example/i") == PNG
    assert world.connected == [(PUBLIC, 80)] and world.asked == ["a.example"], "resolved once"
    head = world.requests[0].decode()
    assert head.startswith("GET /i HTTP/1.1\r\nHost: a.example\r\n")
    assert "identity" in head and "Cookie" not in head and "Authorization" not in head


def test_a_second_address_is_tried_where_the_first_refuses() -> None:
    world = internet(i=answer())
    assert world.fetch("http://b.example:8080/i") == PNG
    assert world.connected == [("1.1.1.1", 8080), ("2606:2800:21f:cb07::1", 8080)]
    assert b"Host: b.example:8080" in world.requests[0]


def test_tls_is_for_the_name_not_for_the_address() -> None:
    world = internet(i=answer())
    assert world.fetch("https://one.test/i") == PNG
    (tls,) = world.tls
    assert world.connected == [(PUBLIC, 443)] and tls["server_hostname"] == "one.test"
    assert tls["ssl"].verify_mode == ssl.CERT_REQUIRED and tls["ssl"].check_hostname


@pytest.mark.parametrize("url, words", [
    ("http://other.test/i", "other.test is none of the hosts"),
    ("http://x.one.test/i", "none of the hosts"),
    ("http://inside.example/i", "has an address that is not public"),
    ("http://mixed.example/i", "has an address that is not public"),
    ("http://meta.example/latest", "not public"), ("http://gone.example/", "not public"),
    ("http://127.0.0.1/i", "none of the hosts"), ("http://nobody.example/i", "Name or service"),
    ("http://user:pass@a.example/i", "without a user's name"),
    ("http://a.example@127.0.0.1/i", "without a user's name"),
    ("http://a.example\\@127.0.0.1/i", "must be a"), ("http://a.example/\r\nX: y", "must be a"),
    ("http://a.example:99999/i", "must be a"), ("http:///i", "must be a"),
    ("ftp://a.example/i", "must be a"), ("gopher://a.example/", "must be a"),
    ("HTTP//a.example", "must be a"), ("", "must be a"), ("http://ä.example/", "must be a"),
    ("http://a.example/" + "x" * 9000, "must be a"), ("http://[::1]/i", "none of the hosts"),
    ("http://a.ex ample/i", "must be a"), ("blob:http://a.example/i", "must be a"),
])
def test_urls_that_are_refused(url: str, words: str) -> None:
    world = internet(i=answer())
    assert words in refused(world, url)
    assert not world.connected


def test_even_any_host_must_be_public() -> None:
    world = internet(i=answer())
    assert world.fetch("http://other.test/i", allowed_media_domains=("*",)) == PNG
    assert "not public" in refused(world, "http://127.0.0.1/i", allowed_media_domains=("*",))
    assert "none of the hosts" in refused(world, "http://a.example/i", allowed_media_domains=())


# --- redirects -----------------------------------------------------------------------------------

def to(where: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, f"Location: {where}")


def test_redirects_are_followed_under_the_same_rules() -> None:
    world = internet(i=to("/j", "301 Moved"), j=to("http://one.test/k", "307 X"), k=answer())
    assert world.fetch("http://a.example/i") == PNG
    assert world.asked == ["a.example", "a.example", "one.test"]
    assert "redirects more than 1 times" in refused(world, "http://a.example/i", media_redirects=1)


@pytest.mark.parametrize("where, words", [
    ("http://inside.example/", "not public"), ("http://other.test/", "none of the hosts"),
    ("http://127.0.0.1/", "none of the hosts"), ("file:///etc/passwd", "must be a"),
    ("data:image/png;base64,AAAA", "must be a"), ("http://u@a.example/", "user's name"),
    ("/i", "redirects more than 3 times"), ("", "redirects more than 3 times"),
])
def test_redirects_lead_to_nothing_that_is_forbidden(where: str, words: str) -> None:
    world = internet(i=to(where))
    assert words in refused(world, "http://a.example/i")
    assert {address for address, _ in world.connected} == {PUBLIC}


def test_a_redirect_does_not_leave_https() -> None:
    world = internet(i=to("http://a.example/j"), j=answer())
    assert "from https" in refused(world, "https://a.example/i")


# --- answers -------------------------------------------------------------------------------------

@pytest.mark.parametrize("page, words", [
    (answer(b"no", "404 Not Found"), "a.example answers 404"),
    (answer(b"no", "500 X"), "answers 500"), (answer(b""), "is empty"),
    (answer(bytes(2000)), "has 2000 bytes; 1000 are allowed (--max-media-bytes)"),
    (answer(bytes(5000), length=False), "1000 are allowed"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n", "1000 are allowed"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7D0\r\n" + bytes(2000), "1000 are"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", "breaks off"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "breaks off"),
    (answer(PNG, "200 OK", "Content-Encoding: gzip"), "sends it compressed"),
    (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, "no end of its headers"),
    (b"SSH-2.0-OpenSSH\r\n", "is not HTTP"), (b"", "no end of its headers"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "is not HTTP"),
    (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "no"),
], ids=range(15))
def test_answers_that_are_refused(page: bytes, words: str) -> None:
    assert words in refused(internet(i=page), "http://a.example/i", max_media_bytes=1000)


@pytest.mark.parametrize("page", [
    answer(PNG, length=False), b"HTTP/1.1 100 Continue\r\n\r\n" + answer(),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%X\r\n%s\r\n0\r\n\r\n" % (len(PNG), PNG),
    answer().replace(b"HTTP/1.1", b"HTTP/1.0"),
], ids=["to the end", "continue", "chunked", "1.0"])
def test_answers_of_all_forms(page: bytes) -> None:
    assert internet(i=page).fetch("http://a.example/i") == PNG


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX: ", answer(length=False)[:60]],
                         ids=["silent", "headers", "body"])
def test_slow_servers_get_one_time_limit_for_everything(head: bytes) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:  # ended by the other side, or with the loop
            if head:
                writer.write(b"x")
                await writer.drain()
            await asyncio.sleep(0.02)

    began = monotonic()
    assert "took more than 0.3 s to fetch" in refused(internet(i=drip), "http://a.example/i",
                                                      media_timeout=0.3)
    assert monotonic() - began < 3


def test_a_slow_resolver_is_within_the_limit() -> None:
    world = internet(i=answer())

    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    world.resolve = never  # type: ignore[method-assign]
    assert "took more than" in refused(world, "http://a.example/i", media_timeout=0.1)


# --- data: and file: -----------------------------------------------------------------------------

def data_url(data: bytes = PNG, kind: str = "image/png", options: str = ";base64") -> str:
    return f"data:{kind}{options},{base64.b64encode(data).decode()}"


def test_data_urls() -> None:
    world = internet()
    for url in (data_url(), data_url(kind=""), data_url(kind="image/PNG"),
                data_url(options=";charset=x;base64"), "DATA" + data_url()[4:]):
        assert world.fetch(url, allowed_media_domains=()) == PNG


@pytest.mark.parametrize("url, words", [
    ("data:image/png;base64", "is no data: URL"), ("data:", "is no data: URL"),
    ("data:image/png," + "a" * 8, "must be in base64"),
    (data_url(kind="image/jpeg"), "is declared as image/jpeg and is PNG"),
    (data_url(b"%PDF-1.4 "), "is declared as image/png and is PDF"),
    (data_url(b"whatever!"), "is declared as image/png and is nothing that is known"),
    (data_url(kind="image/svg+xml"), "has type 'image/svg+xml'; known are image/png"),
    (data_url(kind="text/html"), "has type 'text/html'"),
    (data_url(bytes(4000)), "has 4000 bytes; 3000 are allowed"),
    ("data:image/png;base64,", "is empty"), (data_url()[:-1], "no valid base64"),
    (data_url() + "\n", "no valid base64"), (data_url().replace("A", "-", 1), "no valid base64"),
    (data_url() + "é", "no valid base64"), ("data:image/png;base64,iVBORw1=", "no valid base64"),
    ("data:image/png;base64," + "====", "no valid base64"),
    ("data:image/png;base64,%69VBO", "no valid base64"),
    ("data:" + "x" * 300 + ",", "no data: URL"),
])
def test_data_urls_that_are_refused(url: str, words: str) -> None:
    most = 3000 if "AAAAAAAA" in url else 32 << 20
    assert words in refused(internet(), url, max_media_bytes=most)


def test_files_below_the_folder_alone_are_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "secret.png"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "a b.png").write_bytes(PNG)
    outside.write_bytes(PNG)
    (root / "link.png").symlink_to(outside)
    (root / "good.png").symlink_to(root / "deep" / "a b.png")
    (tmp_path / "rootless.png").write_bytes(PNG)
    os.mkfifo(root / "fifo")
    world, own = internet(), {"allowed_local_media_path": str(root)}
    assert world.fetch(f"file://{root}/deep/a%20b.png", **own) == PNG
    assert world.fetch(f"file://localhost{root}/good.png", **own) == PNG
    for path in (outside, root / "link.png", root / ".." / "secret.png", root / "%2e%2e/secret.png",
                 root, root / "fifo", root / "none", "/etc/passwd", "/dev/zero",
                 tmp_path / "rootless.png", f"{root}/good.png%00", f"{root}/good.png?x"):
        assert "is no file below the folder" in refused(world, f"file://{path}", **own)
    assert "no file below" in refused(world, f"file://host{root}/good.png", **own)
    assert "files are not read" in refused(world, f"file://{root}/good.png")
    assert "100 are allowed" in refused(world, f"file://{root}/good.png", **own,
                                        max_media_bytes=100)


# --- settings ------------------------------------------------------------------------------------

@pytest.mark.parametrize("field, value", [
    ("allowed_media_domains", ("http://a.example",)), ("allowed_media_domains", ("a.example:80",)),
    ("allowed_media_domains", ("a*.example",)), ("allowed_local_media_path", "/nowhere/at/all"),
    ("media_timeout", 0.0), ("media_redirects", -1), ("limit_mm_per_prompt", {"audio": 1}),
    ("limit_mm_per_prompt", {"image": 1.5}), ("max_media_bytes", 0), ("max_media_pixels", 1 << 40),
    ("max_media_ratio", 500.0), ("max_video_frames", 1), ("max_video_seconds", 0.0),
    ("media_cpu_seconds", 60.0), ("media_cache_bytes", -1),
    ("max_video_pixels", 1 << 30)])
def test_wrong_settings_are_named(field: str, value: Any) -> None:
    wrong = [name for name, ok, _ in media_rules(MediaConfig(**{field: value})) if not ok]
    assert wrong == [f"media.{field}"]
    assert all(ok for _, ok, _ in media_rules(MediaConfig()))
