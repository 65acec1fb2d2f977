"""litellm: chats, streams, tools, text completions, and its own way to Anthropic's API."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from wire import Server

from actorium.actors.params import SamplingParams

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would look for one on the net
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.conformance
PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]


def ask(server: Server, kind: str = "openai", **more: Any) -> dict[str, Any]:
    """The arguments of a call."""
    base = server.url if kind == "anthropic" else f"{server.url}/v1"
    return {"model": f"{kind}/{server.model}", "api_base": base, "api_key": "-", "messages": PROMPT,
            "temperature": 0, "max_tokens": 24, "num_retries": 0} | more


def wanted(server: Server) -> str:
    """What the SDK says."""
    text: str = server.client.chat(
        PROMPT, SamplingParams(max_tokens=24, temperature=0.0)).text
    return text


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm", "anthropic"])
def test_whole_and_streamed(server: Server, kind: str) -> None:
    want = wanted(server)
    whole = litellm.completion(**ask(server, kind))
    assert whole.choices[0].message.content == want and whole.usage.completion_tokens == 24
    said = "".join(part.choices[0].delta.content or "" for part in
                   litellm.completion(**ask(server, kind, stream=True)))
    assert said == want


def test_asynchronously(server: Server) -> None:
    found = asyncio.run(litellm.acompletion(**ask(server)))
    assert found.choices[0].message.content == wanted(server)


def test_tools(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"place": {"enum": ["Riga", "Oslo"]}},
        "required": ["place"], "additionalProperties": False}}}
    found = litellm.completion(**ask(server, tools=[tool], tool_choice="required", max_tokens=200))
    call = found.choices[0].message.tool_calls[0].function
    assert call.name == "weather" and "place" in call.arguments


def test_text_completions(server: Server) -> None:
    given = ask(server, "text-completion-openai", prompt="Once upon a time")
    del given["messages"]
    found = litellm.text_completion(**given)
    want = server.client.generate("Once upon a time", SamplingParams(
        max_tokens=24, temperature=0.0)).text
    assert found.choices[0].text == want


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm"])
def test_errors(server: Server, kind: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ask(server, kind, temperature=-1))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**ask(server, kind, model=f"{kind}/no-such-model"))


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm", "anthropic"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_context_that_is_too_long(server: Server, kind: str, streamed: bool) -> None:
    """By the error's words litellm tells it from others; callers fall back on longer models."""
    with pytest.raises(litellm.ContextWindowExceededError):
        list(litellm.completion(**ask(server, kind, stream=streamed, messages=[
            {"role": "user", "content": "word " * 30_000}])))


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm"])
def test_a_schema(server: Server, kind: str) -> None:
    schema = {"type": "object", "properties": {"happy": {"type": "boolean"}},
              "required": ["happy"], "additionalProperties": False}
    found = litellm.completion(**ask(server, kind, max_tokens=40, response_format={
        "type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}))
    assert set(json.loads(found.choices[0].message.content)) == {"happy"}
