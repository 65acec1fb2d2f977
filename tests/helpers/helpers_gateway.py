"""A gateway behind the openai package: of a whole engine, or of a scripted one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx2 as httpx
import openai
from helpers_served import serving
from starlette.types import ASGIApp

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.launcher import engine
from actorium.actors.messages import Status, Usage

USAGE = Usage(7, 0, 5)


class Served(NamedTuple):
    """A whole engine with the packaged model, and who asks it."""

    engine: engine.Engine
    url: str
    client: openai.OpenAI

    @property
    def where(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextmanager
def served_to_openai() -> Iterator[Served]:
    with serving(max_num_seqs=16) as one, openai.OpenAI(
            base_url=f"{one.url}/v1", api_key="-", max_retries=0) as client:
        yield Served(one.engine, one.url, client)


class Scripted:
    """Stands for an `AsyncClient`: every request is answered by `texts`, one for each choice, cut
    at random places."""

    def __init__(self, texts: list[str], seed: int = 0, template: str = "",
                 finish: str = "stop") -> None:
        self.texts, self.finish = texts, finish
        self.asked: list[Request] = []
        self.model = "demo"
        self._draw = random.Random(seed)
        self._template = template
        self.generic_tools: list[str] = []

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        return {"model": self.model, "model_path": "/models/it", "max_model_len": 4096,
                "chat_template": self._template, "generic_tools": self.generic_tools}

    async def weight_version(self, timeout: float | None = None) -> int:
        return 0

    prompt_ids: ClassVar[list[int]] = [11, 12, 13]
    """Of any prompt."""

    async def tokenize_chat(self, messages: Any, *args: Any, **more: Any) -> list[int]:
        return list(self.prompt_ids)

    async def tokenize(self, text: str, add_special_tokens: bool = True, **more: Any) -> list[int]:
        return list(self.prompt_ids)

    async def status(self, timeout: float | None = None) -> Status:
        return Status("-", True, None, [])

    async def run(self, requests: list[Request]) -> Any:
        self.asked += requests
        for number in range(len(requests)):
            yield number, [Completion(text=text, token_ids=[1] * len(text) + [2],
                                      finish_reason=self.finish, usage=USAGE, index=i)
                           for i, text in enumerate(self.texts)]

    def deltas(self) -> list[StreamDelta]:
        found: list[StreamDelta] = []
        for i, text in enumerate(self.texts):
            at = 0
            while at < len(text):
                size = self._draw.choice((1, 1, 2, 3, 5, 9))
                piece = text[at:at + size]
                found.append(StreamDelta(text=piece, token_ids=[1] * len(piece), index=i))
                at += size
            found.append(StreamDelta(text="", token_ids=[2], finish_reason=self.finish, usage=USAGE,
                                     index=i))
        return found


class ScriptedStream:
    """Stands for an `AsyncDeltaStream`."""

    def __init__(self, client: Scripted, request: Request) -> None:
        client.asked.append(request)
        self._deltas = iter(client.deltas())

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def progress(self) -> None:
        """Nothing that is counted."""
        return None

    @property
    def prompt_tokens(self) -> int | None:
        return USAGE.prompt_tokens

    @property
    def created(self) -> int:
        """Nothing is recorded."""
        return 0

    async def accepted(self) -> int:
        return USAGE.prompt_tokens

    def more(self) -> list[StreamDelta]:
        """Never ahead."""
        return []

    async def aclose(self) -> None:
        """Nothing is under way."""

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration


def scripted_app(monkeypatch: Any, script: Scripted, config: Config | None = None) -> ASGIApp:
    """A gateway's application over a script."""
    scripted = GatewayState(config or Config(), Path("none"))
    scripted.engine.client = script  # type: ignore[assignment]
    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", ScriptedStream)
    return build_app(scripted)


def scripted_client(monkeypatch: Any, script: Scripted, **settings: Any) -> openai.AsyncOpenAI:
    """The openai package over a gateway's application, without sockets."""
    app = scripted_app(monkeypatch, script, Config(gateway=GatewayConfig(**settings)))
    transport = httpx.ASGITransport(app=app)
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="-", max_retries=0,
                              http_client=httpx.AsyncClient(transport=transport))
