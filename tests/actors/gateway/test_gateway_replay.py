"""Streams that break off and go on after any event, whatever was cut how: ids and deltas alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from helpers_examples import examples
from helpers_gateway import Scripted
from helpers_served import Event

from actorium.actors.client.requests import StreamDelta
from actorium.actors.config.tree import Config
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.resume.delta_streams import MergedStream, RelayedStream
from actorium.actors.gateway.resume.event_ids import (
    MAX_CHOICES,
    ResumableStream,
    StreamPosition,
    decode_position,
    parse_event_id,
)
from actorium.actors.messages import TokenLogprob, Usage
from actorium.actors.runtime.http.connection_records import ConnectionRecords
from actorium.actors.runtime.http.http_connection import RECORD


class Uncounted:
    """A route whose events depend on the deltas alone."""

    def counts(self) -> tuple[int, ...]:
        return ()

    def restore(self, counts: tuple[int, ...]) -> None:
        assert counts == ()


class Script(RelayedStream):
    """Deltas from a list; `more` takes as many as the draw says."""

    def __init__(self, deltas: list[StreamDelta], draw: random.Random) -> None:
        self._deltas, self._draw = deltas, draw

    @property
    def prompt_tokens(self) -> int | None:
        return 7

    def prompts(self) -> tuple[int, ...]:
        return (7,)

    async def accepted(self) -> int:
        return 7

    def more(self) -> list[StreamDelta]:
        count = self._draw.choice((0, 0, 1, 3))
        found, self._deltas = self._deltas[:count], self._deltas[count:]
        return found

    async def __anext__(self) -> StreamDelta:
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    async def aclose(self) -> None:
        """Nothing is under way."""


def script(draw: random.Random, choices: int) -> list[StreamDelta]:
    """The same request, cut at random."""
    parts: list[list[StreamDelta]] = []
    for index in range(choices):
        tokens = list(range(20 + index))
        mine: list[StreamDelta] = []
        while tokens:
            count = draw.randint(1, 4)
            new, tokens = tokens[:count], tokens[count:]
            mine.append(StreamDelta(
                text="".join(f"<{index}.{t}>" for t in new), token_ids=new, index=index,
                logprobs=[TokenLogprob(t, -1.0, 1, []) for t in new]))
        mine.append(StreamDelta(text="", token_ids=[], index=index, finish_reason="stop",
                                usage=Usage(7, 0, 20 + index)))
        parts.append(mine)
    out = []
    while any(parts):
        out.append(draw.choice([p for p in parts if p]).pop(0))
    return out


async def events(stream: ResumableStream) -> AsyncGenerator[bytes, None]:
    """A route: roles, two events a delta, a last one of usage."""
    begun: set[int] = set()
    yield b"data: hello\n\n"
    async for delta in stream:
        blob = b""
        for one in [delta, *stream.more()]:
            if one.index not in begun:
                begun.add(one.index)
                blob += b"data: role %d\n\n" % one.index
            if one.text:
                blob += b"data: text %d %b %r\n\n" % (one.index, one.text.encode(), one.token_ids)
                told = ",".join(str(each.token_id) for each in one.logprobs or ())
                blob += b"data: probs %d %b,\n\n" % (one.index, told.encode())
            if one.finish_reason:
                blob += b"data: end %d %b\n\n" % (one.index, one.finish_reason.encode())
        yield blob
    yield b"data: usage\n\n"


async def told(stream: ResumableStream) -> list[Event]:
    out = []
    async for blob in events(stream):
        for one in stream.label(blob).split(b"\n\n")[:-1]:
            first, _, data = one.decode().partition("\n")
            out.append(Event(first.removeprefix("id: "), data.removeprefix("data: ")))
    return out


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_goes_on_after_any_event_whatever_the_deltas(seed: int) -> None:
    async def run() -> None:
        draw = random.Random(seed)
        choices = 1 + seed % 3
        first = await told(ResumableStream(Script(script(draw, choices), draw), "r.d", None,
                                           Uncounted()))
        assert len({one.id for one in first}) == len(first)
        for at in range(len(first)):
            mark = parse_event_id(first[at].id)
            assert str(mark) == first[at].id
            again = await told(ResumableStream(Script(script(draw, choices), draw), "r.d", mark,
                                                Uncounted()))
            assert spoken(first[:at + 1] + again, choices) == spoken(first, choices)
            assert again[-1].data == "usage" if at + 1 < len(first) else again == []

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(6))
def test_streams_of_several_prompts_go_on_together(seed: int) -> None:
    async def run() -> None:
        draw = random.Random(seed)
        prompts, choices = 2 + seed % 3, 1 + seed % 2

        def source() -> MergedStream:
            return MergedStream([Script(script(draw, choices), draw) for _ in range(prompts)],
                                choices)

        first = await told(ResumableStream(source(), "r.d", None, Uncounted()))
        for at in range(0, len(first), 3):
            mark = parse_event_id(first[at].id)
            rest = await told(ResumableStream(source(), "r.d", mark, Uncounted()))
            assert spoken(first[:at + 1] + rest, prompts * choices) == \
                spoken(first, prompts * choices)

    asyncio.run(run())


@pytest.mark.parametrize("choices", [1, 2, 3, MAX_CHOICES + 6])
def test_a_stream_goes_on_behind_any_write(choices: int) -> None:
    """Without ids, and again and again: behind what was written since it went on, too."""
    draw = random.Random(choices)

    async def writes(position: bytes) -> list[tuple[list[Event], bytes]]:
        stream = ResumableStream(Script(script(draw, choices), draw), "r.d",
                                 decode_position(position) if position else None, Uncounted(),
                                 shows_ids=False)
        out = []
        async for blob in events(stream):
            if blob := stream.label(blob):
                assert b"id: " not in blob
                out.append(([Event("", one.decode().removeprefix("data: "))
                             for one in blob.split(b"\n\n")[:-1]], stream.encoded_position()))
        return out

    async def run() -> None:
        whole = await writes(b"")
        expected = spoken([one for found, _ in whole for one in found], choices)
        for at in range(0, len(whole), 1 + len(whole) // examples(10)):
            sent, position = [one for found, _ in whole[:at + 1] for one in found], whole[at][1]
            while rest := await writes(position):
                stop = draw.randint(1, len(rest))
                sent += [one for found, _ in rest[:stop] for one in found]
                position = rest[stop - 1][1]
            assert spoken(sent, choices) == expected

    asyncio.run(run())


def spoken(found: list[Event], choices: int) -> list[Any]:
    """What does not depend on the cutting: roles and ends once, texts and log-probabilities joined.
    """
    datas = [one.data for one in found]
    texts = ["".join(d.split(" ")[2] for d in datas if d.startswith(f"text {i} "))
             for i in range(choices)]
    probs = ["".join(d.split(" ")[2] for d in datas if d.startswith(f"probs {i} "))
             for i in range(choices)]
    others = sorted(d for d in datas if not d.startswith(("text", "probs")))
    return [texts, probs, others]


@pytest.mark.parametrize("text", ["", "1", "r:::", "r::::1", "r:1:0.1:0.1.1:1", "r:1::0.1.1:1;",
                                  "r:1::" + "0.1.1," * 999 + ":1", "r:1::0.1.1:-1", "\u0660:::0:1",
                                  "r:1::0.1." + "9" * 400 + ":1", "r:\n:::1"])
def test_invalid_event_ids_are_refused(text: str) -> None:
    if text == "r::::1":
        assert parse_event_id(text) == StreamPosition("r", (), [], [], 1)
        return
    with pytest.raises(HttpError):
        parse_event_id(text)


@pytest.mark.parametrize(("path", "last"), [
    ("/v1/chat/completions", b"data: [DONE]\n\n"), ("/v1/messages", b"event: error\n"),
    ("/api/chat", b'{"error":"the engine is stopping"}\n')])
def test_a_stream_that_cannot_be_continued_ends_with_its_error(
        path: str, last: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head has been sent by the gateway before."""
    gateway = GatewayState(Config(), Path("none"))
    gateway.engine.client, gateway.draining = Scripted(["hello"]), True  # type: ignore[assignment]
    record = ConnectionRecords.create(1).open()
    assert record is not None
    stream = ResumableStream(Script([], random.Random(1)), "r.d", None, None, shows_ids=False)
    record.begun = stream.encoded_position()
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
             "http_version": "1.1", "scheme": "http", "client": None, "server": None,
             RECORD: record}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(build_app(gateway)(scope, receive, send))
    [body] = sent
    assert b"the engine is stopping" in body["body"] and last in body["body"]
    assert record.ends and not body.get("more_body")
