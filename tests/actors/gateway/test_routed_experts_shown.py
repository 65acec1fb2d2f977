"""`return_routed_experts` of each API: what is asked of the engine, and how its answer is shown."""

from __future__ import annotations

import asyncio
from array import array
from base64 import b64decode, b64encode
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from helpers_gateway import Scripted, scripted_app

from actorium.actors.messages import RoutedExperts

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FEW = RoutedExperts((2, 1, 3), bytes((5, 0, 255, 1, 2, 3)))
MANY = RoutedExperts((1, 2, 2), array("H", (7, 300, 511, 256)).tobytes())


class Routing(Scripted):
    """Its completions have these experts, where they are asked for."""

    experts = FEW

    async def run(self, requests: list[Any]) -> Any:
        async for number, found in super().run(requests):
            wanted = requests[number].params.routed_experts
            yield number, [msgspec.structs.replace(
                one, routed_experts=self.experts if wanted else None) for one in found]


def post(patch: pytest.MonkeyPatch, engine: Scripted, path: str, **body: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=scripted_app(patch, engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("experts", [FEW, MANY])
def test_each_choice_has_its_own(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
                                 experts: RoutedExperts) -> None:
    engine = Routing(["a", "b"])
    engine.experts = experts
    answer = post(monkeypatch, engine, path, **body, n=2, return_routed_experts=True).json()
    for choice in answer["choices"]:
        shown = choice["routed_experts"]
        assert shown["dtype"] == f"uint{8 * experts.width}"
        assert RoutedExperts(tuple(shown["shape"]), b64decode(shown["data"])) == experts
    answer = post(monkeypatch, engine, path, **body, n=2).json()
    assert "routed_experts" not in answer["choices"][0]


@pytest.mark.parametrize(("path", "body", "why"), [
    ("/v1/completions", {"prompt": "hi", "stream": True}, "not in a stream"),
    ("/v1/chat/completions", {**CHAT, "stream": True}, "not in a stream"),
    ("/v1/messages", {**CHAT, "max_tokens": 3}, "not of messages"),
    ("/v1/responses", {"input": "hi"}, "not of responses")])
def test_who_cannot_show_them_refuses(monkeypatch: pytest.MonkeyPatch, path: str,
                                      body: dict[str, Any], why: str) -> None:
    answer = post(monkeypatch, Routing(["a"]), path, **body, return_routed_experts=True)
    assert answer.status_code == 400
    assert "return_routed_experts" in answer.text and why in answer.text


@pytest.mark.parametrize(("experts", "numbers"), [
    (FEW, [[[5, 0, 255]], [[1, 2, 3]]]), (MANY, [[[7, 300], [511, 256]]])])
def test_numbers_of_one_and_two_bytes(experts: RoutedExperts, numbers: list[Any]) -> None:
    assert experts.tolist() == numbers
    assert experts.part(0, 1).tolist() == numbers[:1]
    assert b64encode(experts.part(1, 9).data) == b64encode(experts.data[len(experts.data)
                                                                        // experts.shape[0]:])
