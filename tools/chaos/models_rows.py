"""The rows of a server of several models: more models than fit into memory, asked for at random,
while gateways, the model manager, workers and whole engines are killed.

The engines are real processes with null workers, whose tokens are known beforehand: each stream is
checked to the token, and that its own model answered it. How long a cold start takes is measured
with the packaged model and a real worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.model_manager.engine_plans import planned_bytes
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.runtime.process import processes_of_session, python
from actorium.actors.runtime.rundir import running_engines
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.bench.http_client import Http
from actorium.tools.chaos.checked_streams import CLEAN, crowding, quantile
from actorium.tools.chaos.cluster_rows import free_port
from actorium.tools.chaos.faults import actors, send
from actorium.tools.chaos.rig import leftovers
from actorium.tools.cli.status import about
from actorium.tools.null.null_worker import VOCAB, hash_tokens

NAME = "many"
LAUNCHER, ENGINE = "launcher", "engine"
"""Instead of roles: an engine's launcher, with which its actors end; all of its processes."""
KILLED = ("gateway-0", "manager", "worker-0", LAUNCHER, ENGINE)
"""In turn; the last three are those of any engine with a stream under way. (An engine whose worker
is killed while it starts for the first time has failed to start, and says so.)"""
NULL = {"null_worker": True, "skip_tokenizer": True}
PAGES = {"kv_cache_bytes": "64m", "max_num_seqs": 16}
TOKENS = (300, 900)
LATEST = 120.0
"""Seconds within which a request must have ended, on a machine that has nothing else to do."""
LOOK = 0.2
"""Seconds between two looks at which engines run."""
LEAVES = 60.0
"""Seconds that the server may take to stop."""


class DrawnRequest(NamedTuple):
    """A request, and its model."""

    model: str
    prompt: list[int]
    tokens: int
    seed: int

    def expected(self) -> list[int]:
        """Returns the tokens of the answer."""
        places = np.arange(len(self.prompt), len(self.prompt) + self.tokens, dtype=np.uint64)
        seeds = np.full(self.tokens, choice_seed(self.seed, 0), np.uint64)
        return hash_tokens(seeds, places, VOCAB).tolist()


def draw(seed: int, count: int, models: Sequence[str]) -> list[DrawnRequest]:
    """Returns the requests of a seed."""
    chance = random.Random(seed)
    return [DrawnRequest(chance.choice(models),
                         [chance.randrange(3, CLEAN) for _ in range(chance.randint(2, 40))],
                         chance.randint(*TOKENS), number) for number in range(count)]


class ModelsServer(NamedTuple):
    """A running server of several models."""

    base: Path
    """Its run directory, and those of its engines, are in there."""
    http: Http

    def engines(self) -> list[str]:
        """Returns the names of the engines whose launchers live."""
        return [name for name in running_engines(str(self.base)) if name != NAME]

    async def ask(self, request: DrawnRequest, started: Callable[[], None] = lambda: None
                  ) -> tuple[list[int], str, float]:
        """Returns the tokens, the model that answered, and the seconds until the first token.
        started: is called then. Raises `ActoriumError`."""
        begun, first, tokens, model = monotonic(), 0.0, list[int](), ""
        async for event in self.http.events("/v1/completions", {
                "model": request.model, "prompt": request.prompt, "max_tokens": request.tokens,
                "seed": request.seed, "temperature": 1.0, "ignore_eos": True, "stream": True,
                "return_token_ids": True}):
            data = json.loads(event)
            if "error" in data:
                raise ActoriumError(data["error"]["message"])
            if not first:
                first, model = monotonic() - begun, data["model"]
                started()
            for choice in data["choices"]:
                tokens += choice.get("token_ids") or ()
        return tokens, model, first


@asynccontextmanager
async def server(models: Sequence[str], settings: dict[str, Any], wrong: list[str], *flags: str
                 ) -> AsyncIterator[ModelsServer]:
    """A server of so many copies of the packaged model. settings: of each engine; wrong: gets what
    it leaves behind; flags: of `actorium serve`."""
    base = Path(tempfile.mkdtemp(prefix="am-", dir="/tmp"))
    try:
        (base / "models.toml").write_text("".join(_table(name, settings) for name in models))
        port = free_port()
        (base / "run").mkdir(mode=0o700)
        with open(base / "log", "wb") as log, contextlib.closing(
                Http(f"http://127.0.0.1:{port}")) as http:
            process = subprocess.Popen(
                python("actorium.tools.cli", "serve", "--name", NAME, "--run-dir",
                       str(base / "run"), "--models", str(base / "models.toml"), "--port",
                       str(port), "--max-restarts", "10000", *flags), stdout=log, stderr=log)
            try:
                await _wait_ready(http, process)
                yield ModelsServer(base / "run", http)
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.to_thread(process.wait, LEAVES * crowding())
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    wrong.append("the server did not stop")
        # Engines' launchers outlive a server that had to leave before them, and end by themselves.
        until = monotonic() + LEAVES * crowding()
        while list((base / "run").glob(f"{NAME}*")) and monotonic() < until:
            await asyncio.sleep(LOOK)
        wrong += leftovers(base / "run")
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _table(name: str, settings: dict[str, Any]) -> str:
    values = {"model": str(DEMO_MODEL), **settings}
    return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n"
                                   for key, value in values.items())


async def _wait_ready(http: Http, process: subprocess.Popen[bytes]) -> None:
    until = monotonic() + LATEST
    while True:
        try:
            await http.get("/health")
            return
        except ActoriumError:
            if process.poll() is not None or monotonic() > until:
                raise
        await asyncio.sleep(0.1)


