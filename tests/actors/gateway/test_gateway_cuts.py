"""Every API's streams broken off after each event and resumed: byte for byte what the whole would
have been, whatever the clock and the connection are by then; and answers told again under a key.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.types import ASGIApp

from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway import engine_call
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.messages import Status, TokenLogprob, Usage
from actorium.actors.runtime.http.connection_records import (
    ConnectionRecord,
    ConnectionRecords,
)
from actorium.actors.runtime.http.http_connection import RECORD

CREATED = 1_700_000_000
"""When the engine has recorded that the request came."""
TEMPLATE = "<think></think>{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
SAYS = ("<think>I <b>think</b></think>Riga, then.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>\n'
        "And a clock:"
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>Done <t')
USER = [{"role": "user", "content": "How is it in Riga?"}]
FUNCTIONS = [{"name": "weather", "parameters": {"type": "object"}}, {"name": "clock"}]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {
        "messages": USER, "tools": TOOLS, "stream_options": OPTIONS, "n": 2, "logprobs": True,
        "top_logprobs": 1, "return_token_ids": True}),
    "chat echo": ("/v1/chat/completions", {
        "messages": [*USER, {"role": "assistant", "content": "It is"}], "echo": True,
        "continue_final_message": True, "functions": FUNCTIONS, "stream_options": OPTIONS}),
    "completions": ("/v1/completions", {
        "prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "stream_options": OPTIONS,
        "return_token_ids": True}),
    "responses": ("/v1/responses", {
        "input": "How is it in Riga?", "store": False, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", **one} for one in FUNCTIONS]}),
    "messages": ("/v1/messages", {
        "messages": USER, "max_tokens": 99, "thinking": {"type": "enabled"},
        "tools": [{"name": one["name"], "input_schema": {}} for one in FUNCTIONS]}),
    "generate": ("/generate", {
        "text": ["a", "b"], "return_logprob": True, "return_text_in_logprobs": True,
        "logprob_start_len": 0}),
    "inference": ("/inference/v1/generate", {
        "token_ids": [1, 2], "sampling_params": {"logprobs": 1}, "stream_options": {
            "include_usage": True}}),
    "ollama chat": ("/api/chat", {"messages": USER, "tools": TOOLS, "logprobs": True,
                                  "think": True}),
    "ollama generate": ("/api/generate", {"prompt": "How is it in Riga?", "logprobs": True}),
}
NAMED = [api for api in APIS if not api.startswith("ollama")]
"""Those whose events can have ids."""


def deltas(choices: int, prompt_logprobs: bool) -> list[StreamDelta]:
    """Choices by turns. Text lags behind tokens, some of which have none."""
    out = []
    sizes = itertools.cycle((3, 1, 7, 0, 2, 11))
    for index in range(choices):
        at, token = 0, 0
        mine: list[StreamDelta] = []
        while at < len(SAYS):
            size, count = next(sizes), 1 + token % 2
            ids = list(range(token, token + count))
            mine.append(StreamDelta(
                text=SAYS[at:at + size], token_ids=ids, index=index,
                logprobs=[TokenLogprob(one, -one / 8, 1, [(one, -one / 8)]) for one in ids],
                prompt_logprobs=[None, TokenLogprob(5, -1.0, 1, [(5, -1.0)])]
                if prompt_logprobs and not mine else None))
            at, token = at + size, token + count
        mine.append(StreamDelta(text="", token_ids=[99], index=index, finish_reason="stop",
                                logprobs=[TokenLogprob(99, -1.0, 1, [(99, -1.0)])],
                                usage=Usage(7, 2, token + 1, 4, 3)))
        out.append(mine)
    return [one for row in itertools.zip_longest(*out) for one in row if one is not None]


class RecordedStream:
    """Stands for an `AsyncDeltaStream`: the same deltas each time, some of them together. The
    prompt's tokens are known once it was asked for."""

    def __init__(self, client: RecordedEngine, request: Request) -> None:
        self.prompt_tokens: int | None = None
        self.created = 0
        self.progress = None
        params = request.params
        assert params is not None
        made = deltas(params.n, params.prompt_logprobs is not None)
        if params.logprobs is None:
            made = [StreamDelta(text=one.text, token_ids=one.token_ids, index=one.index,
                                finish_reason=one.finish_reason, usage=one.usage) for one in made]
        self._deltas, self._at = made, 0

    async def accepted(self) -> int:
        self.prompt_tokens, self.created = 7, CREATED
        return 7

    def more(self) -> list[StreamDelta]:
        at = self._at
        while self._at < len(self._deltas) and self._at % 7 not in (0, 1, 3):
            self._at += 1
        return self._deltas[at:self._at]

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        await self.accepted()
        for _ in range(8):  # until whoever reads has told what there is
            await asyncio.sleep(0)
        if self._at == len(self._deltas):
            raise StopAsyncIteration
        self._at += 1
        return self._deltas[self._at - 1]

    async def aclose(self) -> None:
        """Nothing is under way."""

    async def __aenter__(self) -> RecordedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is under way."""


class RecordedEngine:
    """Stands for an `AsyncClient` whose engine knows the request."""

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        return {"model": "demo", "model_path": "", "max_model_len": 4096,
                "chat_template": TEMPLATE}

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [11, 12]

    async def tokenize_chat(self, *args: Any, **more: Any) -> list[int]:
        return [11, 12]

    async def detokenize(self, ids: list[int]) -> str:
        return "ab"

    async def status(self, timeout: float | None = None) -> Status:
        return Status("-", True, None, [])


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[ASGIApp]:
    """A gateway for which an hour passes between two requests."""
    gateway = GatewayState(Config(gateway=GatewayConfig()), Path("none"))
    gateway.engine.client = RecordedEngine()  # type: ignore[assignment]
    hours = itertools.count(2_000_000_000, 3600)
    monkeypatch.setattr(gateway.engine.token_texts, "ready", _nothing)
    monkeypatch.setattr(engine_call, "AsyncDeltaStream", RecordedStream)
    monkeypatch.setattr(engine_call, "time", lambda: next(hours), raising=False)
    yield build_app(gateway)


async def _nothing() -> None:
    """The texts of tokens are their numbers."""


async def told(app: ASGIApp, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    """The events of an answer, each with its id."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                 base_url="http://gateway") as client:
        answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text.split("\n\n")[:-1]


