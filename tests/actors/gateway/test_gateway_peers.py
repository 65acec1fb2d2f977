"""An order to abort reaches the requests of every gateway of an engine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from helpers_runtime import short_dir
from helpers_served import serving

from actorium.actors.gateway.http.peers import Peers
from actorium.actors.runtime import rundir


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def test_aborts_reach_all_gateways(base: Path) -> None:
    told: list[tuple[str, str, str | None]] = []

    def peers(own: str) -> Peers:
        async def abort(name: str, tenant: str | None) -> list[str]:
            told.append((own, name, tenant))
            return [f"{own}-{name}"]

        return Peers(base, f"gateway-{own}", abort)

    async def run() -> None:
        first, second, third = (peers(name) for name in "abc")
        for one in (first, second, third):
            await one.listen()
        assert sorted(await first.abort("x", "t")) == ["b-x", "c-x"]
        assert sorted(told) == [("b", "x", "t"), ("c", "x", "t")]
        third.close()
        assert await second.abort("", None) == ["a-"]
        first.close(), second.close()

    asyncio.run(run())


def test_names_are_no_longer_than_other_sockets(base: Path) -> None:
    async def abort(name: str, tenant: str | None) -> list[str]:
        return []

    async def run() -> None:
        peers = Peers(base, "gateway-63", abort)
        await peers.listen()
        (name,) = os.listdir(base)
        assert len(name) <= len(rundir.LONGEST_SOCKET) and name.endswith(rundir.OUR_SUFFIXES)
        peers.close()

    asyncio.run(run())


def test_one_that_begins_to_listen_is_not_made_unreachable(base: Path) -> None:
    """Between binding and listening it refuses connections as a dead one does."""
    async def abort(name: str, tenant: str | None) -> list[str]:
        return ["x"]

    async def run() -> None:
        one, other = Peers(base, "gateway-0", abort), Peers(base, "gateway-1", abort)
        young = socket.socket(socket.AF_UNIX)
        young.bind(str(base / "gateway-1.peer"))
        assert await one.abort("x", None) == []
        young.listen()
        young.close()
        await other.listen()  # in the place of one that was killed
        assert await one.abort("x", None) == ["x"]
        before = Peers(base, "gateway-1", abort)
        before._server, before._file = other._server, os.lstat(base)  # of its predecessor
        before.close()
        assert (base / "gateway-1.peer").exists()

    asyncio.run(run())


def test_a_dead_or_silent_gateway_is_skipped(base: Path) -> None:
    async def abort(name: str, tenant: str | None) -> list[str]:
        return []

    async def run() -> None:
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(base / "1.peer"))
        dead.close()
        one, other = Peers(base, "gateway-0", abort), Peers(base, "gateway-2", abort)
        await one.listen()
        assert await other.abort("x", None) == []
        assert (base / "1.peer").exists(), "whose that is will remove it, or listen there"
        reader, writer = await asyncio.open_unix_connection(str(base / "gateway-0.peer"))
        writer.write(b"nonsense\n")
        assert await reader.read() == b""  # and it goes on
        writer.close()
        assert await other.abort("x", None) == []
        one.close()

    asyncio.run(run())


def ended_by(answer: httpx.Response) -> str:
    """How a call ended; one that is aborted before the scheduler has it is an error."""
    if answer.status_code == 409:
        return "abort" if "aborted" in answer.text else answer.text
    return str(answer.json()["meta_info"]["finish_reason"]["type"])


def test_with_several_gateways_of_an_engine() -> None:
    body = {"text": "Once", "rid": "long",
            "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as one:
            calls = [asyncio.ensure_future(one.post("/generate", json=body | {"rid": f"r{i}"}))
                     for i in range(6)]
            found: list[str] = []
            late = asyncio.get_running_loop().time() + 30
            while len(found) < 6:
                assert asyncio.get_running_loop().time() < late
                await asyncio.sleep(0.2)
                async with httpx.AsyncClient(base_url=url, timeout=60) as other:
                    ended = (await other.post("/abort_request", json={"abort_all": True})).json()
                found += ended["aborted"]
            kinds = {ended_by(await call) for call in calls}
        assert set(found) == {f"r{i}" for i in range(6)} and kinds == {"abort"}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(port, gateways=2, max_num_seqs=8) as served:
        asyncio.run(run(served.url))
