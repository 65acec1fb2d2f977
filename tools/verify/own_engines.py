"""Asks engines that it starts: the plain one, which runs all the time, and up to two others."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.calls import AsyncDeltaStream
from actorium.actors.client.requests import Linger, Request, StreamDelta
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import ActoriumError, DeadlineExceeded
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.runtime.roles import WORKER
from actorium.actors.runtime.rundir import engine_dir
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.rank_bits import rank_faults
from actorium.tools.chaos.faults import KILL, Fault, strike
from actorium.tools.verify.company import PART, PATIENCE, asked_before, read_together
from actorium.tools.verify.conditions import (
    PLAIN,
    VALUES,
    Condition,
    differing,
    engine_part,
)
from actorium.tools.verify.contradictions import CaseAnswer, NoAnswer, spliced
from actorium.tools.verify.verify_cases import VerifyCase
from actorium.tools.verify.verify_run import EngineNotStartedError, Heard

FLAGS = {"tokens_per_step": "max_num_batched_tokens", "drafts": "speculative",
         "ranks": "tensor_parallel_size", "page_size": "page_size", "pool": "max_total_tokens",
         "preempt_every": "force_preempt_every", "threads": "threads", "overlap": "overlap",
         "graphs": "enforce_eager"}
"""Axis -> the setting that it is. Those that a command line sets itself stay as they are there."""
TOPS = 5
"""Likeliest tokens that are told of each position."""
FILLERS, FILLER_TOKENS = 6, 300
"""Prompts that are sent so that pages of others go."""
LINGER = 30.0
"""Seconds for which a request whose stream is cut goes on."""
GUARD = 4
"""So many times as long all requests of a round may take, with those that are asked before and
again: what the engine's own deadlines do not end is given up then."""
DEATHS = 5
"""Workers of an engine that are killed until it is started anew: the delay before the next one
doubles from death to death."""
OTHERS = 2
"""Engines that run beside the plain one."""
Start = Callable[[Config], AbstractContextManager[Engine]]


def varied(config: Config, condition: Condition, tight: int) -> Config:
    """The configuration of an engine for a condition. tight: tokens of a small pool."""
    put = msgspec.structs.replace
    scheduler, memory, device = config.scheduler, config.memory, config.device
    speculation = config.speculation
    for axis in differing(condition):
        value = getattr(condition, axis)
        if axis in ("tokens_per_step", "preempt_every", "overlap"):
            scheduler = put(scheduler, **{FLAGS[axis]: value})
        elif axis in ("ranks", "threads"):
            device = put(device, **{FLAGS[axis]: value})
        elif axis == "graphs":
            device = put(device, enforce_eager=True)
        elif axis == "page_size":
            memory = put(memory, page_size=value)
        elif axis == "pool":
            memory = put(memory, max_total_tokens=tight)
        elif axis == "drafts":
            speculation = put(speculation, speculative=f"mtp:{value},fixed")
    # Deaths are part of the run, and so is the way of each engine's own name.
    recovery = put(config.recovery, max_restarts=100_000)
    runtime = put(config.runtime, name=RuntimeConfig().name, crash_reports=False)
    return put(config, scheduler=scheduler, memory=memory, device=device, recovery=recovery,
               speculation=speculation, runtime=runtime)


def over_ranks(config: Config, shape: ModelShape, written: Mapping[str, str],
               most: int = 2) -> tuple[Config, str]:
    """(with `--exact on` that of engines whose bits do not depend on the number of ranks, up to
    `most`; why it is held where they do). written: settings that stay as they are."""
    device = config.device
    if device.exact != "on" or FLAGS["ranks"] in written:
        return config, ""
    if "exact_ranks" not in written:
        if found := rank_faults(shape, most):
            return config, f"with --exact on the number of ranks is held: {'; '.join(found)}"
        device = msgspec.structs.replace(device, exact_ranks=most)
    elif device.exact_ranks == 1:
        return config, "with --exact-ranks 1 the number of ranks is held"
    return msgspec.structs.replace(config, device=device), ""


def plain_config(config: Config, written: Mapping[str, str]) -> Config:
    """That of the plain engine: without drafts, and with quick ways back from deaths, unless the
    command line says else."""
    recovery, speculation = config.recovery, config.speculation
    if "fork_server" not in written:
        recovery = msgspec.structs.replace(recovery, fork_server="on")
    if "speculative" not in written:
        speculation = msgspec.structs.replace(speculation, speculative="off")
    return msgspec.structs.replace(config, recovery=recovery, speculation=speculation)


