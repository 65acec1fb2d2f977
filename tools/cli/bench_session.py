"""The server that `actorium bench serve` asks: an engine of its own, a running one by name, or any
server; how it is asked, and what it reports of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.gateway.actor import where
from actorium.actors.messages import Status
from actorium.actors.runtime import rundir
from actorium.tools.bench.datasets.sample import Tokens, TokenVocabulary
from actorium.tools.bench.figures import counters
from actorium.tools.bench.http_client import GET_SECONDS, Http
from actorium.tools.bench.load_driver import Stream
from actorium.tools.bench.server_backends import (
    CHAT,
    ENDPOINTS,
    SDK,
    Asking,
    http_stream,
    sdk_stream,
)
from actorium.tools.cli.bench_command import BenchServeOptions
from actorium.tools.cli.command_line import Parsed
from actorium.tools.cli.status import announced_wait, running_dir

SELF = "self"
"""--base-url of the engine's own HTTP API."""
LOCAL = "127.0.0.1"
PORTS = {"sglang": 30000, "sglang-native": 30000, "sglang-oai": 30000, "sglang-oai-chat": 30000,
         "llama.cpp": 8080}
"""Backend -> the port that its servers listen at; others 8000."""
KNOCK_SECONDS = 1.0


class BenchTarget(NamedTuple):
    backend: str
    endpoint: str
    """"" with the client."""
    url: str | None
    """URL of a running server; None = an engine of our own."""
    starts_engine: bool
    """Start an engine."""
    note: str = ""
    """What the user should know of the choice."""


def target_of(options: BenchServeOptions, written: Mapping[str, str], named: bool,
              answers: Callable[[str], bool]) -> BenchTarget:
    """written: which flags were. named: --name says which engine of ours. answers: whether a server
    of models is at a URL, which is looked at only if a backend was named and no place.

    Raises `BadConfig`.
    """
    url, note = _url(options), ""
    given = options.backend
    if url is None and not named and given not in (None, SDK) and options.base_url != SELF:
        here = f"http://{LOCAL}:{PORTS.get(given or '', 8000)}"
        found = answers(here)
        url = here if found else None
        note = (f"asking the server at {here}" if found else
                f"no server at {here}: an engine of its own is started")
    backend = given or (SDK if url is None and options.base_url != SELF else "openai")
    if backend == SDK and (url is not None or options.base_url == SELF):
        raise BadConfig("--backend: actorium is the client of engines by --name; a URL needs "
                        f"another one: {', '.join(ENDPOINTS)}", "backend")
    if backend == SDK and options.endpoint is not None:
        raise BadConfig("--endpoint: needs --backend openai, or another one that speaks HTTP",
                        "endpoint")
    endpoint = options.endpoint or ENDPOINTS.get(backend, "")
    if options.name == "demo" and options.endpoint is None and backend != SDK:
        endpoint = CHAT
    return BenchTarget(backend, endpoint, url, url is None and not named, note)


def _url(options: BenchServeOptions) -> str | None:
    if options.base_url is not None:
        if options.host is not None or options.port is not None:
            raise BadConfig("--base-url: cannot be combined with --host and --port", "base_url")
        return None if options.base_url == SELF else options.base_url
    if options.host is None and options.port is None:
        return None
    host = {None: LOCAL, "0.0.0.0": LOCAL}.get(options.host, options.host)
    port = options.port or PORTS.get(options.backend or "", 8000)
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def answers_models(url: str) -> bool:
    """Whether a server that lists models is there."""
    try:
        with urlopen(f"{url}/v1/models", timeout=KNOCK_SECONDS) as answer:
            return bool(answer.status == 200 and b'"data"' in answer.read(1 << 20))
    except (URLError, OSError, ValueError):
        return False


EXACT = ("random", "sonnet", "generated-shared-prefix")
"""Datasets that imply --ignore-eos unless it is given."""
GENERATED = ("random", "generated-shared-prefix")
"""Datasets of random tokens."""
ANY_VOCABULARY = 1000
"""Ids below this are in every vocabulary: random prompts for a model whose files are elsewhere."""
SETTLE = 1.0
"""Seconds after which a server's counters hold what it has done."""
POLL = 0.2
"""Seconds between looks at a server that is not there yet."""


class Session(NamedTuple):
    stream: Stream
    tokens: Tokens
    counters: Callable[[], Awaitable[dict[str, float]]]
    """Returns counters of speculation, as `figures.acceptance` takes them."""
    flush: Callable[[], Awaitable[object]]
    """Forget cached prefixes."""
    model_id: str


def session_of(parsed: Parsed[BenchServeOptions], target: BenchTarget
               ) -> contextlib.AbstractAsyncContextManager[Session]:
    """Raises `EngineUnavailable` on entering if no server answers."""
    return _server(parsed, target) if target.url is not None else _engine(parsed, target)


