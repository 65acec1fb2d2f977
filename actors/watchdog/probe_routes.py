"""The probes' ASGI application: paths in, judgements and metrics out.

`/livez` fails when recovery is impossible: start the container again. `/readyz` (and `/health`,
`/ping`, `/v2/health/ready`) fails while a request that came now would have to wait for more than
its turn: send it elsewhere. `/startupz` fails until the engine was ready once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from actorium import __version__
from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.http.allowed_hosts import AllowedHosts, check_head
from actorium.actors.runtime.process import process_usage
from actorium.actors.runtime.roles import SCHEDULER
from actorium.actors.watchdog import metrics
from actorium.actors.watchdog.readiness import EngineCondition

GENERATE_SECONDS = 10.0
"""How long `/health_generate` waits for its token."""
GENERATE_PAUSE = 1.0
"""Seconds from the start of a generation to that of the next one, however many ask."""
PROMPT = [1]
POSTED = frozenset({"/ping", "/health_generate"})
"""Paths that may be asked by POST as well; the body is ignored."""
JSON, TEXT = "application/json", "text/plain; charset=utf-8"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Respond = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ProbedEngine(Protocol):
    """What the probes ask of the watchdog's core."""

    def condition(self, now: float) -> EngineCondition: ...

    def metrics_input(self, now: float) -> metrics.MetricsInput: ...


class ProbeResponse(NamedTuple):
    status: int
    body: bytes
    kind: str = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_response(status: int, retry_after: int = 0, **fields: Any) -> ProbeResponse:
    """A JSON object."""
    headers = ((b"retry-after", str(retry_after).encode()),) if retry_after else ()
    return ProbeResponse(status, msgspec.json.encode(fields), JSON, headers)


class ProbeApp:
    """See the module. One for an engine; everything runs on the watchdog's loop."""

    def __init__(self, engine: ProbedEngine, run_dir: Path, clock: Callable[[], float],
                 hosts: AllowedHosts | None = None) -> None:
        """hosts: the names that the port goes by; None = any."""
        self._engine, self._clock, self._hosts = engine, clock, hosts
        self._trial = GenerateProbe(run_dir, clock)
        self._routes: dict[str, Callable[[str], ProbeResponse]] = {
            "/livez": self._live, "/v2/health/live": self._live,
            "/readyz": self._ready, "/health": self._ready, "/ping": self._ready,
            "/v2/health/ready": self._ready,
            "/startupz": self._startup, "/load": self._load, "/get_load": self._get_load,
            "/version": self._version, "/metrics": self._metrics}

    async def __call__(self, scope: Scope, receive: Receive, send: Respond) -> None:
        if scope["type"] != "http":
            return
        response = self._refuse(scope) or await self._answer(scope)
        headers = [(b"content-type", response.kind.encode()), (b"cache-control", b"no-store"),
                   (b"x-content-type-options", b"nosniff"),
                   (b"content-length", str(len(response.body)).encode()), *response.headers]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else response.body
        await send({"type": "http.response.body", "body": body})

    def _refuse(self, scope: Scope) -> ProbeResponse | None:
        """What is not meant for this server, or not to be understood."""
        if (wrong := check_head(scope, self._hosts)) is None:
            return None
        refused = json_response(wrong.status, error={
            "message": wrong.message, "type": wrong.code, "code": wrong.status})
        return refused._replace(headers=((b"connection", b"close"),))

    async def _answer(self, scope: Scope) -> ProbeResponse:
        path, method = scope["path"], scope["method"]
        route = self._routes.get(path)
        if route is None and path != "/health_generate":
            return json_response(404, error={"message": f"no such path: {path[:200]}",
                                             "type": "not_found", "code": 404})
        allowed = ("GET", "HEAD", "POST") if path in POSTED else ("GET", "HEAD")
        if method not in allowed:
            refused = json_response(405, error={
                "message": f"{method[:20]} is not allowed at {path}",
                "type": "method_not_allowed", "code": 405})
            return refused._replace(headers=((b"allow", ", ".join(allowed).encode()),))
        if route is None:
            return await self._generate()
        accept = next((v for k, v in scope["headers"] if k == b"accept"), b"")
        return route(accept.decode("latin-1"))

    def close(self) -> None:
        """End a generation under way, and its connection."""
        self._trial.close()

    # --- the probes ---

    def _live(self, _accept: str) -> ProbeResponse:
        now = self._engine.condition(self._clock())
        if now.live:
            return json_response(200, live=True)
        return json_response(503, live=False, why=now.why)

    def _ready(self, _accept: str) -> ProbeResponse:
        now = self._engine.condition(self._clock())
        if now.ready:
            return json_response(200, ready=True)
        return json_response(503, now.retry_after, ready=False, why=now.why)

    def _startup(self, _accept: str) -> ProbeResponse:
        time = self._clock()
        now = self._engine.condition(time)
        actors = {actor.role: {"phase": actor.phase, "detail": actor.detail,
                              "seconds": round(max(0.0, time - actor.moved), 3)}
                  for actor in self._engine.metrics_input(time).actors.values()}
        if now.started:
            return json_response(200, started=True, actors=actors)
        return json_response(503, now.retry_after, started=False, why=now.why, actors=actors)

    async def _generate(self) -> ProbeResponse:
        now = self._engine.condition(self._clock())
        if not now.ready:
            return json_response(503, now.retry_after, ready=False, why=now.why)
        why, seconds = await self._trial.ask()
        if why:
            return json_response(503, 1, ready=False, why=why)
        return json_response(200, ready=True, tokens=1, seconds=round(seconds, 6))

    # --- what it does ---

    def _load(self, _accept: str) -> ProbeResponse:
        scheduler = self._engine.metrics_input(self._clock()).actors.get(SCHEDULER)
        gauges = scheduler.gauges if scheduler is not None else {}
        counts = {name: int(gauges.get(name, 0)) for name in
                  ("running", "waiting", "waiting_requests", "free_pages", "held_pages",
                   "cached_pages")}
        return json_response(200, server_load=counts["running"] + counts["waiting"], **counts)

    def _get_load(self, _accept: str) -> ProbeResponse:
        """As SGLang's; its tokens are those that the pages of sequences have room for."""
        facts = self._engine.metrics_input(self._clock())
        scheduler = facts.actors.get(SCHEDULER)
        gauges = scheduler.gauges if scheduler is not None else {}
        waiting, running, pages = (int(gauges.get(name, 0)) for name in
                                   ("waiting", "running", "held_pages"))
        return ProbeResponse(200, msgspec.json.encode([{
            "dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting,
            "num_tokens": pages * facts.config.memory.page_size}]))

    def _version(self, _accept: str) -> ProbeResponse:
        return json_response(200, version=__version__)

    def _metrics(self, accept: str) -> ProbeResponse:
        facts = self._engine.metrics_input(self._clock())
        running = {actor.role: process for actor in facts.actors.values()
                   if (process := process_usage(actor.pid)) is not None}
        body, kind = metrics_text(facts._replace(processes=running), accept)
        return ProbeResponse(200, body, kind)


