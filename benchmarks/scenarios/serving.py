"""Serving under load: one flag at several values, and what HTTP costs over the bare SDK."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import uvloop
from harness import Row, Rows, cpu_seconds, p99, scenario, take_turns

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.gateway.actor import where
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.http_client import Http

MODES = ["off", "auto", "mtp:1,fixed", "mtp:2,fixed"]
SHOWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
         "median_itl_per_token_ms", "p99_itl_per_token_ms", "median_e2el_ms",
         "spec_decode_acceptance_length", "spec_decode_per_position_acceptance_rates")


@scenario
def vary(*flags: str, vary: str = "speculative", modes: list[str] = MODES, rounds: int = 3) -> Rows:
    """`actorium bench serve` with a flag at several values, by turns; other flags are passed on.

    Reported is the median round by output throughput. The mode "default" leaves the flag out.
    Default: speculative decoding off, adaptive and fixed.
    """
    found = take_turns({mode: partial(served, vary, mode, flags) for mode in modes}, rounds)
    for mode, runs in found.items():
        runs.sort(key=lambda run: float(run["output_throughput"]))
        yield {"mode": f"--{vary} {mode}", "output_throughput_of_rounds":
               [run["output_throughput"] for run in runs],
               **{key: runs[len(runs) // 2][key] for key in SHOWN if key in runs[0]}}


def served(flag: str, mode: str, flags: tuple[str, ...]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        subprocess.run([sys.executable, "-m", "actorium.tools.cli", "bench", "serve",
                        *(() if mode == "default" else (f"--{flag}", mode)),
                        "--json", str(path), *flags], check=True, stdout=subprocess.DEVNULL)
        result: Row = json.loads(path.read_text())
        return result


# --- HTTP -----------------------------------------------------------------------------------------

STREAMS = 64
PROMPT = list(range(10, 26))


def params(tokens: int) -> SamplingParams:
    """Measures a request for so many tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


class ServedApis:
    def __init__(self, client: AsyncClient, http: Http, pid: int) -> None:
        self.client, self.http, self.gateway = client, http, pid

    async def over_http(self, tokens: int, chat: bool = False) -> int:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0,
                                "ignore_eos": True, "stream": True}
        if chat:
            body["messages"] = [{"role": "user", "content": "Tell me."}]
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return len([1 async for _ in self.http.events(path, body)])

    async def over_sdk(self, tokens: int) -> int:
        """The number of deltas of a request."""
        return len([1 async for _ in self.client.stream(PROMPT, params(tokens))])

    async def streamed(self, tokens: int) -> Row:
        """Processor time of a streamed token: of the gateway, and of the SDK's own client for the
        same load, which is this process."""
        count, out = STREAMS * tokens, Row()
        for name, chat in (("completions", False), ("chat", True)):
            await many(STREAMS, partial(self.over_http, tokens, chat))
            before = cpu_seconds(self.gateway)
            events, seconds = await many(STREAMS, partial(self.over_http, tokens, chat))
            out |= {f"gateway_{name}_cpu_us": 1e6 * (cpu_seconds(self.gateway) - before) / count,
                    f"{name}_events_per_token": events / count,
                    f"{name}_tokens_per_s": count / seconds}
        before = process_time()
        deltas, seconds = await many(STREAMS, partial(self.over_sdk, tokens))
        return out | {"sdk_client_cpu_us": 1e6 * (process_time() - before) / count,
                      "sdk_deltas_per_token": deltas / count, "sdk_tokens_per_s": count / seconds}

    async def first_tokens(self, rounds: int) -> Row:
        """Milliseconds of a one-token stream, the two by turns, and what HTTP adds."""
        seen: dict[str, list[float]] = {"sdk": [], "http": []}
        for _ in range(rounds + 20):
            for name, call in (("sdk", self.over_sdk), ("http", self.over_http)):
                began = perf_counter()
                await call(1)
                seen[name].append(1e3 * (perf_counter() - began))
        out = {f"ttft_{name}_ms_{what}": of(values[20:]) for name, values in seen.items()
               for what, of in (("p50", statistics.median), ("p99", p99))}
        return out | {f"ttft_added_ms_{what}":
                      out[f"ttft_http_ms_{what}"] - out[f"ttft_sdk_ms_{what}"]
                      for what in ("p50", "p99")}


async def many(number: int, one: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    """(sum of what they return, seconds) of so many at once."""
    began = perf_counter()
    found = await asyncio.gather(*(one() for _ in range(number)))
    return sum(found), perf_counter() - began


async def measured(engine: Engine, tokens: int, rounds: int) -> list[Row]:
    place = engine_dir(engine.name)
    assert isinstance(place, Path)
    found = where(place)
    assert found is not None
    async with AsyncClient(place) as client:
        pid = next(actor.pid for actor in (await client.status()).actors
                   if actor.role == "gateway-0")
        apis = ServedApis(client, Http(found.url), pid)
        rows = [await apis.streamed(tokens)]
        if rounds:
            rows.append(await apis.first_tokens(rounds))
        apis.http.close()
        return rows


@scenario
def gateway(tokens: int = 200, rounds: int = 200) -> Rows:
    """What HTTP costs over the SDK: CPU of a streamed token, and first tokens.

    64 streams at once, and a lone stream. A worker without a model is faster than any reader, so
    that several tokens of a stream become one event; the first figure is measured with the demo
    model as well, at whose pace most tokens arrive one by one.
    """
    for worker, own in (("null worker", rounds), ("demo model", 0)):
        with Engine("", null_worker=bool(own), port=0, max_num_seqs=STREAMS) as engine:
            for row in uvloop.run(measured(engine, tokens, own)):
                yield {"worker": worker, **row}
