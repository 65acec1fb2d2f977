"""Requests over HTTP: at an engine's own gateway, as streams that are read to their end or cut
anywhere and taken up; and at any server that speaks OpenAI's API, by completions, or chat where
there are none. What a server can be asked for is tried first, so that an option that it does not
know makes no contradiction.

Log-probabilities come as decimal text, the shortest that is this number and no other, so that what
is read has the engine's bits and is compared as exactly as what its own client reads.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, cast

import msgspec

from actorium.actors.errors import EngineUnavailable
from actorium.tools.bench.http_client import EventReader, Http, RefusedByServer
from actorium.tools.evaluation.http_model import BUSY, CHAT, COMPLETIONS, WAITS
from actorium.tools.verify.conditions import PLAIN, VALUES, Condition
from actorium.tools.verify.contradictions import CaseAnswer, NoAnswer, spliced
from actorium.tools.verify.engine_readers import (
    PART,
    PATIENCE,
    TOPS,
    ReadingProgress,
    asked_before,
    read_together,
)
from actorium.tools.verify.verify_cases import SCHEMA, VerifyCase, joined
from actorium.tools.verify.verify_run import Choices, EngineCounts, Received


async def json_events(http: Http, path: str, body: dict[str, Any], headers: str,
                      reader: EventReader | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the events of a stream; an answer that is no stream as one event. reader: keeps the
    ids. Raises `EngineUnavailable`, also for an error within the stream."""
    events = cast(AsyncGenerator[bytes, None], http.events(path, body, headers, reader))
    async with aclosing(events):
        async for data in events:
            try:
                event = msgspec.json.decode(data, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise EngineUnavailable(f"not JSON: {error}") from None
            if "error" in event:
                raise EngineUnavailable(f"in the stream: {str(event['error'])[:200]}")
            yield event


ENDS = 0.25
"""Probability that a stream is cut before its first token, and the same before its last."""

ANEW = 1 / 3
"""Probability that a cut stream is read from its start again."""


class StreamCut(NamedTuple):
    """How much is received before the connection is lost and, over HTTP, how the caller resumes."""

    tokens: int
    """Tokens of all choices together."""
    anew: bool
    """Read from the first token again; else from the last event on."""


def cut_of(case: VerifyCase, condition: Condition) -> StreamCut | None:
    """The cut of this request's stream, the same whenever it is asked under this condition; None
    where it is read to its end. Its place keeps its share of the answer while requests shrink."""
    if condition.reading not in ("cut", "http-cut"):
        return None
    chance = random.Random(f"{case.seed} {condition.position_seed}")
    last = max(case.max_tokens * condition.choices - 1, 0)
    where = chance.random()
    drawn = min(int(chance.random() * (last + 1)), last)
    tokens = 0 if where < ENDS else last if where < 2 * ENDS else drawn
    return StreamCut(tokens, chance.random() < ANEW)


GONE_AFTER = 0.002
"""Seconds after which a caller disconnects that has received nothing."""


def gateway_body(case: VerifyCase, condition: Condition, salt: str, patience: float
                 ) -> dict[str, Any]:
    """The case for `/v1/completions`; what it leaves open there the model's own defaults would
    fill."""
    body: dict[str, Any] = {
        "prompt": case.prompt if isinstance(case.prompt, str) else list(case.prompt),
        "max_tokens": case.max_tokens, "temperature": case.temperature, "top_p": case.top_p,
        "top_k": case.top_k, "presence_penalty": case.presence_penalty,
        "repetition_penalty": case.repetition_penalty, "seed": case.seed,
        "n": condition.choices, "ignore_eos": not case.schema, "cache_salt": salt, "stream": True,
        "timeout": patience, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if condition.logprobs:
        body["logprobs"] = TOPS
    if case.allowed:
        body["allowed_token_ids"] = list(case.allowed)
    if case.stop:
        body["stop"] = list(case.stop)
    if case.schema:
        body["guided_json"] = case.schema
    return body


class GatewayReader:
    def __init__(self, http: Http, body: Mapping[str, Any], patience: float,
                 cut: StreamCut | None = None, progress: ReadingProgress | None = None) -> None:
        """cut: where the connection is lost, and how the stream is taken up."""
        self._http, self._body, self._patience, self._cut = http, dict(body), patience, cut
        self._n = int(body["n"])
        self._progress = progress or ReadingProgress(self._n)

    async def read(self) -> Received:
        try:
            async with asyncio.timeout(self._patience):
                if self._cut is None:
                    return choices_of(await self._events("", EventReader()), self._n)
                return await self._read_cut(self._cut)
        except TimeoutError:
            return NoAnswer(self._patience)
        except EngineUnavailable as error:
            status = error.status if isinstance(error, RefusedByServer) else "connection"
            return f"{status}: {error.message[:120]}"
        finally:
            self._progress.over()

    async def leave(self) -> None:
        self._progress.leaving = True
        with suppress(EngineUnavailable, TimeoutError):
            async with asyncio.timeout(self._patience):
                await self._events("", EventReader(), -(-self._body["max_tokens"] // PART))
        self._progress.over()

    async def _read_cut(self, cut: StreamCut) -> Choices:
        """What a caller has who lost the connection and called again, under one key: without it a
        request ends with its connection. Raises `EngineUnavailable`."""
        key, reader = f"Idempotency-Key: {secrets.token_hex(12)}\r\n", EventReader()
        if not cut.tokens:
            await self._lose(key)
            return choices_of(await self._events(key, reader), self._n)
        first = await self._events(key, reader, cut.tokens)
        if cut.anew:
            whole = await self._events(key, EventReader())
            return spliced(choices_of(first, self._n), choices_of(whole, self._n))
        last = f"Last-Event-ID: {reader.last_id.decode()}\r\n"
        rest = await self._events(key + last, EventReader())
        return choices_of([*first, *rest], self._n)

    async def _lose(self, headers: str) -> None:
        """Sends the request and disconnects. Raises `EngineUnavailable`."""
        data = msgspec.json.encode(self._body)
        _, writer = await self._http.connection()
        writer.write(self._http.head("POST", COMPLETIONS, headers, len(data)) + data)
        with suppress(OSError):
            await writer.drain()
        await asyncio.sleep(GONE_AFTER)
        writer.close()

    async def _events(self, headers: str, reader: EventReader, most: float = math.inf
                      ) -> list[dict[str, Any]]:
        """Returns the events of a stream up to the one with the `most`th token. Raises
        `EngineUnavailable`."""
        found, tokens = [], 0
        events = json_events(self._http, COMPLETIONS, self._body, headers, reader)
        async with aclosing(events):
            async for event in events:
                found.append(event)
                for part in event.get("choices") or ():
                    told = len(part.get("token_ids") or ())
                    tokens += told
                    self._progress.count(part["index"], told, part.get("finish_reason") is not None)
                if tokens >= most:
                    break
        return found


def choices_of(events: Sequence[Mapping[str, Any]], n: int) -> Choices:
    """The choices of a stream of `/v1/completions` with token ids."""
    return tuple(_gateway_choice([part for event in events for part in event.get("choices") or ()
                          if part["index"] == index]) for index in range(n))


def _gateway_choice(parts: Sequence[Mapping[str, Any]]) -> CaseAnswer:
    told = [part["logprobs"] for part in parts if part.get("logprobs")]
    return CaseAnswer(
        tokens=tuple(token for part in parts for token in part.get("token_ids") or ()),
        text="".join(part.get("text") or "" for part in parts),
        finish=next((part["finish_reason"] for part in parts if part.get("finish_reason")), ""),
        logprobs=tuple(_number(one) for each in told for one in each["token_logprobs"])
        if told else None,
        tops=tuple({int(name.removeprefix("token_id:")): _number(value)
                    for name, value in (top or {}).items()}
                   for each in told for top in each["top_logprobs"]))


def _number(value: float | None) -> float:
    """JSON has no infinite numbers."""
    return -math.inf if value is None else value


SERVER_TOPS = 5
FORMAT = {"type": "json_schema", "json_schema": {
    "name": "answer", "strict": True, "schema": msgspec.json.decode(SCHEMA)}}
TRIED: Mapping[str, Any] = {
    "seed": 7, "n": 2, "ignore_eos": True, "return_tokens_as_token_ids": True, "top_k": 20,
    "repetition_penalty": 1.2, "presence_penalty": 0.5, "response_format": FORMAT,
    "cache_salt": "salt"}
"""Options, each tried with a value that is good."""


class ServerAbilities(NamedTuple):
    path: str
    options: frozenset[str] = frozenset()
    """Those of `TRIED` that it did not refuse."""
    logprobs: bool = False
    seeds: bool = False
    """The same seed gave the same text."""
    salts: bool = False
    """It knows `cache_salt`: a wrong one is refused."""


class ServerAsker:
    def __init__(self, http: Http, model: str, headers: str, can: ServerAbilities,
                 values: Mapping[str, Sequence[Any]] = VALUES, patience: float = PATIENCE) -> None:
        """patience: seconds that a request may take."""
        self._patience = patience
        self._http, self._model, self._headers, self.can = http, model, headers, can
        self.held: Mapping[str, str] = {}
        self.counts = EngineCounts()
        self.lanes = 1
        self.plain = PLAIN if can.salts else Condition(cache="warm")
        mine: dict[str, Sequence[Any]] = {
            "neighbours": VALUES["neighbours"], "order": VALUES["order"],
            "reading": ("stream", "cut"),
            "cache": ("together", "warm", "shared") if can.salts else ("cold", "shared"),
            "neighbours_leave": (True,)}
        if "n" in can.options:
            mine["choices"] = VALUES["choices"]
        if can.logprobs:
            mine["logprobs"] = (False,)
        self.values: Mapping[str, Sequence[Any]] = {
            axis: several for axis, several in mine.items() if axis in values}
        self._known: set[VerifyCase] = set()
        self._renewed = 0

    def renewed(self, case: VerifyCase, condition: Condition) -> VerifyCase:
        """Without salts a prompt that begins otherwise is the only one that is not cached."""
        if self.can.salts or condition.cache not in ("cold", "shared"):
            return case
        self._renewed += 1
        head = f"{secrets.token_hex(4)} {self._renewed}"
        return msgspec.structs.replace(case, prompt=joined(head, case.prompt))

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
        salt = secrets.token_hex(6)
        salts = [salt if condition.cache != "cold" else f"{salt}-{i}" for i in range(len(cases))]
        before = [case for case in asked_before(cases, condition)
                  if self.can.salts or case not in self._known]
        await asyncio.gather(*(self._reader(one, PLAIN, salt).read() for one in before))
        self._known.update((*before, *cases))
        return await read_together(
            [self._reader(case, condition, own)
             for case, own in zip(cases, salts, strict=True)], condition.neighbours_leave)

    def _reader(self, case: VerifyCase, condition: Condition, salt: str) -> _ServerReader:
        body = request_body(self._model, case, condition, salt, self.can)
        return _ServerReader(self._http, self.can.path, body, self._headers, condition.reading,
                             self._patience)


def request_body(model: str, case: VerifyCase, condition: Condition, salt: str,
                 can: ServerAbilities) -> dict[str, Any]:
    """Returns the case as a body with only the options that the server takes."""
    prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
    body: dict[str, Any] = {"model": model, "max_tokens": case.max_tokens,
                            "temperature": case.temperature, "top_p": case.top_p}
    if can.path == COMPLETIONS:
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if condition.logprobs and can.logprobs:
        body |= ({"logprobs": SERVER_TOPS} if can.path == COMPLETIONS else
                 {"logprobs": True, "top_logprobs": SERVER_TOPS})
    # Which seeds the choices of a sampled request have is each server's own affair.
    options = {"seed": case.seed, "n": condition.choices if case.greedy else 1,
               "ignore_eos": not case.schema, "return_tokens_as_token_ids": "logprobs" in body,
               "top_k": case.top_k or None, "cache_salt": salt if can.salts else None,
               "presence_penalty": case.presence_penalty or None,
               "repetition_penalty": case.repetition_penalty,
               "response_format": FORMAT if case.schema else None}
    plain = {"n": 1, "ignore_eos": False, "return_tokens_as_token_ids": False,
             "repetition_penalty": 1.0}
    return body | {name: value for name, value in options.items()
                   if name in can.options and value is not None and plain.get(name) != value}


class _ServerReader:
    def __init__(self, http: Http, path: str, body: dict[str, Any], headers: str, reading: str,
                 patience: float) -> None:
        self._patience = patience
        self._http, self._path, self._reading = http, path, reading
        self._body, self._headers = body | {"stream": reading != "whole"}, headers
        self._n = body.get("n", 1)

    async def read(self) -> Received:
        for wait in (*WAITS, None):
            try:
                async with asyncio.timeout(self._patience):
                    return await self.answer()
            except TimeoutError:
                return NoAnswer(self._patience)
            except EngineUnavailable as error:
                status = error.status if isinstance(error, RefusedByServer) else 0
                if wait is None or status and status not in BUSY:
                    return f"{status or 'connection'}: {error.message[:120]}"
                await asyncio.sleep(wait)
        raise AssertionError

    async def answer(self) -> Choices:
        """Raises `EngineUnavailable`."""
        if self._reading != "cut":
            return _answers([one async for one in self._events(self._headers)], self._n)
        # A server that knows such keys goes on with the request itself; others are asked anew.
        headers = f"{self._headers}Idempotency-Key: {secrets.token_hex(12)}\r\n"
        first = await self._some(headers)
        whole = [one async for one in self._events(headers)]
        return spliced(_answers(first, self._n), _answers(whole, self._n))

    async def leave(self) -> None:
        with suppress(EngineUnavailable, TimeoutError):
            async with asyncio.timeout(self._patience):
                await self._some(self._headers)

    async def _some(self, headers: str) -> list[dict[str, Any]]:
        frames: list[dict[str, Any]] = []
        body = self._body | {"stream": True}
        async with aclosing(self._events(headers, body)) as events:
            async for event in events:
                frames.append(event)
                if len(frames) * PART >= self._body["max_tokens"]:
                    break
        return frames

    def _events(self, headers: str, body: dict[str, Any] | None = None
                ) -> AsyncGenerator[dict[str, Any], None]:
        return json_events(self._http, self._path, body or self._body, headers)


def _answers(events: Sequence[Mapping[str, Any]], n: int) -> Choices:
    return tuple(_choice([one for event in events for one in event.get("choices") or ()
                          if one.get("index", 0) == index]) for index in range(n))


def _choice(parts: Sequence[Mapping[str, Any]]) -> CaseAnswer:
    text, finish = "", ""
    tokens: list[int | str] = []
    values: list[float] = []
    tops: list[dict[int | str, float]] = []
    for part in parts:
        message = part.get("delta") or part.get("message") or {}
        text += part.get("text") or message.get("content") or ""
        finish = part.get("finish_reason") or finish
        for token, value, top in parsed_logprobs(part.get("logprobs") or {}):
            tokens.append(token)
            values.append(value)
            tops.append(top)
    return CaseAnswer(tokens=tuple(tokens), text=text, finish=finish,
                      logprobs=tuple(values) or None, tops=tuple(tops))


def parsed_logprobs(logprobs: Mapping[str, Any]) -> list[tuple[str, float, dict[int | str, float]]]:
    """(token, its log-probability, those of the likeliest), in the form of chat or of completions;
    llama.cpp's server has the first for both."""
    if logprobs.get("content"):
        return [(one["token"], one["logprob"],
                 {top["token"]: top["logprob"] for top in one.get("top_logprobs") or ()})
                for one in logprobs["content"]]
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    return [(token, value, top or {}) for token, value, top in
            zip(tokens, values, tops, strict=False) if value is not None]


# --- what it takes -------------------------------------------------------------------------------

async def probed(http: Http, model: str, headers: str, patience: float = PATIENCE
                 ) -> ServerAbilities:
    """Raises `EngineUnavailable` where neither completions nor chat answer in so many seconds."""
    try:
        async with asyncio.timeout(patience):
            return await _probed(http, model, headers)
    except TimeoutError:
        raise EngineUnavailable(f"{http.url}: {NoAnswer(patience)} to what it is tried with"
                                ) from None


async def _probed(http: Http, model: str, headers: str) -> ServerAbilities:
    case = VerifyCase(prompt="Once upon a time", max_tokens=2)
    can = ServerAbilities(COMPLETIONS)
    try:
        await _tried(http, model, headers, can, case)
    except RefusedByServer as error:
        if error.status not in (400, 404, 405, 422, 501):
            raise
        can = ServerAbilities(CHAT)
        await _tried(http, model, headers, can, case)
    taken = {name for name, value in TRIED.items()
             if await _takes(http, model, headers, can, case, {name: value})}
    can = can._replace(options=frozenset(taken), logprobs=True)
    try:
        [answer] = await _tried(http, model, headers, can, case)
        can = can._replace(logprobs=answer.logprobs is not None)
    except RefusedByServer:
        can = can._replace(logprobs=False)
    wrong = await _takes(http, model, headers, can, case, {"cache_salt": 5})
    can = can._replace(salts="cache_salt" in taken and not wrong)
    sampled = msgspec.structs.replace(case, max_tokens=16, temperature=1.0, seed=11)
    texts = [(await _tried(http, model, headers, can, sampled))[0].text for _ in range(3)]
    return can._replace(seeds="seed" in taken and len(set(texts)) < len(texts))


async def _tried(http: Http, model: str, headers: str, can: ServerAbilities, case: VerifyCase,
                 more: Mapping[str, Any] | None = None) -> Choices:
    body = request_body(model, case, PLAIN, "probe", can) | dict(more or {})
    return await _ServerReader(http, can.path, body, headers, "whole", PATIENCE).answer()


async def _takes(http: Http, model: str, headers: str, can: ServerAbilities, case: VerifyCase,
                 more: Mapping[str, Any]) -> bool:
    try:
        await _tried(http, model, headers, can, case, more)
    except RefusedByServer:
        return False
    return True