@dataclass
class _Running:
    engine: Engine
    client: AsyncClient
    second: AsyncClient
    """Takes up streams that the first has lost."""
    stop: contextlib.AsyncExitStack
    deaths: int = 0
    """Of its worker, by this command."""
    silent: bool = False
    """It owes an answer."""


class OwnEngines:
    """See `VerifyAsker`."""

    def __init__(self, config: Config, written: Mapping[str, str], drafts: bool, start: Start,
                 tight: int = 1024, values: Mapping[str, Sequence[Any]] = VALUES,
                 patience: float = PATIENCE, ranks_held: str = "") -> None:
        """written: settings that stay as they are. drafts: the model has a layer for them.
        patience: seconds that a request may take. ranks_held: why their number is, see
        `over_ranks`."""
        self._config, self._start, self._tight = plain_config(config, written), start, tight
        self._patience = patience
        self._running: dict[Condition, _Running] = {}
        self.plain = PLAIN
        self.held: Mapping[str, str] = {"ranks": ranks_held} if (
            ranks_held and "ranks" in values) else {}
        self.values: Mapping[str, Sequence[Any]] = {
            axis: several for axis, several in values.items()
            if axis not in self.held and FLAGS.get(axis) not in written
            and (axis != "drafts" or drafts)}
        if "reading" in values:  # deltas come one by one to the client anyway
            self.values = {**self.values, "reading": ("cut",)}
        self.info: dict[str, Any] = {}

    async def start(self) -> None:
        """The plain engine. Raises `ActoriumError`."""
        own = await self._started(self.plain)
        self.info = await own.client.server_info(self._patience)

    async def close(self) -> None:
        """Stops them all."""
        for condition in reversed(list(self._running)):
            await self._running.pop(condition).stop.aclose()

    async def _started(self, condition: Condition) -> _Running:
        stack = contextlib.AsyncExitStack()
        try:
            config = varied(self._config, condition, self._tight)
            engine = stack.enter_context(self._start(config))
            client, second = [await stack.enter_async_context(
                AsyncClient(engine.name, config.runtime.run_dir)) for _ in range(2)]
            await client.wait_ready()
        except BaseException:
            await stack.aclose()
            raise
        self._running[condition] = _Running(engine, client, second, stack)
        return self._running[condition]

    async def _for(self, condition: Condition) -> _Running:
        wanted = engine_part(condition)
        own = self._running.get(wanted)
        if own is not None and own.deaths < DEATHS and not own.silent:
            return own
        others = [one for one in self._running if one != self.plain]
        for one in (wanted,) if own is not None else others[:len(others) + 1 - OTHERS]:
            await self._running.pop(one).stop.aclose()
        try:
            return await self._started(wanted)
        except ActoriumError as error:
            if wanted == self.plain:
                raise
            raise EngineNotStartedError(error.message) from None

    def renewed(self, case: VerifyCase, _condition: Condition) -> VerifyCase:
        """Salts keep prompts apart."""
        return case

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Heard]:
        own = await self._for(condition)
        heard: list[Heard] = [NoAnswer(GUARD * self._patience)] * len(cases)
        with suppress(TimeoutError):
            async with asyncio.timeout(GUARD * self._patience):
                heard = await self._asked(own, cases, condition) if cases else []
        own.silent |= any(isinstance(one, NoAnswer) for one in heard)
        return heard

    async def _asked(self, own: _Running, cases: Sequence[VerifyCase], condition: Condition
                     ) -> list[Heard]:
        salt = secrets.token_hex(6)
        salts = [salt if condition.cache != "cold" else f"{salt}-{i}" for i in range(len(cases))]
        with suppress(ActoriumError):
            await self._prepare(own.client, cases, condition, salt)
        asked = [_request(case, condition, own_salt, self._patience)
                 for case, own_salt in zip(cases, salts, strict=True)]
        taken_up = own.second if condition.reading == "cut" else None
        beside: list[Awaitable[Any]] = []
        if condition.worker == "killed":
            beside.append(self._kill(own))
        if condition.cache == "evicted":
            beside.append(_fill(own.client, cases, f"{salt}f", self._patience))
        return await read_together(
            [_Reader(own.client, request, taken_up) for request in asked],
            condition.company_leaves, beside)

    async def _prepare(self, client: AsyncClient, cases: Sequence[VerifyCase],
                       condition: Condition, salt: str) -> None:
        await asyncio.gather(*(_Reader(client, _request(one, PLAIN, salt, self._patience)).read()
                               for one in asked_before(cases, condition)))
        if condition.cache == "evicted":
            await _fill(client, cases, f"{salt}e", self._patience)

    async def _kill(self, own: _Running) -> None:
        """Once the requests are under way."""
        await asyncio.sleep(0.03)
        own.deaths += 1
        run_dir = engine_dir(own.engine.name, self._config.runtime.run_dir)
        strike(Fault(0.0, KILL, (WORKER,)), run_dir)


