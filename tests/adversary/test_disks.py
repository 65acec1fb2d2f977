"""Disks that are full, that lose files under an engine, or go: streams go on, and it is said."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.core import Context
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.api.response_store import ResponseStore, StoredResponse
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime import roles
from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.listening import ListenAddress
from actorium.actors.runtime.step_events import open_events
from actorium.tools.chaos.checked_streams import RequestMaker, Traffic
from actorium.tools.chaos.faults import KILL, Fault, actors, strike
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, engine
from actorium.tools.chaos.running_trials import ACTORS, GATEWAY, Battery, StrikeTrial

pytestmark = pytest.mark.chaos
PATIENCE = 0.5
LATEST = 90.0


@contextmanager
def disk(size: str = "1m") -> Iterator[Path]:
    """A small disk, in a directory of its own with a short name."""
    base = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))
    where = base / "disk"
    where.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(where)]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
        yield where
    finally:
        unmount(where)
        shutil.rmtree(base, ignore_errors=True)


def unmount(where: Path) -> None:
    """At once, whoever uses it."""
    subprocess.run(["umount", "-l", str(where)], capture_output=True)


def fill(where: Path) -> Path:
    """Take all the room that there is."""
    filler = where / "filler"
    with open(filler, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


async def until(client: AsyncClient, wanted: Callable[[dict[str, float]], bool]) -> str:
    """Wait for it to be true of the scheduler's gauges; its detail then."""
    end = monotonic() + LATEST
    while monotonic() < end:
        for actor in (await client.status()).actors:
            if actor.role == "scheduler" and actor.gauges and wanted(actor.gauges):
                return actor.detail
        await asyncio.sleep(0.05)
    raise AssertionError("it does not come to that")


async def written(ledger: Path) -> None:
    """Wait for a ledger where there was none: the scheduler looks once a second."""
    end = monotonic() + LATEST
    while not any(segment.stat().st_size for segment in ledger.glob("*.seg")):
        assert monotonic() < end, "nothing was written"
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


async def kill_scheduler(made: Rig) -> None:
    """And wait for the next one."""
    (old,) = strike(Fault(0.0, KILL, ("scheduler",)), made.run_dir)
    end = monotonic() + LATEST
    while monotonic() < end:
        new = actors(made.run_dir).get("scheduler")
        if new is not None and new.epoch > old.epoch:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("no scheduler came")


class Streams:
    """Some that are under way until they are asked for."""

    def __init__(self, client: AsyncClient, seed: int, tokens: int = 250, many: int = 4) -> None:
        self.traffic = Traffic(RequestMaker(seed, (tokens, tokens + 50), prompt=60), latest=LATEST)
        maker = RequestMaker(seed, (tokens, tokens + 50), prompt=60)
        self._tasks = [asyncio.create_task(self.traffic.send(client, maker.make()))
                       for _ in range(many)]

    async def begun(self) -> None:
        while sum(want.count > 0 for want in self.traffic.live.values()) < len(self._tasks):
            await asyncio.sleep(0.01)
            assert not all(task.done() for task in self._tasks)

    async def codes(self) -> list[str | None]:
        """How they end; their tokens are right in any case."""
        codes = list(await asyncio.gather(*self._tasks))
        assert self.traffic.tally.wrong == []
        return codes


@pytest.mark.mended("a full disk stopped all streams for as long as it was full")
@pytest.mark.mended("a scheduler started again on a full disk ended the engine")
@pytest.mark.slow
def test_streams_go_on_without_a_ledger(tried: Callable[..., None],
                                        amount: Callable[[int, int], int]) -> None:
    async def run(made: Rig, where: Path) -> None:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            before = Streams(client, 1, tokens=amount(300, 900))
            await before.begun()
            filler = fill(where)
            said = await until(client, lambda gauges: gauges["ledger_not_durable"] == 1)
            assert said.startswith("not durable: the ledger takes no more: No space left")
            assert (await client.status()).ready
            assert await Streams(client, 2, tokens=20).codes() == [None] * 4
            if amount(0, 1):
                during = Streams(client, 3)
                await during.begun()
                await kill_scheduler(made)
                assert set(await during.codes()) <= {None, "unknown_request"}, "as the docs say"
                await until(client, lambda gauges: gauges["ledger_not_durable"] == 1)
                assert await Streams(client, 4, tokens=20).codes() == [None] * 4
            filler.unlink()
            await until(client, lambda gauges: not gauges["ledger_not_durable"])
            after = Streams(client, 5)
            await after.begun()
            await kill_scheduler(made)
            assert await before.codes() + await after.codes() == [None] * 8
            tried(8)

    with disk() as where:
        made = Rig(engine(where.parent / "run", SHORT_WORKER, ledger_dir=str(where / "ledger"),
                          ledger_patience=PATIENCE), where.parent / "run")
        try:
            asyncio.run(run(made, where))
        finally:
            made.close()
        assert made.left == [] and list((where / "ledger").iterdir()) == []


