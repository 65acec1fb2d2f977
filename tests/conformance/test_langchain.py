"""langchain-openai: chats, streams, tools, structured output, both of its APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from wire import QUESTION, Server

from actorium.actors.params import SamplingParams

langchain = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.conformance
PROMPT = "Tell me a story about a fox."


def model(server: Server, **more: Any) -> Any:
    """A client of the engine."""
    given = {"model": server.model, "base_url": f"{server.url}/v1", "api_key": "-",
             "temperature": 0, "max_tokens": 24, "max_retries": 0} | more
    return langchain.ChatOpenAI(**given)


def wanted(server: Server) -> str:
    """What the SDK says."""
    text: str = server.client.chat(
        [{"role": "user", "content": PROMPT}],
        SamplingParams(max_tokens=24, temperature=0.0)).text
    return text


@pytest.mark.parametrize("responses", [False, True])
def test_invoke_stream_and_batch(server: Server, responses: bool) -> None:
    chat, want = model(server, use_responses_api=responses), wanted(server)
    assert chat.invoke(PROMPT).text == want
    parts = list(chat.stream(PROMPT))
    assert len(parts) > 2 and "".join(part.text for part in parts) == want
    assert {one.text for one in chat.batch([QUESTION] * 3)} == {chat.invoke(QUESTION).text}
    if not responses:  # its asynchronous connections are shared, and end with the loop
        assert asyncio.run(chat.ainvoke(PROMPT)).text == want


def test_usage(server: Server) -> None:
    parts = list(model(server, stream_usage=True).stream(PROMPT))
    used = [part.usage_metadata for part in parts if part.usage_metadata]
    assert sum(one["output_tokens"] for one in used) == 24


class Weather(BaseModel):
    """How is the weather?"""

    place: Literal["Riga", "Oslo"]


@pytest.mark.parametrize("responses", [False, True])
def test_tools(server: Server, responses: bool) -> None:
    bound = model(server, use_responses_api=responses, max_tokens=200).bind_tools(
        [Weather], tool_choice="Weather")
    calls = bound.invoke(PROMPT).tool_calls
    assert calls[0]["name"] == "Weather" and calls[0]["args"]["place"] in ("Riga", "Oslo")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(server: Server, method: str) -> None:
    chat = model(server, max_tokens=64).with_structured_output(Weather, method=method)
    assert isinstance(chat.invoke(PROMPT), Weather)


def test_plain_completions(server: Server) -> None:
    llm = langchain.OpenAI(model=server.model, base_url=f"{server.url}/v1", api_key="-",
                           temperature=0, max_tokens=8, max_retries=0)
    want = server.client.generate("Once upon a time", SamplingParams(
        max_tokens=8, temperature=0.0)).text
    assert llm.invoke("Once upon a time") == want == "".join(llm.stream("Once upon a time"))
