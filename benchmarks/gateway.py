"""What HTTP costs over the bare SDK, with a worker without a model.

Three figures, each beside the SDK's in the same run: CPU microseconds of the gateway for a streamed
token with 64 streams at once (of the SDK's own client for the same load: its whole process, which
is a client and nothing else); milliseconds to the first token of a stream alone; one-token
completions a second, 32 under way at once. A worker without a model is faster than any reader, so
that several tokens of a stream become one event; the first figure is measured with the demo model
as well, at whose pace most tokens are told one by one.

python benchmarks/gateway.py --json benchmarks/results/gateway.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import uvloop

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.gateway.actor import where
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.http_client import Http

STREAMS, AT_ONCE = 64, 32
PROMPT = list(range(10, 26))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def params(tokens: int) -> SamplingParams:
    """Of a request for so many tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def body(tokens: int, stream: bool = True) -> dict[str, Any]:
    """The same over HTTP."""
    return {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": stream}


async def many(number: int, one: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    """(sum of what they return, seconds) of so many at once."""
    began = perf_counter()
    found = await asyncio.gather(*(one() for _ in range(number)))
    return sum(found), perf_counter() - began


async def cpu(client: AsyncClient, http: Http, pid: int, tokens: int) -> dict[str, float]:
    """CPU of a streamed token."""

    async def over_http() -> int:
        return len([1 async for _ in http.events("/v1/completions", body(tokens))])

    async def over_chat() -> int:
        ask = body(tokens) | {"messages": [{"role": "user", "content": "Tell me."}]}
        return len([1 async for _ in http.events("/v1/chat/completions", ask)])

    async def over_sdk() -> int:
        return len([1 async for _ in client.stream(PROMPT, params(tokens))])

    count, out = STREAMS * tokens, dict[str, float]()
    for name, one in (("completions", over_http), ("chat", over_chat)):
        await many(STREAMS, one)
        before = cpu_seconds(pid)
        events, seconds = await many(STREAMS, one)
        out |= {f"gateway_{name}_cpu_us": 1e6 * (cpu_seconds(pid) - before) / count,
                f"{name}_events_per_token": events / count,
                f"{name}_tokens_per_s": count / seconds}
    before = process_time()
    deltas, seconds = await many(STREAMS, over_sdk)
    return out | {"sdk_client_cpu_us": 1e6 * (process_time() - before) / count,
                  "sdk_deltas_per_token": deltas / count, "sdk_tokens_per_s": count / seconds}


async def first_tokens(client: AsyncClient, http: Http, rounds: int) -> dict[str, float]:
    """Milliseconds to the first token, the two by turns."""
    seen: dict[str, list[float]] = {"sdk": [], "http": []}
    for number in range(rounds + 20):
        began = perf_counter()
        async for _ in client.stream(PROMPT, params(1)):
            sdk = perf_counter() - began
            break
        began, first = perf_counter(), 0.0
        async for _ in http.events("/v1/completions", body(1)):
            first = first or perf_counter() - began
        if number >= 20:
            seen["sdk"].append(1e3 * sdk)
            seen["http"].append(1e3 * first)
    out = {f"ttft_{name}_ms_{what}": value for name, values in seen.items()
           for what, value in (("p50", statistics.median(values)),
                               ("p99", sorted(values)[int(0.99 * len(values))]))}
    return out | {f"ttft_added_ms_{what}": out[f"ttft_http_ms_{what}"] - out[f"ttft_sdk_ms_{what}"]
                  for what in ("p50", "p99")}


async def requests(client: AsyncClient, http: Http, pid: int, number: int) -> dict[str, float]:
    """One-token completions a second."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def over_http() -> int:
        async with gate:
            return len([1 async for _ in http.events("/v1/completions", body(1, stream=False))])

    async def over_sdk() -> int:
        async with gate:
            await client.generate(PROMPT, params(1))
            return 1

    await many(AT_ONCE, over_http)
    _, sdk = await many(number, over_sdk)
    before = cpu_seconds(pid)
    _, seconds = await many(number, over_http)
    return {"http_requests_per_s": number / seconds, "sdk_requests_per_s": number / sdk,
            "gateway_cpu_us_per_request": 1e6 * (cpu_seconds(pid) - before) / number}


async def measure(engine: Engine, given: argparse.Namespace, paced: bool) -> dict[str, float]:
    """All of it; paced: the first figure alone."""
    place = engine_dir(engine.name)
    assert isinstance(place, Path)
    found = where(place)
    assert found is not None
    out: dict[str, float] = {}
    async with AsyncClient(place) as client:
        actors = (await client.status()).actors
        pid = next(actor.pid for actor in actors if actor.role == "gateway-0")
        http = Http(found.url)
        out |= await cpu(client, http, pid, given.tokens)
        if paced:
            http.close()
            return out
        out |= await first_tokens(client, http, given.rounds)
        out |= await requests(client, http, pid, given.requests)
        http.close()
    return out


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=200, help="of each of the 64 streams")
    parser.add_argument("--rounds", type=int, default=200, help="of first tokens")
    parser.add_argument("--requests", type=int, default=1000, help="of one token")
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args()
    out: dict[str, Any] = {"cores": os.cpu_count()}
    for name, paced in (("null_worker", False), ("demo_model", True)):
        with Engine("", null_worker=not paced, port=0, max_num_seqs=STREAMS) as engine:
            out[name] = uvloop.run(measure(engine, given, paced))
        print(name)
        for key, value in out[name].items():
            print(f"  {key:32}{value:12.3f}")
    if given.json:
        Path(given.json).write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
