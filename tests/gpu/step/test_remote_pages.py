"""Pages in a Redis server that answers, lies, refuses, is full, hangs and is gone."""

from __future__ import annotations

import signal
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers_redis import Served, redis_server

from actorium.actors.errors import BadConfig
from actorium.gpu.step.page_store import CORRUPT, DONE, HEADER, MISSING
from actorium.gpu.step.remote_pages import RemotePages

WIDTH, SPACE = 5000, b"n" * 16


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def page_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(WIDTH)


def opened(server: Served, space: bytes = SPACE, password: str = "", timeout: float = 2.0
           ) -> RemotePages:
    return RemotePages(server.url, password, space, timeout)


def put(store: RemotePages, *numbers: int) -> list[bool]:
    return [store.write(name_of(n), memoryview(page_of(n)), zlib.crc32(page_of(n)))
            for n in numbers]


def got(store: RemotePages, number: int) -> bytes | int:
    """What is read: the page, or why not."""
    into = bytearray(WIDTH)
    found, crc = store.read(name_of(number), memoryview(into))
    if found == DONE:
        assert crc == zlib.crc32(into)
        return bytes(into)
    return found


def test_what_one_engine_writes_another_reads(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        first, second, stranger = opened(server), opened(server), opened(server, b"m" * 16)
        assert put(first, *range(20)) == [True] * 20
        assert [got(second, n) for n in range(21)] == [*map(page_of, range(20)), MISSING]
        assert second.holds(name_of(3)) and not stranger.holds(name_of(3))
        assert put(second, 3) == [True] and (first.pages, second.pages) == (20, 0)
        assert first.held_bytes == 20 * (WIDTH + HEADER.size)
        put(stranger, *range(1500))
        stranger.wipe()
        assert got(stranger, 3) == MISSING and len(server.client.keys()) == 20


def test_a_server_that_lies(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server)
        put(store, *range(6))
        keys = sorted(server.client.keys())
        for at, wrong in enumerate((
                lambda value: value[:70] + bytes([value[70] ^ 1]) + value[71:],
                lambda value: value[:20] + bytes([value[20] ^ 1]) + value[21:],
                lambda value: value[:-1], lambda value: b"", lambda value: value + b"\0")):
            server.client.set(keys[at], wrong(server.client.get(keys[at])))
        server.client.set(keys[5], server.client.get(keys[5]))
        assert [got(store, n) for n in range(6)] == [CORRUPT] * 5 + [page_of(5)]
        assert server.client.keys() == [keys[5]]  # what was wrong is gone
        server.client.rename(keys[5], keys[4])
        assert got(store, 4) == CORRUPT  # another page


def test_a_server_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, "--maxmemory", "1500kb", "--maxmemory-policy", "noeviction") as own:
        store = opened(own)
        written = put(store, *range(300))
        assert written[0] and not written[-1]
        assert got(store, 0) == page_of(0) and got(store, 299) == MISSING
        assert caplog.text.count("pages are not written") == 1 and "maxmemory" in caplog.text


def test_a_server_that_refuses(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "pass", password="pass") as server:
        for password in ("", "word", "user:pass"):
            with pytest.raises(BadConfig, match="remote_cache: redis://.*(assword|uthent)"):
                opened(server, password=password)
        for password in ("pass", "default:pass"):
            assert put(opened(server, password=password), 1) == [True]


def test_a_server_that_hangs_dies_and_comes_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server, timeout=0.3)
        put(store, 1)
        server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert got(store, 1) == MISSING and 0.25 < time.monotonic() - began < 2
        assert not store.holds(name_of(1)) and put(store, 2) == [False]
        assert time.monotonic() - began < 2  # it is left alone for a moment
        server.process.send_signal(signal.SIGCONT)
        time.sleep(1.1)
        assert got(store, 1) == page_of(1) and put(store, 2) == [True]
        server.process.kill()
        server.process.wait()
        assert got(store, 1) == MISSING
        none = opened(server, timeout=0.3)  # a server that is not there is no reason not to start
        port = int(server.url.rpartition(":")[2].removesuffix("/0"))
    with redis_server(tmp_path, port=port):
        time.sleep(1.1)
        assert put(store, 3) == put(none, 4) == [True]
