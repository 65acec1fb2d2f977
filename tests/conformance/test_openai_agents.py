"""openai-agents: loops of calls, formats beside tools, handoffs and sessions, over both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from between import Between, Script, between, calls, says, turns
from pydantic import BaseModel
from thinking import ENDS, LESS
from wire import TELL, Server

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.conformance, pytest.mark.models("demo")]
agents.set_tracing_disabled(True)
both = pytest.mark.parametrize("kind", ["responses", "chat"])
streamed = pytest.mark.parametrize("streamed", [False, True])
City = Literal["Riga", "Oslo"]


class Forecast(BaseModel):
    """What an agent answers."""

    cold: bool
    city: City


@agents.function_tool
def weather(city: City, days: int | None = None) -> str:
    """The weather of a city.

    Args:
        city: where.
        days: how many.
    """
    return f"{city}: 5 degrees, {days} days"


@contextmanager
def model(server: Server, kind: str, script: Script) -> Iterator[tuple[Any, Between]]:
    """A model whose requests get the script's fields, and what passed."""
    with between(server, script) as wire:
        client = openai.AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="-", max_retries=0)
        make = agents.OpenAIResponsesModel if kind == "responses" else \
            agents.OpenAIChatCompletionsModel
        yield make(server.model, client), wire
        assert not wire.refused()


def run(agent: Any, text: str, streamed: bool, **more: Any) -> Any:
    """A whole run; its result."""
    async def streaming() -> Any:
        result = agents.Runner.run_streamed(agent, text, **more)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.run(streaming() if streamed else agents.Runner.run(agent, text, **more))


def settings(**more: Any) -> Any:
    return agents.ModelSettings(temperature=0, max_tokens=300, include_usage=True, **more)


def calling(bias: int) -> dict[str, Any]:
    """A bias for or against a call, where an object may come as well."""
    return {"logit_bias": {str(LESS): bias}}


@both
@streamed
def test_an_answer(server: Server, kind: str, streamed: bool) -> None:
    with model(server, kind, turns({})) as (it, _):
        agent = agents.Agent("teller", instructions="Be brief.", model=it,
                             model_settings=settings())
        result = run(agent, TELL, streamed)
        (spent,) = result.raw_responses
        assert result.final_output and spent.usage.output_tokens > 10


@both
@streamed
def test_a_loop_of_calls(server: Server, kind: str, streamed: bool) -> None:
    script = turns(says(calls("weather", {"city": "Riga", "days": 2})),
                   says(calls("weather", {"city": "Oslo"})), says("Both are cold."))
    with model(server, kind, script) as (it, wire):
        agent = agents.Agent("caller", instructions="Be brief.", model=it, tools=[weather],
                             model_settings=settings())
        result = run(agent, TELL, streamed)
    assert result.final_output == "Both are cold." and len(wire.sent) == 3
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["Riga: 5 degrees, 2 days", "Oslo: 5 degrees, None days"]
    read = [one.usage.input_tokens for one in result.raw_responses]
    assert read == sorted(set(read)), "each turn is longer"


@both
@streamed
def test_arguments_that_do_not_fit(server: Server, kind: str, streamed: bool) -> None:
    script = turns(says(calls("weather", {"city": "Atlantis"})), says("There is none."))
    with model(server, kind, script) as (it, _):
        agent = agents.Agent("caller", model=it, tools=[weather], model_settings=settings())
        assert run(agent, TELL, streamed).final_output == "There is none."


@both
@streamed
def test_a_format(server: Server, kind: str, streamed: bool) -> None:
    with model(server, kind, turns({})) as (it, _):
        agent = agents.Agent("former", model=it, output_type=Forecast, model_settings=settings())
        assert isinstance(run(agent, TELL, streamed).final_output, Forecast)


@both
@streamed
def test_a_format_beside_tools(server: Server, kind: str, streamed: bool) -> None:
    """The format is sent with every request: a call first, then the object."""
    script = turns(calling(100), calling(-100))
    with model(server, kind, script) as (it, wire):
        agent = agents.Agent("former", model=it, tools=[weather], output_type=Forecast,
                             model_settings=settings())
        result = run(agent, TELL, streamed)
    assert isinstance(result.final_output, Forecast) and len(wire.sent) == 2
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


