"""Requests at an engine's own gateway: streams of events, read to their end or cut anywhere and
taken up.

Log-probabilities come as decimal text, the shortest that is this number and no other, so that what
is read has the engine's bits and is compared as exactly as what its own client reads.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from actorium.actors.errors import EngineUnavailable
from actorium.tools.bench.http_client import EventReader, Http, RefusedByServer
from actorium.tools.evaluation.http_model import COMPLETIONS
from actorium.tools.verify.company import PART
from actorium.tools.verify.conditions import Condition
from actorium.tools.verify.contradictions import CaseAnswer, NoAnswer, spliced
from actorium.tools.verify.engine_readers import TOPS, ReadingProgress
from actorium.tools.verify.event_reading import json_events
from actorium.tools.verify.stream_cuts import StreamCut
from actorium.tools.verify.verify_cases import VerifyCase
from actorium.tools.verify.verify_run import Choices, Heard

GONE_AFTER = 0.002
"""Seconds after which a caller is gone who has sent a request and heard nothing of it."""


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
    """See `AnswerReader`."""

    def __init__(self, http: Http, body: Mapping[str, Any], patience: float,
                 cut: StreamCut | None = None, progress: ReadingProgress | None = None) -> None:
        """cut: where the connection is lost, and how the stream is taken up."""
        self._http, self._body, self._patience, self._cut = http, dict(body), patience, cut
        self._n = int(body["n"])
        self._progress = progress or ReadingProgress(self._n)

    async def read(self) -> Heard:
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
        """Sends the request and is gone. Raises `EngineUnavailable`."""
        data = msgspec.json.encode(self._body)
        _, writer = await self._http.connection()
        writer.write(self._http.head("POST", COMPLETIONS, headers, len(data)) + data)
        with suppress(OSError):
            await writer.drain()
        await asyncio.sleep(GONE_AFTER)
        writer.close()

    async def _events(self, headers: str, reader: EventReader, most: float = math.inf
                      ) -> list[dict[str, Any]]:
        """Those of a stream, up to the one with the `most`th token. Raises `EngineUnavailable`."""
        found, tokens = [], 0
        events = json_events(self._http, COMPLETIONS, self._body, headers, reader)
        async with aclosing(events):
            async for event in events:
                found.append(event)
                for part in event.get("choices") or ():
                    told = len(part.get("token_ids") or ())
                    tokens += told
                    self._progress.told(part["index"], told, part.get("finish_reason") is not None)
                if tokens >= most:
                    break
        return found


def choices_of(events: Sequence[Mapping[str, Any]], n: int) -> Choices:
    """The choices of a stream of `/v1/completions` with token ids."""
    return tuple(_choice([part for event in events for part in event.get("choices") or ()
                          if part["index"] == index]) for index in range(n))


def _choice(parts: Sequence[Mapping[str, Any]]) -> CaseAnswer:
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
