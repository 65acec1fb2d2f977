"""Tool calls of one text over every API that answers with calls, one format of each form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest
from helpers_calls import written
from helpers_gateway import Scripted, scripted_app

from actorium.actors.config.tree import Config, GatewayConfig

CALLS = [("weather", {"city": "Riga", "days": 2}), ("weather", {"city": "Oslo", "days": 3})]
SCHEMA = {"type": "object",
          "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": FUNCTION}]}
Call = tuple[str, Any]


def of_chat(answer: str) -> list[Call]:
    calls = json.loads(answer)["choices"][0]["message"]["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in calls]


def of_ollama(answer: str) -> list[Call]:
    return [(call["function"]["name"], call["function"]["arguments"])
            for line in answer.splitlines()
            for call in json.loads(line)["message"].get("tool_calls", ())]


def of_responses(answer: str) -> list[Call]:
    return [(item["name"], json.loads(item["arguments"]))
            for item in json.loads(answer)["output"] if item["type"] == "function_call"]


def of_messages(answer: str) -> list[Call]:
    return [(block["name"], block["input"])
            for block in json.loads(answer)["content"] if block["type"] == "tool_use"]


APIS: list[tuple[str, dict[str, Any], Callable[[str], list[Call]]]] = [
    ("/v1/chat/completions", CHAT, of_chat),
    ("/api/chat", CHAT | {"stream": False}, of_ollama),
    ("/api/chat", CHAT, of_ollama),
    ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}, of_responses),
    ("/v1/messages", {"max_tokens": 9, "messages": CHAT["messages"], "tools": [
        {"name": "weather", "input_schema": SCHEMA}]}, of_messages)]


@pytest.mark.parametrize("form", ["harmony", "gemma4", "deepseek_v32", "kimi_k2", "mistral",
                                  "apertus", "llama4_pythonic", "qwen3_coder"])
def test_calls_are_the_same_over_every_api(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    app = scripted_app(monkeypatch, Scripted([written(form, CALLS)]),
                       Config(gateway=GatewayConfig(tool_call_parser=form)))

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                     base_url="http://gateway") as client:
            for path, body, calls_of in APIS:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                assert calls_of(answer.text) == CALLS, path

    asyncio.run(run())
