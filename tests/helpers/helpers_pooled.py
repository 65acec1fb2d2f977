"""An engine that embeds and classifies by rules that a test can compute as well."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx2 as httpx
from helpers_gateway import Scripted
from starlette.types import ASGIApp

from actorium.actors.client.requests import Completion, Request
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.messages import Pooled, Usage

WIDTH = 6
Prompt = str | list[int]


def vector(prompt: Prompt, dimensions: int | None = None, normalise: bool = True) -> list[float]:
    """What the engine makes of a prompt: numbers of float32."""
    codes = prompt.encode() if isinstance(prompt, str) else prompt
    numbers = [1.0 + sum(code * (i + 1) % 17 for code in codes) for i in range(WIDTH)][:dimensions]
    length = math.hypot(*numbers) if normalise else 1.0
    return array("f", [number / length for number in numbers]).tolist()


def pair_score(query: str, document: str) -> float:
    """What the engine says of a pair."""
    return array("f", [len(set(query) & set(document)) / 32])[0]


class PooledEngine(Scripted):
    """Stands for an `AsyncClient`. Requests end in the reverse of their order."""

    prompts: ClassVar[dict[str, str]] = {"query": "Find: "}
    template = ""
    """Of chats."""

    def __init__(self, *tasks: str, labels: Sequence[str] = ("LABEL_0",)) -> None:
        super().__init__(["yes"])
        self._tasks, self._labels, self._scores = tasks, list(labels), len(labels)
        self.calls: list[int] = []
        """How many requests each call of `run` had."""
        self.failing: dict[int, ActoriumError] = {}
        """Numbers of requests that fail."""

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        info = await super().server_info(timeout)
        return info | {"tasks": list(self._tasks), "chat_template": self.template, "pooling": {
            "labels": self._labels, "prompts": self.prompts}}

    async def tokenize(self, text: str, add_special_tokens: bool = True, **more: Any) -> list[int]:
        return list(text.encode()) if not add_special_tokens else [1, *text.encode()]

    async def run(self, requests: list[Request]) -> Any:
        self.asked += requests
        self.calls.append(len(requests))
        for number in reversed(range(len(requests))):
            if number in self.failing:
                yield number, self.failing[number]
            else:
                yield number, [self._completion(requests[number])]

    def _completion(self, request: Request) -> Completion:
        prompt: Any = request.prompt if request.messages is None else "\n".join(
            str(turn["content"] if isinstance(turn, dict) else turn.content)
            for turn in request.messages)
        pooled = None if request.pooling is None else self._pooled(request, prompt)
        return Completion(text="", token_ids=[], finish_reason="stop", pooled=pooled,
                          usage=Usage(len(prompt), 0, 0), rid="r1")

    def _pooled(self, request: Request, prompt: Prompt) -> Pooled:
        params = request.pooling
        assert params is not None
        if params.task == "embed":
            numbers = vector(prompt, params.dimensions, params.use_activation is not False)
        elif params.task == "classify" and request.text_pair is not None:
            numbers = [pair_score(str(prompt), request.text_pair)] * self._scores
        elif params.task == "classify":
            numbers = vector(prompt)[:self._scores]
        else:
            rows = [vector([token]) for token in prompt]
            return Pooled([len(rows), WIDTH], b"".join(array("f", row) for row in rows))
        return Pooled([len(numbers)], array("f", numbers).tobytes())


def pooled_app(engine: Scripted, **settings: Any) -> ASGIApp:
    """A gateway's application over the engine."""
    gateway = GatewayState(Config(gateway=GatewayConfig(**settings)), Path("none"))
    gateway.engine.client = engine  # type: ignore[assignment]
    return build_app(gateway)


def post(engine: Scripted, path: str, body: Any, headers: dict[str, str] | None = None
         ) -> httpx.Response:
    """One request to such a gateway."""
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=pooled_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())