class GenerateProbe:
    """Generates a token, as a client would: at most one at a time and one a second. Whoever asks
    meanwhile gets the same answer."""

    def __init__(self, run_dir: Path, clock: Callable[[], float]) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._client: AsyncClient | None = None
        self._task: asyncio.Task[tuple[str, float]] | None = None
        self._began = 0.0

    async def ask(self) -> tuple[str, float]:
        """(Why there was no token, or nothing; seconds that it took)."""
        now = self._clock()
        task = self._task
        if task is None or (task.done() and now - self._began >= GENERATE_PAUSE):
            self._began = now
            task = self._task = asyncio.get_running_loop().create_task(self._generate())
        return await asyncio.shield(task)

    async def _generate(self) -> tuple[str, float]:
        if self._client is None:
            self._client = AsyncClient(self._run_dir)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        try:
            async with asyncio.timeout(GENERATE_SECONDS):
                await self._client.generate(PROMPT, params, timeout=GENERATE_SECONDS)
        except TimeoutError:
            return f"no token within {GENERATE_SECONDS:g} s", GENERATE_SECONDS
        except ActoriumError as error:
            return error.message, self._clock() - self._began
        return "", self._clock() - self._began

    def close(self) -> None:
        """From the loop's thread; the connection is closed in its next turn."""
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            client, self._client = self._client, None
            self._task = asyncio.get_running_loop().create_task(_closed(client))


async def _closed(client: AsyncClient) -> tuple[str, float]:
    await client.close()
    return "", 0.0


# --- Prometheus' text ---

class _Metrics:
    """A collector, as prometheus_client's encoders want one."""

    def __init__(self, facts: metrics.MetricsInput) -> None:
        self._facts = facts

    def collect(self) -> Iterator[object]:
        from prometheus_client.metrics_core import Metric

        for family in metrics.families(self._facts):
            metric = Metric(family.name, family.about, family.kind)
            for sample in family.samples:
                metric.add_sample(family.name + sample.suffix, sample.labels, sample.value)
            yield metric


def metrics_text(facts: metrics.MetricsInput, accept: str = "") -> tuple[bytes, str]:
    """The text and its content type, in the format that the `Accept` header asks for.

    Names are the same in every format and whatever `escaping` is asked for: all of them consist of
    letters, digits, "_" and ":", which every version of Prometheus stores as they are."""
    from prometheus_client import exposition
    from prometheus_client.openmetrics import exposition as openmetrics

    # Under any other scheme prometheus_client escapes the ":" of OpenMetrics' samples.
    escaping = openmetrics.ALLOWUTF8
    if _wants_openmetrics(accept):
        text = openmetrics.generate_latest(_Metrics(facts), escaping=escaping)
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"
    text = exposition.generate_latest(_Metrics(facts), escaping=escaping)  # type: ignore[arg-type]
    return text, "text/plain; version=0.0.4; charset=utf-8"


def _wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics 1 is asked for by name, and Prometheus' text not preferred to it."""
    openmetrics = text = 0.0
    for asked in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in asked.split(";"))
        named = dict(part.partition("=")[::2] for part in parameters)
        try:
            weight = float(named.get("q", "1"))
        except ValueError:
            weight = 0.0
        if kind == "text/plain":
            text = max(text, weight)
        elif kind == "application/openmetrics-text" and named.get("version", "1").startswith("1"):
            openmetrics = max(openmetrics, weight)
    return openmetrics > 0 and openmetrics >= text