class ModelsTraffic:
    """Asks a server for all requests, at most `clients` at once, and strikes meanwhile."""

    def __init__(self, made: ModelsServer, requests: Sequence[DrawnRequest], kills: int,
                 engines: int, seed: int) -> None:
        """engines: the most that may run."""
        self._made, self._requests, self._engines = made, requests, engines
        self._chance = random.Random(seed)
        self._left = iter(requests)
        self._answered = asyncio.Condition()
        self.answers = self.most = 0
        """`most`: engines that ran at once."""
        self.kills: Counter[str] = Counter()
        self._streams: dict[int, str] = {}
        """Model of each request whose stream is under way."""
        self.wrong: list[str] = []
        self._kills_at = [len(requests) * (number + 1) // (kills + 1) for number in range(kills)]

    async def run(self, clients: int) -> None:
        """Runs until all are answered."""
        watching = asyncio.ensure_future(self._watch())
        killing = asyncio.ensure_future(self._kill())
        await asyncio.gather(*(self._client() for _ in range(clients)))
        await killing
        watching.cancel()

    async def _client(self) -> None:
        for request in self._left:
            try:
                async with asyncio.timeout(LATEST * crowding()):
                    tokens, model, _ = await self._made.ask(
                        request, partial(self._streams.__setitem__, request.seed, request.model))
            except (ActoriumError, TimeoutError) as error:
                self.wrong.append(f"request {request.seed} to {request.model}: "
                                  f"{type(error).__name__}: {error}")
            else:
                if model != request.model or tokens != request.expected():
                    self.wrong.append(f"request {request.seed} to {request.model}: {len(tokens)} "
                                      f"tokens of {model}, not {request.tokens}, or others")
            self._streams.pop(request.seed, None)
            async with self._answered:
                self.answers += 1
                self._answered.notify_all()

    async def _kill(self) -> None:
        for number, at in enumerate(self._kills_at):
            async with self._answered:
                await self._answered.wait_for(lambda at=at: self.answers >= at)  # type: ignore
            what = KILLED[number % len(KILLED)]
            while not self._strike(what) and self.answers < len(self._requests):
                await asyncio.sleep(0.005)

    def _strike(self, what: str) -> bool:
        """Kills one of `KILLED`; False if there is none."""
        engines = [f"{NAME}.{model}" for model in sorted(set(self._streams.values()))]
        names = [NAME] if what in KILLED[:2] else engines
        victims = [pids for name in names if (pids := self._pids(name, what))]
        if not victims:
            return False
        send(self._chance.choice(victims), signal.SIGKILL)
        self.kills[what] += 1
        return True

    def _pids(self, name: str, what: str) -> list[int]:
        """Returns the processes that `what` stands for in an engine or the server; none = it does
        not run."""
        if what in (LAUNCHER, ENGINE):
            # An engine may end between one look and the next.
            launcher = about(self._made.base / name).get("pid")
            if launcher is None or name not in self._made.engines():
                return []
            return [launcher, *(processes_of_session(launcher) if what == ENGINE else ())]
        actor = actors(self._made.base / name).get(what)
        return [] if actor is None else [actor.pid]

    async def _watch(self) -> None:
        while True:
            running = self._made.engines()
            self.most = max(self.most, len(running))
            if len(running) > self._engines:
                self.wrong.append(f"{len(running)} engines at once: {running}")
            await asyncio.sleep(LOOK)


def _plan() -> int:
    """Returns the bytes that one engine takes by its plan."""
    done = subprocess.run(python("actorium.tools.cli", "plan", "--json", str(DEMO_MODEL), *(
        part for key, value in PAGES.items() for part in (f"--{key.replace('_', '-')}", str(value))
        )), stdout=subprocess.PIPE, check=True)
    return planned_bytes(json.loads(done.stdout), Config())


def _names(count: int) -> Iterator[str]:
    return (f"model-{number}" for number in range(count))


def models(seed: int, count: int = 10, engines: int = 3, requests: int = 300, clients: int = 24,
           kills: int = 15, cold: int = 10) -> dict[str, Any]:
    """Runs the whole row. count: models; engines: so many fit into memory; cold: starts that are
    measured."""
    names, wrong = list(_names(count)), list[str]()
    plan = _plan()
    memory = f"--models-memory={plan * engines + plan // 2}"
    drawn = draw(seed, requests, names)

    async def ask_all() -> ModelsTraffic:
        async with server(names, NULL | PAGES, wrong, memory) as made:
            traffic = ModelsTraffic(made, drawn, kills, engines, seed)
            await traffic.run(clients)
            return traffic

    async def start_cold() -> list[float]:
        device = {"device": "cpu"}
        async with server(names, device | PAGES, wrong, memory) as made:
            return [(await made.ask(DrawnRequest(name, [5, 6, 7], 1, 0)))[2]
                    for number, name in zip(range(cold), names * cold, strict=False)]

    begun = monotonic()
    traffic = asyncio.run(ask_all())
    took = monotonic() - begun
    seconds = asyncio.run(start_cold()) if cold else []
    return {"models": count, "requests": requests, "answered": requests - len(traffic.wrong),
            "kills": dict(traffic.kills), "planned_bytes_each": plan, "most_engines": traffic.most,
            "seconds": round(took, 1), "cold_start_p50_s": quantile(seconds, 0.5),
            "cold_start_max_s": quantile(seconds, 1.0), "processors": os.cpu_count(),
            "wrong": traffic.wrong + wrong}
