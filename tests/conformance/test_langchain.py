"""langchain-openai: chats, streams, tools, structured output, both of its APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from actorium.actors.params import SamplingParams

langchain = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.conformance
PROMPT = "Tell me a story about a fox."


def model(served: Any, **more: Any) -> Any:
    """A client of the engine."""
    given = {"model": "demo", "base_url": f"{served.url}/v1", "api_key": "-", "temperature": 0,
             "max_tokens": 24, "max_retries": 0} | more
    return langchain.ChatOpenAI(**given)


def wanted(served: Any) -> str:
    """What the SDK says."""
    text: str = served.engine.client.chat(
        [{"role": "user", "content": PROMPT}],
        SamplingParams(max_tokens=24, temperature=0.0)).text
    return text


@pytest.mark.parametrize("responses", [False, True])
def test_invoke_stream_and_batch(served: Any, responses: bool) -> None:
    chat, want = model(served, use_responses_api=responses), wanted(served)
    assert chat.invoke(PROMPT).text == want
    parts = list(chat.stream(PROMPT))
    assert len(parts) > 2 and "".join(part.text for part in parts) == want
    assert [one.text for one in chat.batch([PROMPT] * 3)] == [want] * 3
    if not responses:  # its asynchronous connections are shared, and end with the loop
        assert asyncio.run(chat.ainvoke(PROMPT)).text == want


def test_usage(served: Any) -> None:
    parts = list(model(served, stream_usage=True).stream(PROMPT))
    used = [part.usage_metadata for part in parts if part.usage_metadata]
    assert sum(one["output_tokens"] for one in used) == 24


class Weather(BaseModel):
    """How is the weather?"""

    place: Literal["Riga", "Oslo"]


@pytest.mark.parametrize("responses", [False, True])
def test_tools(served: Any, responses: bool) -> None:
    bound = model(served, use_responses_api=responses).bind_tools(
        [Weather], tool_choice="Weather")
    calls = bound.invoke(PROMPT).tool_calls
    assert calls[0]["name"] == "Weather" and calls[0]["args"]["place"] in ("Riga", "Oslo")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(served: Any, method: str) -> None:
    chat = model(served, max_tokens=64).with_structured_output(Weather, method=method)
    assert isinstance(chat.invoke(PROMPT), Weather)


def test_plain_completions(served: Any) -> None:
    llm = langchain.OpenAI(model="demo", base_url=f"{served.url}/v1", api_key="-", temperature=0,
                           max_tokens=8, max_retries=0)
    want = served.engine.client.generate("Once upon a time", SamplingParams(
        max_tokens=8, temperature=0.0)).text
    assert llm.invoke("Once upon a time") == want == "".join(llm.stream("Once upon a time"))
