"""Asks engines that it starts: the plain one, which runs all the time, and up to two others."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError, EngineUnavailable
from actorium.actors.gateway.actor import where
from actorium.actors.health import speculation_of
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.http_client import Http
from actorium.tools.verify.conditions import (
    FLAGS,
    PLAIN,
    VALUES,
    Condition,
    engine_part,
    made_by,
    plain_config,
    varied,
)
from actorium.tools.verify.contradictions import NoAnswer
from actorium.tools.verify.engine_readers import (
    PART,
    PATIENCE,
    AnswerReader,
    EngineReader,
    ReadingProgress,
    WorkerDeath,
    asked_before,
    engine_request,
    fill,
    read_together,
)
from actorium.tools.verify.http_readers import GatewayReader, cut_of, gateway_body
from actorium.tools.verify.verify_cases import VerifyCase
from actorium.tools.verify.verify_run import EngineCounts, EngineNotStartedError, Received

GUARD = 4
"""So many times as long all requests of a round may take, with those that are asked before and
again: what the engine's own deadlines do not end is given up then."""
DEATHS = 5
"""Workers of an engine that are killed until it is started anew: the delay before the next one
doubles from death to death."""
LANES = 2
"""Engines that run beside the plain one, each asked while the other starts or computes."""
Start = Callable[[Config], AbstractContextManager[Engine]]


@dataclass
class _Running:
    engine: Engine
    client: AsyncClient
    second: AsyncClient
    """Takes up streams that the first has lost."""
    http: Http | None
    """Its gateway."""
    callers: contextlib.AsyncExitStack
    """Closes the clients."""
    stop: contextlib.ExitStack
    """Ends the engine, which takes a while."""
    deaths: int = 0
    """Kills of its worker by this command."""
    taken_back: int = 0
    """Sequences that its scheduler took back from dead workers."""
    silent: bool = False
    """It owes an answer."""


