"""Streams as benchmarks and small clients read them: cut at blank lines, less `data: `."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "stream": True}
TEXT: dict[str, Any] = {"prompt": "?", "stream": True}
PATHS = (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT))


def stream(app: Any, path: str, body: dict[str, Any], **headers: str) -> str:
    """All that comes."""

    async def ask() -> str:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = await client.post(path, json=body, headers=given)
            assert answer.status_code == 200, answer.text
            return str(answer.text)

    return asyncio.run(ask())


def parsed(raw: str) -> list[dict[str, Any]]:
    """As the benchmarks of vLLM and SGLang do it: any other line breaks them."""
    *events, rest = raw.split("\n\n")
    assert rest == ""
    chunks = [one.removeprefix("data: ") for one in events]
    assert chunks.pop() == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("usage", [False, True])
def test_events_are_data_alone(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
                               usage: bool) -> None:
    app = scripted_app(monkeypatch, Scripted(["Two words.", "and\n\nmore"]))
    chunks = parsed(stream(app, path, body | {"n": 2} | (
        {"stream_options": {"include_usage": True}} if usage else {})))
    said = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            said[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                "content") or ""
    assert said == ["Two words.", "and\n\nmore"]
    assert (chunks[-1]["choices"] == []) is usage
    options = {"include_usage": usage, "continuous_usage_stats": True}
    counted = parsed(stream(app, path, body | {"n": 2, "stream_options": options}))
    assert {chunk.get("usage") is not None for chunk in counted} == {usage}


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(("more", "headers"), [
    ({}, {"Idempotency_Key": "k"}), ({"stream_options": {"resumable": True}}, {})])
def test_events_have_ids_on_request(
        monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], more: dict[str, Any],
        headers: dict[str, str]) -> None:
    app = scripted_app(monkeypatch, Scripted(["Some words."]))
    *events, done, _ = stream(app, path, body | more, **headers).split("\n\n")
    assert done == "data: [DONE]"
    assert all(one.startswith("id: ") and "\ndata: {" in one for one in events)
    assert len({one.splitlines()[0] for one in events}) == len(events)


def test_streams_that_cannot_be_resumed_have_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    app = scripted_app(monkeypatch, Scripted(["a"]))
    many = TEXT | {"prompt": ["a"] * 65}
    raw = stream(app, "/v1/completions", many, Idempotency_Key="k")
    assert len(parsed(raw)) >= 65
    with pytest.raises(AssertionError, match="resumable"):
        stream(app, "/v1/completions", many | {"stream_options": {"resumable": True}})