def _request(case: VerifyCase, condition: Condition, salt: str, patience: float) -> Request:
    params = SamplingParams(
        n=condition.choices, max_tokens=case.max_tokens, temperature=case.temperature,
        top_p=case.top_p, top_k=case.top_k, presence_penalty=case.presence_penalty,
        repetition_penalty=case.repetition_penalty, seed=case.seed,
        allowed_token_ids=list(case.allowed) or None, ignore_eos=not case.schema,
        logprobs=TOPS if condition.logprobs else None,
        structured=Structured(json_schema=case.schema) if case.schema
        else None)
    prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
    return Request(prompt=prompt, params=params, cache_salt=salt, timeout=patience)


async def _fill(client: AsyncClient, cases: Sequence[VerifyCase], salt: str, patience: float
                ) -> Heard:
    """Long prompts that nobody has asked, made of the cases' own tokens."""
    tokens = [token for case in cases for token in case.prompt if isinstance(token, int)] or [9]
    rows = [(tokens[i:] + tokens[:i]) * (1 + FILLER_TOKENS // len(tokens)) for i in range(FILLERS)]
    asked = [Request(prompt=row[:FILLER_TOKENS], cache_salt=salt, timeout=patience,
                     params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
             for row in rows]
    await asyncio.gather(*(_Reader(client, one).read() for one in asked))
    return ""


class _Reader:
    """See `AnswerReader`."""

    def __init__(self, client: AsyncClient, request: Request, taken_up: AsyncClient | None = None
                 ) -> None:
        """taken_up: the stream is given up on the way, and read again by this client."""
        self._client, self._request, self._taken_up = client, request, taken_up
        assert request.params is not None
        self._n = request.params.n
        self._tokens_wanted = request.params.max_tokens or 1

    async def read(self) -> Heard:
        try:
            if self._taken_up is not None:
                return await self._read_cut(self._taken_up)
            async with contextlib.aclosing(self._stream()) as stream:
                return _answers([delta async for delta in stream], self._n)
        except DeadlineExceeded:
            return NoAnswer(self._request.timeout or 0.0)
        except ActoriumError as error:
            return error.code

    async def leave(self) -> None:
        with suppress(ActoriumError):
            async for _ in self._some():
                pass

    def _stream(self) -> AsyncDeltaStream:
        return AsyncDeltaStream(self._client, self._request)

    async def _some(self) -> AsyncIterator[StreamDelta]:
        """A part of the tokens; then it is closed."""
        count = 0
        async with contextlib.aclosing(self._stream()) as stream:
            async for delta in stream:
                yield delta
                count += len(delta.token_ids)
                if count * PART >= self._tokens_wanted:
                    return

    async def _read_cut(self, other: AsyncClient) -> Heard:
        """What a caller has who lost the connection: the first part, and of the whole, which is
        read again, what comes behind it."""
        first: list[StreamDelta] = []
        # A name of its own for each reading: one that was aborted is not answered at once.
        request = msgspec.structs.replace(
            self._request, linger=Linger(rid=secrets.token_hex(12), seconds=LINGER))
        stream = AsyncDeltaStream(self._client, request)
        try:
            async for delta in stream:
                first.append(delta)
                if PART * sum(len(one.token_ids) for one in first) >= self._tokens_wanted:
                    break
            # Under the same name: the request itself goes on, or its answer is still known.
            async with contextlib.aclosing(AsyncDeltaStream(other, request)) as again:
                whole = [delta async for delta in again]
        finally:
            await stream.aclose()
        return spliced(_answers(first, self._n), _answers(whole, self._n))


def _answers(deltas: Sequence[StreamDelta], n: int) -> tuple[CaseAnswer, ...]:
    found = []
    for index in range(n):
        own = [delta for delta in deltas if delta.index == index]
        told = [one for delta in own for one in delta.logprobs or ()]
        found.append(CaseAnswer(
            tokens=tuple(token for delta in own for token in delta.token_ids),
            text="".join(delta.text for delta in own),
            finish=next((delta.finish_reason for delta in own if delta.finish_reason), ""),
            logprobs=tuple(one.logprob for one in told) if told else None,
            tops=tuple(dict(one.top) for one in told)))
    return tuple(found)