@contextlib.asynccontextmanager
async def _engine(parsed: Parsed[BenchServeOptions], target: BenchTarget) -> AsyncIterator[Session]:
    """An engine of ours, through the client or through its HTTP API."""
    config, options = parsed.config, parsed.options
    async with AsyncClient(config.runtime.name, config.runtime.run_dir) as client:
        limit = config.runtime.start_timeout
        if not target.starts_engine:
            if options.ready_check_timeout_sec:
                limit = options.ready_check_timeout_sec
            else:
                running_dir(config.runtime)
        with announced_wait(f"the engine {config.runtime.name!r} to be ready", limit):
            await client.wait_ready(limit)
        info = await client.server_info()
        model = info["model_path"] if info["has_tokenizer"] else None
        if options.tokenizer is not None:
            model = options.tokenizer
        tokens = Tokens(model, TokenVocabulary(info["vocab_size"]))
        asking = _asking(parsed, target, None)

        async def read() -> dict[str, float]:
            await asyncio.sleep(2 * config.runtime.heartbeat)  # the last gauges come with a beat
            return _gauges(await client.status())

        if target.backend == SDK:
            yield Session(sdk_stream(client, asking), tokens, read, client.flush_cache,
                          info["model"])
            return
        # Its certificate need not name 127.0.0.1; that it is ours, the run directory says.
        with contextlib.closing(Http(_own_url(config), "--base-url", verify=False)) as http:
            yield Session(http_stream(http, target.endpoint, asking), tokens, read,
                          client.flush_cache, info["model"])


@contextlib.asynccontextmanager
async def _server(parsed: Parsed[BenchServeOptions], target: BenchTarget) -> AsyncIterator[Session]:
    options, config = parsed.options, parsed.config
    with contextlib.closing(Http(target.url or "", "--base-url", not options.insecure)) as http:
        headers = _headers(parsed)
        listed = await _models(http, headers, options.ready_check_timeout_sec)
        model = config.model.model if "model" in parsed.written else next(iter(listed), None)
        tokens = _local_tokens([options.tokenizer] if options.tokenizer is not None
                               else [model, *listed.values()])
        if tokens.tokenizer is None and options.name in GENERATED:
            print(f"actorium: no tokenizer of {model or 'the model'} is on this machine: random "
                  f"ids are below {ANY_VOCABULARY}", file=sys.stderr)

        async def read() -> dict[str, float]:
            return await _counters(http, headers)

        async def flush() -> object:
            return [event async for event in http.events("/flush_cache", {}, headers)]

        name = _served_name(parsed) or model
        yield Session(http_stream(http, target.endpoint, _asking(parsed, target, name)), tokens,
                      read, flush, model or "")


async def _models(http: Http, headers: str, patience: float) -> dict[str, str]:
    """Returns the model ids a server lists, with each model's path if reported; waits until it
    listens. Raises `EngineUnavailable` if it does not."""
    until = monotonic() + patience
    with announced_wait(f"a server at {http.url}", patience + GET_SECONDS):
        return await _listed(http, headers, until)


async def _listed(http: Http, headers: str, until: float) -> dict[str, str]:
    while True:
        try:
            data = msgspec.json.decode(await http.get("/v1/models", headers), type=dict[str, Any])
            return {str(model["id"]): str(model.get("root") or model["id"])
                    for model in data["data"]}
        except EngineUnavailable as error:
            late = monotonic() >= until
            if error.param is None and late:
                return {}  # it is there, but lists no models
            if late:
                raise
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            return {}
        await asyncio.sleep(POLL)


def _local_tokens(models: Sequence[str | None]) -> Tokens:
    """Returns the tokenizer of the first of the models that has one on this machine; none, if none
    has: `Tokens.need` then says what the first one lacks."""
    for model in models:
        found = Tokens(model, TokenVocabulary(ANY_VOCABULARY)).tokenizer
        if found is not None:
            return Tokens(model, found.vocabulary)
    return Tokens(models[0], TokenVocabulary(ANY_VOCABULARY))


async def _counters(http: Http, headers: str) -> dict[str, float]:
    """Returns the counters of speculation in a server's /metrics."""
    try:
        found = counters((await http.get("/metrics", headers)).decode(errors="replace"))
        if any(found.values()):
            await asyncio.sleep(SETTLE)
            found = counters((await http.get("/metrics", headers)).decode(errors="replace"))
        return found
    except EngineUnavailable:
        return {}


def _served_name(parsed: Parsed[BenchServeOptions]) -> str | None:
    """--served-model-name, which for a server at a URL is the name to ask it by."""
    names = parsed.config.model.served_model_name
    return names[0] if names and "served_model_name" in parsed.written else None


def _headers(parsed: Parsed[BenchServeOptions]) -> str:
    pairs = parsed.options.pairs("header")
    key = parsed.config.gateway.api_key
    if key is not None:
        pairs = {"Authorization": f"Bearer {key}"} | pairs
    return "".join(f"{name}: {value}\r\n" for name, value in pairs.items())


def _asking(parsed: Parsed[BenchServeOptions], target: BenchTarget, model: str | None) -> Asking:
    options = parsed.options
    ignore = options.ignore_eos
    if "ignore_eos" not in parsed.written:
        ignore = options.name in EXACT or target.backend.startswith("sglang")
    return Asking(model, options.sampling, ignore, options.extra, _headers(parsed),
                  not options.disable_stream)


def _own_url(config: Config) -> str:
    found = where(rundir.engine_dir(config.runtime.name, config.runtime.run_dir))
    if found is None:
        raise BadConfig(f"--backend: the engine {config.runtime.name!r} serves no HTTP", "backend")
    return found.url


def _gauges(status: Status) -> dict[str, float]:
    return next((a.gauges for a in status.actors if a.role == "scheduler"), {})
