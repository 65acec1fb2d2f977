"""What Ray runs on a machine, without Ray: it starts an agent that outlives it, finds one that runs
already, and ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers_cli import alive, eventually

from actorium import __version__
from actorium.actors.cluster.ray.ray_agent import RayAgent
from actorium.actors.runtime.security import curve_keys

WORDS = ["tcp://127.0.0.1:9", "--name", "c", "--node", "ray-0", "--processors", "1"]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ACTORIUM_RUN_DIR", str(tmp_path / "r"))
    curve_keys.make_server(tmp_path / "keys")
    curve_keys.make_client(tmp_path / "keys", "ray-0", tmp_path / "a.key")
    return (tmp_path / "a.key").read_text()


def test_an_agent_outlives_who_started_it(tmp_path: Path, key: str) -> None:
    async def play() -> None:
        first, second = RayAgent("ray-0", "c", "t"), RayAgent("ray-0", "c", "t")
        assert await first.start(__version__, WORDS, key)
        base = tmp_path / "r-ray" / "t" / "ray-0"
        pid = int((base / "c.pid").read_text())
        assert alive(pid) and not list(base.glob("*.key")), "its key does not lie about"
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        session = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[3]
        assert int(parent[3]) == pid != int(session), "a session of its own"
        assert not await second.start(__version__, WORDS, key), "it is there already"
        watching = asyncio.create_task(second.watch())
        await first.end(20.0)
        assert await asyncio.wait_for(watching, 10.0)
        assert eventually(lambda: not alive(pid)) and not (base / "c").exists()

    asyncio.run(play())


def test_what_keeps_an_agent_from_starting_is_reported(key: str) -> None:
    async def play(version: str, words: list[str]) -> str:
        with pytest.raises(RuntimeError) as failed:
            await RayAgent("ray-0", "c", "t").start(version, words, key)
        return str(failed.value)

    assert "has actorium" in asyncio.run(play("0.0.0", WORDS))
    assert "HEAD: must be" in asyncio.run(play(__version__, ["h", *WORDS[1:]]))


def test_an_agent_without_a_head_gives_up(key: str) -> None:
    async def play() -> str:
        agent = RayAgent("ray-0", "c", "t")
        assert await agent.start(__version__, [*WORDS, "--give-up", "0.5"], key)
        return await asyncio.wait_for(agent.watch(), 30.0)

    assert "ends: no head for" in asyncio.run(play())
