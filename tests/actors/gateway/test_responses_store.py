"""The store of responses: bounds, tenants, several processes at one file."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from actorium.actors.errors import BadConfig
from actorium.actors.gateway.api.response_store import (
    ResponseStore,
    StoredResponse,
    lives,
    owner_of,
)


def stored(size: int = 10, status: str = "completed") -> StoredResponse:
    return StoredResponse(status, "", b"r" * size, b"[]", b"[]")


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return str(tmp_path / "responses.db") if request.param == "file" else None


def test_a_stored_response_is_found_by_its_tenant_only(path: str | None) -> None:
    async def run() -> None:
        store = ResponseStore(path, 1000, 10)
        assert await store.put("a", "resp_1", stored())
        assert await store.get("a", "resp_1") == stored()
        assert await store.get("b", "resp_1") is None and not await store.delete("b", "resp_1")
        assert await store.put("a", "resp_1", stored(20))
        found = await store.get("a", "resp_1")
        assert found is not None and len(found.response) == 20
        assert await store.delete("a", "resp_1") and not await store.delete("a", "resp_1")
        assert await store.get("a", "resp_1") is None
        store.close()

    asyncio.run(run())


def test_the_oldest_of_the_largest_tenant_are_evicted_first(path: str | None) -> None:
    async def run() -> None:
        store = ResponseStore(path, 1000, 100)
        assert await store.put("small", "resp_0", stored(96))
        for number in range(20):
            assert await store.put("large", f"resp_{number}", stored(96))
        assert await store.get("small", "resp_0") is not None
        kept = [number for number in range(20) if await store.get("large", f"resp_{number}")]
        assert kept == list(range(11, 20))  # of 100 bytes each
        assert not await store.put("large", "huge", stored(2000))
        few = ResponseStore(None, 1 << 20, 3)
        for number in range(5):
            await few.put("", str(number), stored())
        assert [bool(await few.get("", str(n))) for n in range(5)] == [False] * 2 + [True] * 3

    asyncio.run(run())


def test_sizes_are_counted_when_a_response_grows(path: str | None) -> None:
    async def run() -> None:
        store = ResponseStore(path, 1000, 100)
        await store.put("", "resp_1", stored(10, "queued"))
        assert await store.update("", "resp_1", "completed", b"x" * 900)
        assert not await store.update("", "resp_1", "failed", b"")  # it does not run any more
        await store.put("", "resp_2", stored(300))
        assert await store.get("", "resp_1") is None and await store.get("", "resp_2")

    asyncio.run(run())


def test_a_file_outlives_the_gateway_and_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    asyncio.run(ResponseStore(str(path), 1000, 10).put("a", "resp_1", stored()))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert asyncio.run(ResponseStore(str(path), 1000, 10).get("a", "resp_1")) == stored()


WRITER = """
import asyncio, sys
from actorium.actors.gateway.api.response_store import ResponseStore, StoredResponse
async def run():
    store = ResponseStore(sys.argv[1], 1 << 20, 1000)
    for number in range(50):
        stored = StoredResponse("completed", "", b"r", b"[]", b"[]")
        await store.put(sys.argv[2], f"resp_{number}", stored)
asyncio.run(run())
"""


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    store = ResponseStore(path, 1 << 20, 1000)
    for tenant in "ab":
        assert asyncio.run(store.get(tenant, "resp_0")) and \
            asyncio.run(store.get(tenant, "resp_49"))


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, and not a database; " * 50)
    for wrong in (path, tmp_path, tmp_path / "none" / "x.db"):
        with pytest.raises(BadConfig, match="responses_store") as caught:
            ResponseStore(str(wrong), 1000, 10)
        assert caught.value.param == "gateway.responses_store"


def test_owners_of_processes_are_unique() -> None:
    assert lives(owner_of(os.getpid())) and not lives("") and not lives(f"{os.getpid()}:1")
