"""A Redis server of a test's own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_keys import free_ports


class Served(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]
    client: Any
    """A `redis.Redis`."""


@contextmanager
def redis_server(folder: Path, *flags: str, port: int = 0, password: str | None = None
                 ) -> Iterator[Served]:
    """flags: of redis-server; port: 0 = a free one."""
    redis = pytest.importorskip("redis")
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server and no valkey-server here")
    port = port or free_ports()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder),
         *flags], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port, password=password, socket_timeout=20)
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield Served(f"redis://127.0.0.1:{port}/0", process, client)
    finally:
        process.kill()
        process.wait()
