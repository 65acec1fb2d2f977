"""Real processes: tokenizer and detokenizer killed under 20 streams, which nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_runtime import short_dir
from helpers_text import write_model

from actorium.actors.client import AsyncClient
from actorium.actors.engine import Engine
from actorium.actors.messages import ActorStatus
from actorium.actors.params import SamplingParams

STREAMS, TOKENS = 20, 3000
KILLS = ("detokenizer", "tokenizer", "detokenizer", "tokenizer")
Told = tuple[str, list[int], int, str | None]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model = write_model(tmp_path / "m", max_position_embeddings=1 << 14)
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
    counts = [0] * STREAMS
    async with AsyncClient(engine.name, engine.config.runtime.run_dir) as client:
        tasks = []
        for quarter, role in enumerate(KILLS):
            first = quarter * STREAMS // 4
            tasks += [asyncio.create_task(told(client, n, counts))
                      for n in range(first, first + STREAMS // 4)]
            if kill:
                while not any(counts[first:first + STREAMS // 4]):
                    await asyncio.sleep(0.005)
                assert not all(task.done() for task in tasks)
                await killed(client, role)
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)


def test_streams_outlive_tokenizer_and_detokenizer(engine: Engine) -> None:
    undisturbed = asyncio.run(everything(engine, kill=False))
    assert all(len(ids) == TOKENS and reason == "length" for _, ids, _, reason in undisturbed)
    disturbed = asyncio.run(everything(engine, kill=True))
    for mine, other in zip(disturbed, undisturbed, strict=True):
        assert mine == other