@both
@streamed
def test_a_format_beside_tools_at_once(server: Server, kind: str, streamed: bool) -> None:
    with model(server, kind, turns(calling(-100))) as (it, wire):
        agent = agents.Agent("former", model=it, tools=[weather], output_type=Forecast,
                             model_settings=settings())
        assert isinstance(run(agent, TELL, streamed).final_output, Forecast)
    assert len(wire.sent) == 1


@both
@streamed
def test_a_required_call_beside_a_format(server: Server, kind: str, streamed: bool) -> None:
    """After a call the choice is free again."""
    with model(server, kind, turns({}, calling(-100))) as (it, wire):
        agent = agents.Agent("former", model=it, tools=[weather], output_type=Forecast,
                             model_settings=settings(tool_choice="required",
                                                     parallel_tool_calls=False))
        result = run(agent, TELL, streamed)
    assert isinstance(result.final_output, Forecast)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


@both
@streamed
def test_a_required_call(server: Server, kind: str, streamed: bool) -> None:
    with model(server, kind, turns({}, says("It is cold."))) as (it, _):
        agent = agents.Agent("caller", model=it, tools=[weather], model_settings=settings(
            tool_choice="required", parallel_tool_calls=False))
        result = run(agent, TELL, streamed)
    assert result.final_output == "It is cold."
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


@both
@streamed
def test_a_handoff(server: Server, kind: str, streamed: bool) -> None:
    script = turns(says(calls("transfer_to_meteorologist", {})),
                   says(calls("weather", {"city": "Oslo"})), says("It is cold."))
    with model(server, kind, script) as (it, wire):
        expert = agents.Agent("meteorologist", handoff_description="Knows the weather.", model=it,
                              tools=[weather], model_settings=settings())
        agent = agents.Agent("desk", instructions="Hand off.", model=it, handoffs=[expert],
                             model_settings=settings())
        result = run(agent, TELL, streamed)
    assert result.last_agent.name == "meteorologist" and result.final_output == "It is cold."
    assert len(wire.sent) == 3


@both
@streamed
def test_a_session(server: Server, kind: str, streamed: bool) -> None:
    """A second run sends all of the first one again."""
    script = turns(says(calls("weather", {"city": "Riga"})), says("It is cold."),
                   says("Take a coat."))
    with model(server, kind, script) as (it, wire):
        agent = agents.Agent("caller", model=it, tools=[weather], model_settings=settings())
        session = agents.SQLiteSession("conversation")
        first = run(agent, TELL, streamed, session=session)
        second = run(agent, "And what do I wear?", streamed, session=session)
    assert second.final_output == "Take a coat."
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[-1].usage.input_tokens
    told = wire.sent[-1]
    assert len(told["input"] if kind == "responses" else told["messages"]) >= 5


@streamed
def test_a_response_that_is_kept(server: Server, streamed: bool) -> None:
    script = turns(says(calls("weather", {"city": "Riga"})), says("It is cold."),
                   says("Take a coat."))
    with model(server, "responses", script) as (it, wire):
        agent = agents.Agent("caller", model=it, tools=[weather], model_settings=settings())
        first = run(agent, TELL, streamed)
        second = run(agent, "And what do I wear?", streamed,
                     previous_response_id=first.last_response_id)
    assert second.final_output == "Take a coat." and len(wire.sent[-1]["input"]) == 1
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[-1].usage.input_tokens


@both
@streamed
def test_thoughts_and_calls(thinking_server: Server, kind: str, streamed: bool) -> None:
    script = turns(says(calls("weather", {"city": "Riga"})), says("It is cold."))
    with model(thinking_server, kind, script) as (it, wire):
        agent = agents.Agent("thinker", model=it, tools=[weather], model_settings=settings())
        result = run(agent, TELL, streamed)
    assert result.final_output == "It is cold." and len(wire.sent) == 2
    kinds = [item.type for item in result.new_items]
    assert kinds.index("reasoning_item") < kinds.index("tool_call_item")


@both
@streamed
def test_thoughts_and_a_format(thinking_server: Server, kind: str, streamed: bool) -> None:
    with model(thinking_server, kind, turns(ENDS)) as (it, _):
        agent = agents.Agent("thinker", model=it, output_type=Forecast, model_settings=settings())
        result = run(agent, TELL, streamed)
    assert isinstance(result.final_output, Forecast)
    assert any(item.type == "reasoning_item" for item in result.new_items)
