"""pydantic-ai: tools, outputs by tools and by schema, over chats, responses and messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from between import Between, Script, between, calls, says, turns
from pydantic import BaseModel
from thinking import LESS
from wire import TELL, Server

pydantic_ai = pytest.importorskip("pydantic_ai")
pytestmark = [pytest.mark.conformance, pytest.mark.models("demo")]
KINDS = ("chat", "responses", "messages")
each = pytest.mark.parametrize("kind", KINDS)
streamed = pytest.mark.parametrize("streamed", [False, True])
City = Literal["Riga", "Oslo"]


class Forecast(BaseModel):
    """What an agent answers."""

    cold: bool
    city: City


def weather(city: City) -> str:
    """The weather of a city."""
    return f"{city}: 5 degrees"


@contextmanager
def agent(server: Server, kind: str, script: Script, **more: Any) -> Iterator[tuple[Any, Between]]:
    """An agent whose requests get the script's fields, and what passed."""
    with between(server, script) as wire:
        if kind == "messages":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            model: Any = AnthropicModel(server.model, provider=AnthropicProvider(
                api_key="-", base_url=wire.url))
        else:
            from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
            from pydantic_ai.providers.openai import OpenAIProvider

            make = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
            model = make(server.model, provider=OpenAIProvider(
                api_key="-", base_url=f"{wire.url}/v1"))
        yield pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": 300},
                                **more), wire
        assert not wire.refused()


def run(one: Any, streamed: bool, **more: Any) -> Any:
    """A whole run; its result."""
    async def streaming() -> Any:
        async with one.run_stream_events(TELL, **more) as events:
            found = [event async for event in events]
        return found[-1].result

    return asyncio.run(streaming() if streamed else one.run(TELL, **more))


@each
@streamed
def test_a_loop_of_calls(server: Server, kind: str, streamed: bool) -> None:
    script = turns(says(calls("weather", {"city": "Riga"})), says(calls("weather", {
        "city": "Oslo"})), says("Both are cold."))
    with agent(server, kind, script, tools=[weather]) as (one, wire):
        result = run(one, streamed)
    assert result.output == "Both are cold." and len(wire.sent) == 3
    assert result.usage.tool_calls == 2 and result.usage.output_tokens > 30


@each
@streamed
def test_a_conversation_goes_on(server: Server, kind: str, streamed: bool) -> None:
    script = turns(says(calls("weather", {"city": "Riga"})), says("It is cold."),
                   says("Take a coat."))
    with agent(server, kind, script, tools=[weather]) as (one, wire):
        first = run(one, streamed)
        second = run(one, streamed, message_history=first.all_messages())
    assert second.output == "Take a coat." and len(wire.sent) == 3
    assert second.usage.input_tokens > 100


@each
@streamed
def test_arguments_that_do_not_fit(server: Server, kind: str, streamed: bool) -> None:
    """The model is told, and tries again."""
    script = turns(says(calls("weather", {"city": "Atlantis"})),
                   says(calls("weather", {"city": "Riga"})), says("It is cold."))
    with agent(server, kind, script, tools=[weather]) as (one, wire):
        assert run(one, streamed).output == "It is cold."
    assert len(wire.sent) == 3


@each
@streamed
def test_an_output_by_a_tool(server: Server, kind: str, streamed: bool) -> None:
    """The output's tool is one of those of which one must be called."""
    with agent(server, kind, turns({}), output_type=Forecast) as (one, _):
        assert isinstance(run(one, streamed).output, Forecast)


@pytest.mark.parametrize("kind", ["chat", "responses"])
@streamed
def test_an_output_by_schema(server: Server, kind: str, streamed: bool) -> None:
    with agent(server, kind, turns({}),
               output_type=pydantic_ai.NativeOutput(Forecast)) as (one, _):
        assert isinstance(run(one, streamed).output, Forecast)


@pytest.mark.parametrize("kind", ["chat", "responses"])
@streamed
def test_an_output_by_schema_beside_tools(server: Server, kind: str, streamed: bool) -> None:
    script = turns({"logit_bias": {str(LESS): 100}}, {"logit_bias": {str(LESS): -100}})
    with agent(server, kind, script, tools=[weather],
               output_type=pydantic_ai.NativeOutput(Forecast)) as (one, wire):
        assert isinstance(run(one, streamed).output, Forecast)
    assert len(wire.sent) == 2
