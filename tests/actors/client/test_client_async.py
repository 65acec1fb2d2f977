"""The asyncio client: many tasks over one pair of sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from helpers_text import FakeEngine, byte_level, write_model

from actorium.actors.client.async_client import AsyncClient, AsyncioSession
from actorium.actors.client.calls import AsyncDeltaStream, ClientCalls
from actorium.actors.client.client import Request
from actorium.actors.client.requests import Resumable
from actorium.actors.client.target import LocalTarget
from actorium.actors.errors import EngineUnavailable, InvalidRequest, UnknownRequest
from actorium.actors.params import SamplingParams

TEXT = "the € day, \U0001f600 é!"
IDS = byte_level().encode(TEXT).ids
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop],
                                ids=["asyncio", "uvloop"])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(write_model(tmp_path / "m")) as engine:
        yield engine


def run(loop: Any, main: Any) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(main, 60))


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": len(IDS)} | more))


@LOOPS
def test_many_tasks_share_a_client(engine: FakeEngine, loop: Any) -> None:
    async def stream(client: AsyncClient, text: str) -> str:
        deltas = [d async for d in client.stream(text, params(max_tokens=5))]
        assert deltas[-1].finish_reason == "length"
        return "".join(d.text for d in deltas)

    async def main() -> None:
        async with AsyncClient(engine.name, engine.base) as client:
            texts = [f"s{i:04d}" for i in range(200)]
            streams = asyncio.gather(*(stream(client, t) for t in texts))
            batch = client.generate([f"b{i:04d}" for i in range(200)], params(max_tokens=5))
            ids = client.tokenize(TEXT)
            got = await asyncio.gather(streams, batch, ids)
            assert got[0] == texts
            assert [c.text for c in got[1]] == [f"b{i:04d}" for i in range(200)]
            assert got[2] == IDS
            assert not client._session.core.waiting

    run(loop, main())


def test_the_remaining_methods_work(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncClient(engine.name, engine.base) as client:
            await client.wait_ready(5)
            assert (await client.status()).ready
            assert (await client.server_info())["model"] == "m"
            assert (await client.server_info())["memory"]["free_pages"] == 90
            assert await client.flush_cache() == {"pages": 7, "kept": 2}
            assert await client.detokenize(IDS) == TEXT
            assert (await client.generate(TEXT, params())).text == TEXT
            turns = [{"role": "user", "content": "hi"}]
            chat = await client.chat(turns, params(max_tokens=5))
            parts = [d.text async for d in await client.chat(turns, params(max_tokens=5),
                                                             stream=True)]
            assert "".join(parts) == chat.text == "hi"
            seen = {i: r async for i, r in client.run([Request(prompt="x" * 999),
                                                       Request(prompt="ab", params=params())])}
            assert isinstance(seen[0], InvalidRequest) and seen[1][0].text.startswith("abab")
            with pytest.raises(InvalidRequest):
                await client.generate("")

    run(asyncio.new_event_loop, main())


def test_tenant_and_priority(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncClient(engine.name, engine.base, tenant="acme") as client:
            assert await client.flush_cache() == {"pages": 7, "kept": 2}
            short = params(max_tokens=1)
            await client.generate("a", short, priority=3)
            assert [d.usage async for d in client.stream("b", short, priority=4)][-1] is not None
            await client.chat([{"role": "user", "content": "c"}], short, priority=5)
            with pytest.raises(InvalidRequest, match="^priority: "):
                await client.generate("d", short, priority=2**31)
        with pytest.raises(InvalidRequest, match="^tenant: "):
            AsyncClient(engine.name, engine.base, tenant="a b")

    run(asyncio.new_event_loop, main())
    assert [(s.tenant, s.priority) for s in engine.scheduler.submits] == [
        ("acme", 3), ("acme", 4), ("acme", 5)]


def test_cancelling_a_task_aborts(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncClient(engine.name, engine.base) as client:
            engine.allow = 1
            stream = client.stream(TEXT, params(max_tokens=200))
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(client.generate([TEXT, TEXT], params(max_tokens=200)))
            while len(engine.scheduler.submits) < 3:
                await client.tokenize("x")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.tokenize("x")
            assert len(engine.scheduler.cancels) == 3
            engine.allow = math.inf
            assert (await client.generate("ab", params(max_tokens=2))).text == "ab"

    run(asyncio.new_event_loop, main())


def test_a_restarted_engine_gets_requests_that_had_not_begun(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncClient(engine.name, engine.base, resume_timeout=30) as client:
            engine.allow = 1
            begun = client.stream("abc", params(max_tokens=200))
            await anext(begun)
            task = asyncio.create_task(client.generate("abc", params(max_tokens=3)))
            while len(engine.scheduler.submits) < 2:
                await client.tokenize("x")
            await asyncio.to_thread(engine.die)
            model = Path(engine.tokenizer._config.model.model)
            with FakeEngine(model, base=engine.base):
                assert (await task).text == "abc"
                with pytest.raises(UnknownRequest):
                    await anext(begun)
                assert (await client.generate("cd", params(max_tokens=2))).text == "cd"

    run(asyncio.new_event_loop, main())


def test_what_is_asked_while_there_is_no_engine_waits_for_the_next_one(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncClient(engine.name, engine.base, resume_timeout=30) as client:
            engine.allow = 0
            first = asyncio.create_task(client.generate("ab", params(max_tokens=2)))
            while not engine.scheduler.submits:
                await client.tokenize("x")
            await asyncio.to_thread(engine.die)
            while client._session.link is not None:
                await asyncio.sleep(0.01)
            late = [asyncio.create_task(task) for task in (
                client.generate("cd", params(max_tokens=2)), client.tokenize("x"))]
            await asyncio.sleep(0.05)
            model = Path(engine.tokenizer._config.model.model)
            with FakeEngine(model, base=engine.base):
                text, tokens = await asyncio.gather(*late)
                assert (text.text, len(tokens), (await first).text) == ("cd", 1, "ab")

    run(asyncio.new_event_loop, main())


def test_who_waits_for_the_next_engine_is_told_why_there_is_none(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncClient(engine.name, engine.base, resume_timeout=30) as client:
            engine.allow = 0
            tasks = [asyncio.create_task(client.generate("ab", params(max_tokens=2)))]
            while not engine.scheduler.submits:
                await client.tokenize("x")
            await asyncio.to_thread(engine.die)
            while client._session.link is not None:
                await asyncio.sleep(0.01)
            tasks.append(asyncio.create_task(client.generate("cd")))
            await asyncio.sleep(0.01)
            client.give_up("it has no memory left")
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, EngineUnavailable)
                assert error.message == "it has no memory left"
            with pytest.raises(EngineUnavailable, match="is running"):
                await client.tokenize("x")

    run(asyncio.new_event_loop, main())


def test_a_dying_engine_fails_every_task(engine: FakeEngine) -> None:
    async def main() -> None:
        client = AsyncClient(engine.name, engine.base)
        engine.allow = 1
        tasks = [asyncio.create_task(client.generate(TEXT, params(max_tokens=200)))
                 for _ in range(5)]
        while len(engine.scheduler.submits) < 5:
            await client.tokenize("x")
        await asyncio.to_thread(engine.die)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, EngineUnavailable) for e in found)
        with pytest.raises(EngineUnavailable):
            await client.generate("x")
        await client.close()

    run(asyncio.new_event_loop, main())


def test_two_readers_of_a_stream_send_one_request() -> None:
    """A shared stream is read by a task, while its caller asks for the tokens of the prompt."""
    sent: list[bytes] = []

    class Slow(AsyncioSession):
        """One that is not connected yet."""

        async def ready(self) -> None:
            await asyncio.sleep(0)

        def send(self, front: str, frame: bytes) -> None:
            sent.append(frame)

    async def run() -> None:
        resumable = Resumable(rid="k.1", seconds=1.0)
        client = ClientCalls(Slow(LocalTarget(Path("nowhere"))))
        stream = AsyncDeltaStream(client, Request(prompt=[1], resumable=resumable))
        waiting = [asyncio.ensure_future(stream.accepted()), asyncio.ensure_future(anext(stream))]
        await asyncio.sleep(0.01)
        assert len(sent) == 1 and not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()

    asyncio.run(run())