class OwnEngines:
    def __init__(self, config: Config, written: Mapping[str, str], methods: Collection[str],
                 start: Start, tight: int = 1024, values: Mapping[str, Sequence[Any]] = VALUES,
                 patience: float = PATIENCE, ranks_held: str = "",
                 later: Start | None = None) -> None:
        """written: settings that stay as they are. methods: what can make drafts, see
        `methods_of`. start: is called in threads. patience: seconds that a request may take.
        ranks_held: why their number is, see `over_ranks`. later: starts the engines beside the
        plain one."""
        self._config, self._tight = plain_config(config, written), tight
        self._start, self._later = start, later or start
        self._patience = patience
        self._running: dict[Condition, _Running] = {}
        """Ordered by last use."""
        self._locks: defaultdict[Condition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._starting = 0
        """Engines beside the plain one that are on their way."""
        self.plain = PLAIN
        self.held: Mapping[str, str] = {"ranks": ranks_held} if (
            ranks_held and "ranks" in values) else {}
        self.values: Mapping[str, Sequence[Any]] = {
            axis: several for axis, every in values.items()
            if axis not in self.held and FLAGS.get(axis) not in written
            and (several := made_by(every, methods) if axis == "drafts" else every)}
        if "reading" in values:  # deltas come one by one to the client anyway
            self.values = {**self.values, "reading": ("cut", "http", "http-cut")}
        self._http = "reading" in self.values
        self.info: dict[str, Any] = {}
        self.counts = EngineCounts()
        self.lanes = LANES

    async def start(self) -> None:
        """The plain engine. Raises `ActoriumError`."""
        own = await self._started(self.plain)
        self.info = await own.client.server_info(self._patience)

    async def close(self) -> None:
        for condition in reversed(list(self._running)):
            await self._stop(condition)

    async def _stop(self, condition: Condition) -> None:
        own = self._running.pop(condition)
        with suppress(ActoriumError):
            drafted = speculation_of(await own.client.status())
            self.counts.drafts += int(drafted.get("num_draft_tokens", 0))
            self.counts.accepted += int(drafted.get("num_accepted_tokens", 0))
        await own.callers.aclose()
        await asyncio.to_thread(own.stop.close)

    async def _started(self, condition: Condition) -> _Running:
        """Starts in a thread, so that the other engines can be asked meanwhile."""
        callers, stop = contextlib.AsyncExitStack(), contextlib.ExitStack()
        config = varied(self._config, condition, self._tight, self._http)
        start = self._start if condition == self.plain else self._later
        starting = asyncio.ensure_future(asyncio.to_thread(stop.enter_context, start(config)))
        try:
            engine = await asyncio.shield(starting)
            client, second = [await callers.enter_async_context(
                AsyncClient(engine.name, config.runtime.run_dir)) for _ in range(2)]
            await client.wait_ready()
            http = self._gateway_of(engine) if self._http else None
            if http is not None:
                callers.callback(http.close)
        except BaseException:
            await asyncio.wait([starting])
            await callers.aclose()
            await asyncio.to_thread(stop.close)
            raise
        self._running[condition] = _Running(engine, client, second, http, callers, stop)
        return self._running[condition]

    def _run_dir(self, engine: Engine) -> Path:
        return engine_dir(engine.name, self._config.runtime.run_dir)

    def _gateway_of(self, engine: Engine) -> Http:
        address = where(self._run_dir(engine))
        if address is None:
            raise EngineUnavailable("the gateway does not say where it listens")
        return Http(address.url)

    async def _for(self, wanted: Condition) -> _Running:
        """The engine, whose lock is held, and which is the one that was used last."""
        own = self._running.get(wanted)
        if own is not None and own.deaths < DEATHS and not own.silent:
            self._running[wanted] = self._running.pop(wanted)
            return own
        if own is not None:
            await self._stop(wanted)
        if wanted == self.plain:
            return await self._started(wanted)
        self._starting += 1
        try:
            await self._make_room()
            return await self._started(wanted)
        except ActoriumError as error:
            raise EngineNotStartedError(error.message) from None
        finally:
            self._starting -= 1

    async def _make_room(self) -> None:
        """Stops those beside the plain one that are too many, and were not used for longest."""
        beside = [one for one in self._running if one != self.plain]
        idle = [one for one in beside if not self._locks[one].locked()]
        for one in idle[:max(len(beside) + self._starting - self.lanes, 0)]:
            async with self._locks[one]:
                if one in self._running:
                    await self._stop(one)

    def renewed(self, case: VerifyCase, _condition: Condition) -> VerifyCase:
        """Salts keep prompts apart."""
        return case

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
        wanted = engine_part(condition)
        async with self._locks[wanted]:  # nothing else runs beside a round
            own = await self._for(wanted)
            answers: list[Received] = [NoAnswer(GUARD * self._patience)] * len(cases)
            with suppress(TimeoutError):
                async with asyncio.timeout(GUARD * self._patience):
                    answers = await self._asked(own, cases, condition) if cases else []
            own.silent |= any(isinstance(one, NoAnswer) for one in answers)
            return answers

    async def _asked(self, own: _Running, cases: Sequence[VerifyCase], condition: Condition
                     ) -> list[Received]:
        salt = secrets.token_hex(6)
        salts = [salt if condition.cache != "cold" else f"{salt}-{i}" for i in range(len(cases))]
        with suppress(ActoriumError):
            await self._prepare(own.client, cases, condition, salt)
        after = 1 + condition.position_seed % max(min(case.max_tokens for case in cases) // PART, 1)
        progress = [ReadingProgress(condition.choices, after) for _ in cases]
        readers = [self._reader(own, case, condition, own_salt, each)
                   for case, own_salt, each in zip(cases, salts, progress, strict=True)]
        beside: list[Awaitable[Any]] = []
        if condition.cache == "evicted":
            beside.append(fill(own.client, cases, f"{salt}f", self._patience))
        if condition.worker != "killed":
            return await read_together(readers, condition.neighbours_leave, beside)
        death = WorkerDeath(self._run_dir(own.engine), progress)
        heard = await read_together(readers, condition.neighbours_leave, [*beside, death.strike()])
        return await self._marked(own, death, heard)

    def _reader(self, own: _Running, case: VerifyCase, condition: Condition, salt: str,
                progress: ReadingProgress) -> AnswerReader:
        cut = cut_of(case, condition)
        if condition.reading in ("http", "http-cut"):
            assert own.http is not None
            body = gateway_body(case, condition, salt, self._patience)
            return GatewayReader(own.http, body, self._patience, cut, progress)
        return EngineReader(own.client, engine_request(case, condition, salt, self._patience),
                            None if cut is None else (own.second, cut.tokens), progress)

    async def _marked(self, own: _Running, death: WorkerDeath, heard: list[Received]
                      ) -> list[Received]:
        """The answers, those marked that were under way when the worker died."""
        count = await death.taken_back(own.client, own.taken_back)
        met = death.met(count - own.taken_back)
        own.taken_back = count
        own.deaths += death.struck
        self.counts.deaths += death.struck
        self.counts.deaths_met += bool(met)
        return [tuple(msgspec.structs.replace(choice, died=True) for choice in one)
                if number in met and isinstance(one, tuple) else one
                for number, one in enumerate(heard)]

    async def _prepare(self, client: AsyncClient, cases: Sequence[VerifyCase],
                       condition: Condition, salt: str) -> None:
        await asyncio.gather(*(
            EngineReader(client, engine_request(one, PLAIN, salt, self._patience)).read()
            for one in asked_before(cases, condition)))
        if condition.cache == "evicted":
            await fill(client, cases, f"{salt}e", self._patience)