def id_of(event: str) -> str:
    return event.partition("\n")[0].removeprefix("id: ")


@pytest.mark.parametrize("api", NAMED)
def test_a_stream_resumed_after_any_event_is_the_whole_byte_for_byte(api: str, app: ASGIApp
                                                                     ) -> None:
    path, body = APIS[api][0], APIS[api][1] | {"stream": True}

    async def run() -> None:
        whole = await told(app, path, body, **{"Idempotency-Key": "k", "X-Request-Id": "first"})
        named = [one for one in whole if one.startswith("id: ")]
        assert len(named) > 20 and len({id_of(one) for one in named}) == len(named)
        for at in range(0, len(named), 1 + len(named) // 30):
            again = await told(app, path, body, **{"Last-Event-ID": id_of(named[at])},
                               **({"Idempotency-Key": "k"} if at % 2 else {}))
            assert again == whole[at + 1:], (at, named[at])

    asyncio.run(run())


@pytest.mark.parametrize("api", APIS)
def test_an_answer_under_a_key_is_told_again_byte_for_byte(api: str, app: ASGIApp) -> None:
    path, body = APIS[api]

    async def run() -> None:
        for more in ({}, {"stream": True}):
            asked = {name: value for name, value in (body | more).items()
                     if more or name != "stream_options"}
            first, second = [await told_whole(app, path, asked, number) for number in range(2)]
            assert first == second
            if api in NAMED and api not in ("generate", "inference", "messages"):
                assert f"{CREATED}" in first and "20000" not in first

    asyncio.run(run())


@pytest.mark.parametrize("api", APIS)
def test_another_gateway_goes_on_behind_any_write(api: str, app: ASGIApp) -> None:
    """Without ids: what the caller has had is in the record of its connection."""
    path, body = APIS[api][0], APIS[api][1] | {"stream": True}
    record = ConnectionRecords.create(1).open()
    assert record is not None

    async def run() -> None:
        whole = await writes(app, record, path, body, b"")
        assert len(whole) > 10
        for at in range(0, len(whole) - 1, 1 + len(whole) // 20):
            rest = await writes(app, record, path, body, whole[at][1])
            assert b"".join(timeless(one) for one, _ in rest) == \
                b"".join(timeless(one) for one, _ in whole[at + 1:]), at

    asyncio.run(run())


def timeless(events: bytes) -> bytes:
    """Without durations."""
    return re.sub(rb',"(?:total|load|prompt_eval|eval)_duration":\d+|"e2e_latency":[\d.e-]+', b"",
                  events)


async def writes(app: ASGIApp, record: ConnectionRecord, path: str, body: dict[str, Any],
                 begun: bytes) -> list[tuple[bytes, bytes]]:
    """(what is sent, the stream's position behind it) of one answer. begun: the position behind
    what a gateway before has sent."""
    record.begun = begun
    sent: list[tuple[bytes, bytes]] = []
    received = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((message["body"], record.position))

    await app({"type": "http", "method": "POST", "path": path, "query_string": b"",
               "headers": [(b"x-request-id", b"me")], "http_version": "1.1", "scheme": "http",
               "client": None, "server": None, RECORD: record}, receive, send)
    return sent


def test_lines_have_no_ids(app: ASGIApp) -> None:
    path, body = APIS["ollama chat"][0], APIS["ollama chat"][1]

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                     base_url="http://gateway") as client:
            whole = await client.post(path, json=body, headers={"Idempotency-Key": "k"})
            assert all(json.loads(line)["model"] for line in whole.text.splitlines())
            chat, more = APIS["chat"][0], APIS["chat"][1] | {"stream": True}
            names = await told(app, chat, more, **{"Idempotency-Key": "k"})
            refused = await client.post(path, json=body,
                                        headers={"Last-Event-ID": id_of(names[0])})
        assert refused.status_code == 400 and "Last-Event-ID" in refused.json()["error"]

    asyncio.run(run())


async def told_whole(app: ASGIApp, path: str, body: dict[str, Any], number: int) -> str:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                 base_url="http://gateway") as client:
        answer = await client.post(path, json=body, headers={
            "Idempotency-Key": "again", "X-Request-Id": f"connection-{number}"})
    assert answer.status_code == 200, answer.text
    return answer.text


def test_the_numbers_of_a_response_s_events_go_through(app: ASGIApp) -> None:
    path, body = APIS["responses"][0], APIS["responses"][1] | {"stream": True}
    whole = asyncio.run(told(app, path, body, **{"Idempotency-Key": "k"}))
    numbers = [json.loads(one.partition("data: ")[2])["sequence_number"] for one in whole]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("api", ["chat", "completions", "messages", "generate"])
def test_the_first_usage_has_the_prompt(api: str, app: ASGIApp) -> None:
    path, body = APIS[api][0], APIS[api][1] | {"stream": True}
    first = asyncio.run(told(app, path, body, **{"Idempotency-Key": "k"}))[0]
    found = json.loads(first.partition("data: ")[2])
    counts = found["message"]["usage"]["input_tokens"] if api == "messages" else \
        found["meta_info"]["prompt_tokens"] if api == "generate" else \
        found["usage"]["prompt_tokens"]
    assert counts == (14 if api == "completions" else 7)
