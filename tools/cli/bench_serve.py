"""`actorium bench serve`: latency and throughput under load, through the client."""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.client_async import AsyncClient
from actorium.actors.config import Config, RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.gateway.actor import where
from actorium.actors.messages import Status
from actorium.actors.runtime import rundir
from actorium.tools.bench import load, offline, report, serving
from actorium.tools.bench.http import Http, http_stream
from actorium.tools.cli.engines import own_engine
from actorium.tools.cli.flags import Parsed, parse

ABOUT = """Load on a serving engine: one of its own, or with --name NAME one that runs already.
Random token-id prompts, or the demo model's tasks as chats."""
PROG = "actorium bench serve [MODEL]"


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The load, and where the figures go."""

    dataset: str = "random"
    """random (token ids) | demo (chats on the demo model's tasks)."""
    num_prompts: int = 100
    """Requests."""
    request_rate: float = math.inf
    """Requests a second; inf = all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distributed gaps: 1 = Poisson, less = bursts."""
    max_concurrency: int = 0
    """Requests under way at once; 0 = any number."""
    input_len: int = 128
    """Tokens of a random prompt."""
    output_len: int = 128
    """Tokens to generate, at most those of the demo's answers."""
    range_ratio: float = 0.0
    """Lengths vary by this share of their mean."""
    temperature: float = 0.0
    """Of sampling."""
    load_seed: int = 0
    """Of prompts and gaps."""
    warm_ups: int = 1
    """Requests before the clock starts."""
    shape: str | None = None
    """Random weights of this shape: S06, TINY, HYB, a config.json (implies --load-format dummy)."""
    http: str | None = None
    """Through HTTP instead of the SDK: self (the engine's own gateway) | http://HOST:PORT."""
    json: str | None = None
    """File for the figures."""


def run(argv: list[str]) -> int:
    """Entry of the command."""
    import tempfile
    from pathlib import Path

    parsed = parse(PROG, argv, ServeOptions, ABOUT)
    options = parsed.options
    _check(options)
    if options.http not in (None, "self"):
        return _report(asyncio.run(_measure_url(parsed.config, options)), options)
    running = "name" in parsed.written and parsed.config.runtime.name != RuntimeConfig().name
    if running:
        result = asyncio.run(_measure(parsed.config, options))
    else:
        with tempfile.TemporaryDirectory(prefix="actorium-bench-") as folder:
            config = _config(parsed, Path(folder))
            with own_engine(config) as engine:
                runtime = msgspec.structs.replace(config.runtime, name=engine.name)
                mine = msgspec.structs.replace(config, runtime=runtime)
                result = asyncio.run(_measure(mine, options))
    return _report(result, options)


def _report(result: dict[str, Any], options: ServeOptions) -> int:
    print(serving.table(result))
    if options.json:
        report.write_json(options.json, result)
    return 0 if not result["failed"] else 1


def _check(options: ServeOptions) -> None:
    for name, low in (("num_prompts", 1), ("max_concurrency", 0), ("input_len", 1),
                      ("output_len", 1), ("warm_ups", 0)):
        if getattr(options, name) < low:
            raise BadConfig(f"--{name.replace('_', '-')}: must be at least {low}, "
                            f"got {getattr(options, name)}", name)
    for name in ("request_rate", "burstiness"):
        if not getattr(options, name) > 0:
            raise BadConfig(f"--{name.replace('_', '-')}: must be above 0, "
                            f"got {getattr(options, name)}", name)
    if not 0 <= options.range_ratio < 1:
        raise BadConfig(f"--range-ratio: must be at least 0 and below 1, got "
                        f"{options.range_ratio}", "range_ratio")
    if options.dataset not in load.DATASETS:
        raise BadConfig(f"--dataset: must be {' or '.join(load.DATASETS)}, got "
                        f"{options.dataset!r}", "dataset")


def _config(parsed: Parsed[ServeOptions], folder: Any) -> Config:
    """Token ids need no tokenizer; a shape means random weights."""
    config, options = parsed.config, parsed.options
    model = config.model
    if options.dataset == "random" and options.http is None:
        model = msgspec.structs.replace(model, skip_tokenizer=True)
    if options.shape is not None:
        if "model" in parsed.written or options.dataset != "random":
            raise BadConfig("--shape: goes with random prompts and without a model", "shape")
        path = offline.shape_dir(options.shape, folder)
        model = msgspec.structs.replace(model, model=str(path), load_format="dummy")
    gateway = config.gateway
    if options.http is not None and gateway.port is None:
        gateway = msgspec.structs.replace(gateway, port=0)
    return msgspec.structs.replace(config, model=model, gateway=gateway)


async def _measure(config: Config, options: ServeOptions) -> dict[str, Any]:
    async with AsyncClient(config.runtime.name, config.runtime.run_dir) as client:
        await client.wait_ready()
        stream = serving.sdk_stream(client, options.temperature)
        http = None if options.http is None else Http(_own_url(config))
        if http is not None:
            stream = http_stream(http, None, options.temperature)
        await _drive(stream, _asks(config, options, options.warm_ups, options.load_seed + 1),
                     options, warm=True)
        before = _gauges(await client.status())
        result = await _drive(stream, _asks(config, options, options.num_prompts,
                                            options.load_seed), options)
        await asyncio.sleep(2 * config.runtime.heartbeat)  # the last gauges come with a beat
        after = _gauges(await client.status())
        if http is not None:
            http.close()
    return result | {"speculation": serving.acceptance(before, after),
                     "speculative": config.speculation.speculative}


async def _measure_url(config: Config, options: ServeOptions) -> dict[str, Any]:
    """Of whatever listens there. Random ids are from the vocabulary of `config`'s model, which is
    to be the same one or a smaller one."""
    http = Http(options.http or "")
    key = config.gateway.api_key
    stream = http_stream(http, None, options.temperature, key)
    await _drive(stream, _asks(config, options, options.warm_ups, options.load_seed + 1), options,
                 warm=True)
    result = await _drive(stream, _asks(config, options, options.num_prompts, options.load_seed),
                          options)
    http.close()
    return result


async def _drive(stream: serving.Stream, asks: list[load.Ask], options: ServeOptions,
                 warm: bool = False) -> dict[str, Any]:
    if warm:
        done, _ = await serving.drive(stream, asks, [0.0] * len(asks), 1, lambda n: None)
        for one in done:
            if one.error is not None and options.http is not None:
                raise EngineUnavailable(one.error.partition(": ")[2])
        return {}
    times = load.arrivals(len(asks), options.request_rate, options.burstiness, options.load_seed)
    found, seconds = await serving.drive(stream, asks, times, options.max_concurrency,
                                         lambda n: _say(f"{n}/{len(asks)}"))
    _say("")
    return {**serving.figures(found, seconds), "dataset": options.dataset,
            "max_concurrency": options.max_concurrency or None,
            "request_rate": str(options.request_rate), "http": options.http}


def _own_url(config: Config) -> str:
    found = where(rundir.engine_dir(config.runtime.name, config.runtime.run_dir))
    if found is None:
        raise BadConfig(f"--http: the engine {config.runtime.name!r} serves no HTTP", "http")
    return found.url


def _asks(config: Config, options: ServeOptions, number: int, seed: int) -> list[load.Ask]:
    if options.dataset == "demo":
        return load.demo_asks(number, options.output_len, seed)
    shape = load.Shape(options.input_len, options.output_len, options.range_ratio)
    return load.random_asks(number, shape, offline.vocabulary(config), seed)


def _gauges(status: Status) -> dict[str, float]:
    return next((actor.gauges for actor in status.actors if actor.role == "scheduler"), {})


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