@pytest.mark.mended("a full disk stopped all streams for five seconds longer than its patience")
@pytest.mark.mended("requests that came while a full disk was waited for were refused")
@pytest.mark.slow
def test_a_full_disk_is_waited_for_no_longer_than_it_may_be(tried: Callable[..., None]) -> None:
    async def run(made: Rig, where: Path) -> None:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            before = Streams(client, 1, tokens=900)
            await before.begun()
            before.traffic.gaps.fault("full", monotonic())
            fill(where)
            await asyncio.sleep(PATIENCE / 4)
            assert await Streams(client, 2, tokens=20).codes() == [None] * 4
            assert await before.codes() == [None] * 4
            assert (gauges := made.gauges())["ledger_not_durable"] == 1, gauges
            silent = before.traffic.gaps.summary()["all"]["max"]
            assert PATIENCE / 2 < silent < PATIENCE + 2.0
            tried(8)

    with disk() as where:
        made = Rig(engine(where.parent / "run", SHORT_WORKER, ledger_dir=str(where / "ledger"),
                          ledger_patience=PATIENCE), where.parent / "run")
        try:
            asyncio.run(run(made, where))
        finally:
            made.close()


@pytest.mark.mended("a ledger whose files were removed was written to for ever, for nobody")
@pytest.mark.parametrize("how", ["removed", "unmounted"])
@pytest.mark.slow
def test_streams_go_on_where_the_ledger_was_taken_away(
        how: str, tried: Callable[..., None]) -> None:
    async def run(made: Rig, where: Path) -> None:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            before = Streams(client, 1, tokens=600)
            await before.begun()
            if how == "removed":
                shutil.rmtree(where / "ledger")
            else:
                unmount(where)
            await written(where / "ledger")
            await kill_scheduler(made)
            assert await before.codes() == [None] * 4
            tried(4)

    with disk() as where:
        made = Rig(engine(where.parent / "run", SHORT_WORKER, ledger_dir=str(where / "ledger")),
                   where.parent / "run")
        try:
            asyncio.run(run(made, where))
        finally:
            made.close()


@pytest.mark.mended("gateways and watchdogs could not be started again in a full run directory")
@pytest.mark.slow
def test_a_full_run_directory(tried: Callable[..., None]) -> None:
    """Sockets, logs, journals, tapes, the ledger: all actors come back all the same."""
    async def run(made: Rig, where: Path) -> None:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            fill(where)
            assert await Streams(client, 2, tokens=20).codes() == [None] * 4
            battery = Battery(made, client, 1)
            for role in (GATEWAY, "watchdog", *ACTORS[:4]):
                await battery.run(StrikeTrial("idle", KILL, (role,)))
                tried()
            assert battery.wrong == []

    with disk("40m") as where:
        made = Rig(engine(where, SHORT_WORKER, {GATEWAY: roles.GATEWAY}, port=0, probe_port=0,
                          ledger_patience=PATIENCE), where)
        try:
            asyncio.run(run(made, where))
        finally:
            made.close()
        assert made.left == ["file filler"]
        with pytest.raises(ActoriumError) as refused:
            _start_full(where)
        assert "\n" not in refused.value.message and "No space left" in refused.value.message
        (where / "filler").unlink()
        Rig(engine(where, SHORT_WORKER, name="next"), where).close()


def _start_full(where: Path) -> None:
    fill(where)
    made: Engine = engine(where, SHORT_WORKER, name="next")
    made.close()


# --- single files --------------------------------------------------------------------------------

def test_what_is_said_already_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    file, here = tmp_path / "gateway.json", ListenAddress("127.0.0.1", 8000)
    listening.write_address(file, here, "gateway-0")

    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("actorium.actors.runtime.security.private_paths.open_file", fails)
    listening.write_address(file, here, "gateway-0")
    with pytest.raises(OSError, match="No space"):
        listening.write_address(file, ListenAddress("127.0.0.1", 8001), "gateway-0")
    assert listening.read_address(file) == here


@pytest.mark.mended("a trace on a full disk killed its actor by SIGBUS, again and again")
def test_a_trace_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    with disk() as where:
        fill(where)
        config = Config(runtime=RuntimeConfig(trace_dir=str(where)))
        with pytest.raises(OSError, match="No space left"):
            open_events(Context(config, where, "scheduler", 1, 0))
        assert open_events(Context(config, where, "scheduler", 2, 0)) is None
        assert "no trace: " in caplog.text


@pytest.mark.mended("a gateway could not open its store of responses again on a full disk")
def test_a_store_of_responses_on_a_full_disk() -> None:
    """What is stored can be asked for; what cannot be stored says so; the next gateway opens it."""
    stored = StoredResponse("completed", "", b"{}", b"[]", os.urandom(2000).hex().encode())

    async def run(where: Path) -> None:
        path = str(where / "responses.db")
        store = ResponseStore(path, 1 << 30, 1000)
        assert await store.put("t", "first", stored)
        filler = fill(where)
        with pytest.raises(Exception, match="full"):
            for number in range(10_000):
                await store.put("t", f"r{number}", stored)
        assert await store.get("t", "first") == stored
        again = ResponseStore(path, 1 << 30, 1000)
        assert await again.get("t", "first") == stored
        filler.unlink()
        assert await again.put("t", "later", stored) and await store.put("t", "last", stored)
        assert await store.get("t", "later") == stored
        store.close()
        again.close()

    with disk() as where:
        asyncio.run(run(where))
