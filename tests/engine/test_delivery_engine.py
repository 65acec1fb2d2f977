"""Real processes: tokenizer and detokenizer killed under 20 streams, which nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_keys import free_ports, key_dir
from helpers_runtime import short_dir
from helpers_text import write_model

from actorium.actors.client import connection as client_link
from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.client import Client
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import ActorStatus
from actorium.actors.params import SamplingParams

STREAMS, TOKENS = 20, 1000
LONG = 100_000
"""Tokens of streams that end before they are whole, on the fastest machine too."""
KILLS = ("detokenizer", "tokenizer", "detokenizer", "tokenizer")
Told = tuple[str, list[int], int, str | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=1 << 17)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with short_dir() as base, Engine(model, null_worker=True, device="cpu", run_dir=str(base),
                                     restart=True, max_num_seqs=32) as engine:
        yield engine


async def actor(client: AsyncClient, role: str) -> ActorStatus:
    return next(a for a in (await client.status()).actors if a.role == role)


async def told(client: AsyncClient, number: int, counts: list[int]) -> Told:
    """All of one stream; counts[number] = its tokens so far."""
    # stop strings and half characters are in the random bytes of the null worker
    params = SamplingParams(max_tokens=TOKENS, seed=number, ignore_eos=True,
                            stop=["\x00\x01\x02"], logprobs=None)
    text, ids, completion, reason = "", [], 0, None
    async for delta in client.stream(f"stream {number}", params):
        text += delta.text
        ids += delta.token_ids
        counts[number] = len(ids)
        if delta.finish_reason is not None:
            assert delta.usage is not None
            completion, reason = delta.usage.completion_tokens, delta.finish_reason
    return text, ids, completion, reason


async def killed(client: AsyncClient, role: str) -> None:
    """Kill this actor, and wait for the next incarnation."""
    before = await actor(client, role)
    os.kill(before.pid, signal.SIGKILL)
    while (now := await actor(client, role)).epoch == before.epoch or now.phase == "loading":
        await asyncio.sleep(0.02)


async def everything(engine: Engine, kill: bool) -> list[Told]:
    """All streams; a quarter of them begins after each death."""
    counts, struck = [0] * STREAMS, 0
    async with AsyncClient(engine.name, engine.config.runtime.run_dir) as client:
        tasks = []
        for quarter, role in enumerate(KILLS):
            first = quarter * STREAMS // 4
            tasks += [asyncio.create_task(told(client, n, counts))
                      for n in range(first, first + STREAMS // 4)]
            if kill:
                while not any(counts[first:first + STREAMS // 4]):
                    await asyncio.sleep(0.005)
                # Where everything is starved but the engine, a quarter may be over already.
                struck += not all(task.done() for task in tasks)
                await killed(client, role)
        assert struck or not kill
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)


def test_streams_outlive_tokenizer_and_detokenizer(engine: Engine) -> None:
    undisturbed = asyncio.run(everything(engine, kill=False))
    assert all(len(ids) == TOKENS and reason == "length" for _, ids, _, reason in undisturbed)
    disturbed = asyncio.run(everything(engine, kill=True))
    for mine, other in zip(disturbed, undisturbed, strict=True):
        assert mine == other


def gauge(client: Client, name: str) -> float:
    """What the scheduler's last heartbeat says."""
    return next(a.gauges[name] for a in client.status().actors if a.role == "scheduler")


def test_a_client_that_does_not_read_gets_its_deltas_merged(
        engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3_000
    params = SamplingParams(max_tokens=count, seed=1, ignore_eos=True)
    monkeypatch.setattr(client_link, "HWM", 10)
    with Client(engine.name, engine.config.runtime.run_dir) as slow, engine.client as other:
        before = gauge(other, "tokens")
        stream = slow.stream("slow", params)
        while gauge(other, "tokens") < before + count:
            time.sleep(0.02)
        deltas = list(stream)
        ids = [token for delta in deltas for token in delta.token_ids]
        assert len(ids) == count and len(deltas) < count / 2
        assert other.generate("slow", params).token_ids == ids


def test_requests_of_a_client_that_vanished_are_aborted_soon(engine: Engine) -> None:
    params = SamplingParams(max_tokens=LONG, ignore_eos=True)
    with Client(engine.name, engine.config.runtime.run_dir) as other:
        gone = Client(engine.name, engine.config.runtime.run_dir)
        streams = [gone.stream(f"gone {n}", params) for n in range(8)]
        for stream in streams:
            next(stream)
        while gauge(other, "running") < 8:
            time.sleep(0.01)
        session = gone._session  # as when its process is killed: nothing is sent
        link, session.link = session.link, None
        assert link is not None
        link.close()
        begin, tokens = time.monotonic(), gauge(other, "tokens")
        while gauge(other, "running"):
            time.sleep(0.01)
        assert time.monotonic() - begin < 10.0  # 0.5 to 1 s; the gauge itself is 0.25 s old
        assert gauge(other, "tokens") < tokens + 8 * (LONG - 1000)


def test_requests_that_only_wait_are_aborted_with_their_client(model: Path) -> None:
    """Nothing that is told them fails, for there is nothing to tell; by ipc and by tcp."""
    long = SamplingParams(max_tokens=LONG, ignore_eos=True)
    with short_dir() as base:
        target, keys = f"tcp://127.0.0.1:{free_ports()}", str(key_dir(base, "ann"))
        with Engine(model, null_worker=True, device="cpu", run_dir=str(base), max_num_seqs=8,
                    drain_timeout=0.5, listen=target, keys_dir=keys) as engine:
            running = [engine.client.stream("x", long) for _ in range(8)]
            for stream in running:
                next(stream)
            for gone in (Client(engine.name, str(base)), Client(target, key=base / "ann.key")):
                waiting = [gone.stream("x", long) for _ in range(8)]
                while gauge(engine.client, "waiting") < len(waiting):
                    time.sleep(0.01)
                session = gone._session  # as when its process is killed: nothing is sent
                link, session.link = session.link, None
                assert link is not None
                link.close()
                begin = time.monotonic()
                while gauge(engine.client, "waiting"):
                    time.sleep(0.01)
                assert time.monotonic() - begin < 10.0  # 0.5 to 1 s; the gauge itself is 0.25 s old
                assert gauge(engine.client, "running") == len(running), "none has made room"
