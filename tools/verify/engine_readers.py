"""Requests that are sent together; those at an engine's own client, what is known of each while it
is read, and the death of a worker meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol

import msgspec

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.calls import AsyncDeltaStream
from actorium.actors.client.requests import Request, Resumable, StreamDelta
from actorium.actors.errors import Aborted, ActoriumError, DeadlineExceeded
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.runtime.roles import WORKER
from actorium.tools.chaos.faults import actors
from actorium.tools.verify.conditions import Condition
from actorium.tools.verify.contradictions import CaseAnswer, NoAnswer, spliced
from actorium.tools.verify.verify_cases import VerifyCase, sibling
from actorium.tools.verify.verify_run import Received

PART = 3
"""A stream that is cut, or left, has said one in so many of its tokens."""
PATIENCE = 120.0
"""Seconds that a request may take; then it has no answer."""


class AnswerReader(Protocol):
    async def read(self) -> Received:
        """Returns its whole answer."""

    async def leave(self) -> None:
        """Reads a few tokens, then aborts it."""


def asked_before(cases: Sequence[VerifyCase], condition: Condition) -> list[VerifyCase]:
    """What must have been asked, so that the prefix cache holds what the condition says."""
    if condition.cache in ("warm", "evicted"):
        return list(cases)
    if condition.cache == "shared":
        return [sibling(case, number) for number, case in enumerate(cases)]
    return []


async def read_together(readers: Sequence[AnswerReader], leaving: bool,
                        beside: Sequence[Awaitable[Any]] = ()) -> list[Received]:
    """Returns each reader's answer. leaving: every second one is aborted midway; since a comparison
    needs whole answers, those are asked once more, together."""
    left = [i for i in range(len(readers)) if leaving and i % 2]
    heard = (await asyncio.gather(*(reader.leave() if i in left else reader.read()
                                    for i, reader in enumerate(readers)), *beside))[:len(readers)]
    again = await asyncio.gather(*(readers[i].read() for i in left))
    for i, answer in zip(left, again, strict=True):
        heard[i] = answer
    return list(heard)


TOPS = 5
"""Likeliest tokens returned for each position."""
FILLERS, FILLER_TOKENS = 6, 300
"""Prompts that are sent so that pages of others go."""
TAKEN_BACK = 2
"""Times that a stream may be lost to who had it before."""
RESUME_SECONDS = 30.0
"""Seconds for which a request whose stream is cut goes on."""


class ReadingProgress:
    def __init__(self, n: int, after: int = 1) -> None:
        """n: its choices. after: tokens of one of them behind which it is under way."""
        self.n, self._after = n, after
        self._tokens, self._ended = [0] * n, set[int]()
        self.ended_at = math.inf
        """CLOCK_MONOTONIC seconds at which its last choice, or all that was wanted of it, had come.
        """
        self.leaving = False
        """Not the whole is wanted."""
        self.turned = asyncio.Event()
        """It is under way, or over."""

    @property
    def open_choices(self) -> int:
        """Choices that have not ended; 0 once it is over."""
        return self.n - len(self._ended) if self.ended_at == math.inf else 0

    def count(self, choice: int, tokens: int, ended: bool) -> None:
        self._tokens[choice] += tokens
        if self._tokens[choice] >= self._after:
            self.turned.set()
        if ended:
            self._ended.add(choice)
            if len(self._ended) == self.n:
                self.over()

    def over(self) -> None:
        self.ended_at = min(self.ended_at, monotonic())
        self.turned.set()


def engine_request(case: VerifyCase, condition: Condition, salt: str, patience: float) -> Request:
    """The case as the SDK has it. patience: seconds that it may take."""
    params = SamplingParams(
        n=condition.choices, max_tokens=case.max_tokens, temperature=case.temperature,
        top_p=case.top_p, top_k=case.top_k, presence_penalty=case.presence_penalty,
        repetition_penalty=case.repetition_penalty, seed=case.seed,
        allowed_token_ids=list(case.allowed) or None, ignore_eos=not case.schema,
        stop=list(case.stop) or None,
        logprobs=TOPS if condition.logprobs else None,
        structured=Structured(json_schema=case.schema) if case.schema
        else None)
    prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
    return Request(prompt=prompt, params=params, cache_salt=salt, timeout=patience)


async def fill(client: AsyncClient, cases: Sequence[VerifyCase], salt: str, patience: float
               ) -> None:
    """Sends long, unseen prompts made of the cases' own tokens."""
    tokens = [token for case in cases for token in case.prompt if isinstance(token, int)] or [9]
    rows = [(tokens[i:] + tokens[:i]) * (1 + FILLER_TOKENS // len(tokens)) for i in range(FILLERS)]
    asked = [Request(prompt=row[:FILLER_TOKENS], cache_salt=salt, timeout=patience,
                     params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
             for row in rows]
    await asyncio.gather(*(EngineReader(client, one).read() for one in asked))


class EngineReader:
    def __init__(self, client: AsyncClient, request: Request,
                 cut: tuple[AsyncClient, int] | None = None,
                 progress: ReadingProgress | None = None) -> None:
        """cut: the stream is given up behind so many tokens, and read again by this client."""
        self._client, self._request, self._cut = client, request, cut
        assert request.params is not None
        self._n = request.params.n
        self._tokens_wanted = request.params.max_tokens or 1
        self._progress = progress or ReadingProgress(self._n)

    async def read(self) -> Received:
        try:
            if self._cut is not None:
                return await self._read_cut(*self._cut)
            return _answers([delta async for delta in self._deltas(self._client, self._request)],
                            self._n)
        except DeadlineExceeded:
            return NoAnswer(self._request.timeout or 0.0)
        except ActoriumError as error:
            return error.code
        finally:
            self._progress.over()

    async def leave(self) -> None:
        self._progress.leaving = True
        count = 0
        with suppress(ActoriumError):
            async with contextlib.aclosing(self._deltas(self._client, self._request)) as deltas:
                async for delta in deltas:
                    count += len(delta.token_ids)
                    if count * PART >= self._tokens_wanted:
                        break
        self._progress.over()

    async def _deltas(self, client: AsyncClient, request: Request
                      ) -> AsyncGenerator[StreamDelta, None]:
        async with contextlib.aclosing(AsyncDeltaStream(client, request)) as stream:
            async for delta in stream:
                self._counted(delta)
                yield delta

    def _counted(self, delta: StreamDelta) -> None:
        self._progress.count(delta.index, len(delta.token_ids), delta.finish_reason is not None)

    async def _read_cut(self, other: AsyncClient, tokens: int) -> Received:
        """What a caller has who lost the connection: the first part, and of the whole, which is
        read again, what comes behind it."""
        first: list[StreamDelta] = []
        # A name of its own for each reading: one that was aborted is not answered at once.
        request = msgspec.structs.replace(
            self._request, resumable=Resumable(rid=secrets.token_hex(12), seconds=RESUME_SECONDS))
        stream = AsyncDeltaStream(self._client, request)
        try:
            await stream.accepted()
            while sum(len(one.token_ids) for one in first) < tokens:
                delta = await anext(stream, None)
                if delta is None:
                    break
                self._counted(delta)
                first.append(delta)
            whole = await self._taken_up(other, request)
        finally:
            await stream.aclose()
        return spliced(_answers(first, self._n), _answers(whole, self._n))

    async def _taken_up(self, client: AsyncClient, request: Request) -> list[StreamDelta]:
        """Reads under the same request id: the request itself goes on, or its answer is still
        known. A client that received nothing for a while may have resent the request and taken its
        stream back: so this asks again, too."""
        for _ in range(TAKEN_BACK):
            with suppress(Aborted):
                return [delta async for delta in self._deltas(client, request)]
        return [delta async for delta in self._deltas(client, request)]


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


LATE = 1.0
"""Seconds that the scheduler's count may come after the answers: it rides on heartbeats."""
POLL = 0.05


class Unfinished(NamedTuple):
    number: int
    choices: int
    """Choices that had not ended."""
    ended_at: float
    """Seconds, of any clock."""


class WorkerDeath:
    """One death, in the midst of a round."""

    def __init__(self, run_dir: Path, requests: Sequence[ReadingProgress]) -> None:
        # Looking for the process takes longer than a short answer.
        self._victim = actors(run_dir).get(WORKER)
        self._requests = requests
        self._open: list[tuple[int, int]] = []
        self.struck = False

    async def strike(self) -> None:
        """Kills the worker once one of them is under way; not if all are over by then."""
        waits = [asyncio.ensure_future(one.turned.wait()) for one in self._requests]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        self._open = [(number, one.open_choices) for number, one in enumerate(self._requests)
                      if one.open_choices]
        if self._open and self._victim is not None:
            with suppress(ProcessLookupError):
                os.kill(self._victim.pid, signal.SIGKILL)
                self.struck = True

    def met(self, preempted: int) -> set[int]:
        """Numbers of the requests whose whole answer was under way. preempted: sequences that the
        scheduler took back from the worker."""
        unfinished = [Unfinished(number, choices, self._requests[number].ended_at)
                      for number, choices in self._open]
        return {number for number in met_by(unfinished, preempted)
                if not self._requests[number].leaving}

    async def taken_back(self, client: AsyncClient, before: int) -> int:
        """Sequences that the scheduler ever took back from a dead worker, `before` of them until
        now."""
        until = asyncio.get_running_loop().time() + LATE
        while self.struck:
            count = await taken_back(client)
            if count > before or asyncio.get_running_loop().time() > until:
                return count
            await asyncio.sleep(POLL)
        return before


async def taken_back(client: AsyncClient) -> int:
    """Sequences that the scheduler ever took back from a dead worker, as of its last heartbeat."""
    with suppress(ActoriumError):
        for actor in (await client.status()).actors:
            if actor.role == "scheduler":
                return int(actor.gauges.get("preemptions_worker", 0))
    return 0


def met_by(unfinished: Sequence[Unfinished], preempted: int) -> set[int]:
    """The numbers of those whose sequences were computed when the worker died. Some had only their
    last tokens still on the way: these end first, since the others wait for another worker."""
    chosen: set[int] = set()
    for one in sorted(unfinished, key=lambda one: -one.ended_at):
        if preempted <= 0:
            break
        chosen.add(one.number)
        preempted -= one.choices
    return chosen
