"""The openai package, as its users use it: in the clients' environment 2.x, in the tests' 3.x."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from wire import QUESTION, STORY, TELL, Server

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.conformance
USER: list[Any] = [{"role": "user", "content": QUESTION}]
FOX: list[Any] = [{"role": "user", "content": TELL}]
WEATHER: dict[str, Any] = {"type": "function", "function": {
    "name": "get_weather", "strict": True, "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"], "additionalProperties": False}}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Person(BaseModel):
    """Somebody."""

    name: Literal["Anna", "Ben"]
    happy: bool


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as found:
        yield found


def test_models(server: Server, client: Any) -> None:
    (card,) = client.models.list().data
    assert card.id == server.model == client.models.retrieve(server.model).id
    assert isinstance(card.max_model_len, int)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize("name", ["served", "default", ""])
def test_names(server: Server, client: Any, name: str) -> None:
    found = client.chat.completions.create(
        model=server.model if name == "served" else name, messages=USER, max_tokens=2)
    assert found.choices[0].message.role == "assistant"


def test_completions(server: Server, client: Any) -> None:
    given = {"model": server.model, "prompt": STORY, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**given, logprobs=2)
    assert whole.usage.completion_tokens == 12 and len(whole.choices[0].logprobs.tokens) == 12
    parts = list(client.completions.create(**given, stream=True))
    assert "".join(one.choices[0].text for one in parts) == whole.choices[0].text


def test_chat_and_its_stream(server: Server, client: Any) -> None:
    given = {"model": server.model, "messages": FOX, "max_completion_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**given)
    parts = list(client.chat.completions.create(**given, stream=True,
                                                stream_options={"include_usage": True}))
    text = "".join(one.choices[0].delta.content or "" for one in parts if one.choices)
    assert text == whole.choices[0].message.content and text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper(server: Server, client: Any) -> None:
    with client.chat.completions.stream(model=server.model, messages=USER, temperature=0,
                                        max_completion_tokens=64, stop=["."]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content and final.choices[0].finish_reason == "stop"


def test_parse_into_a_model(server: Server, client: Any) -> None:
    found = client.chat.completions.parse(model=server.model, messages=USER, max_tokens=80,
                                          response_format=Person).choices[0].message
    assert isinstance(found.parsed, Person) and found.refusal is None


def test_parse_a_stream_into_a_model(server: Server, client: Any) -> None:
    with client.chat.completions.stream(model=server.model, messages=USER, max_tokens=80,
                                        response_format=Person) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_a_loop_of_tools(server: Server, client: Any) -> None:
    found = client.chat.completions.create(model=server.model, messages=USER, tools=[WEATHER],
                                           tool_choice=NAMED, max_tokens=60)
    message = found.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    again = client.chat.completions.create(model=server.model, max_tokens=8, messages=[
        *USER, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}])
    assert again.choices[0].message.content


def test_a_tool_parsed_from_a_stream(server: Server, client: Any) -> None:
    class GetWeather(BaseModel):
        city: Literal["Paris", "Oslo"]

    with client.chat.completions.stream(
            model=server.model, messages=USER, max_tokens=60, temperature=0, tool_choice="required",
            parallel_tool_calls=False, tools=[openai.pydantic_function_tool(GetWeather)]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)


def test_responses(server: Server, client: Any) -> None:
    first = client.responses.create(model=server.model, input="My name is Mark.",
                                    max_output_tokens=16)
    assert first.output_text and client.responses.retrieve(first.id).id == first.id
    second = client.responses.create(model=server.model, input="What is my name?",
                                     previous_response_id=first.id, max_output_tokens=16)
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_stream_of_responses(server: Server, client: Any) -> None:
    given = {"model": server.model, "input": QUESTION, "max_output_tokens": 64, "temperature": 0}
    with client.responses.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    assert final.output_text == client.responses.create(**given).output_text


def test_responses_parse_into_a_model(server: Server, client: Any) -> None:
    found = client.responses.parse(model=server.model, input=QUESTION, text_format=Person,
                                   max_output_tokens=80)
    assert isinstance(found.output_parsed, Person)


def test_responses_in_the_background(server: Server, client: Any) -> None:
    found = client.responses.create(model=server.model, input=TELL, background=True,
                                    max_output_tokens=3000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(found.id).status == "cancelled"


def test_counting_tokens_of_responses(server: Server, client: Any) -> None:
    found = client.responses.input_tokens.count(model=server.model, input=QUESTION)
    assert found.input_tokens > 0


ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "BadRequestError", "temperature"),
    ({"model": "no-such-model"}, "NotFoundError", "no-such-model"),
    ({"messages": []}, "BadRequestError", "messages"),
    ({"messages": [{"role": "user", "content": "word " * 30_000}]}, "BadRequestError", "context"),
    ({"extra_body": {"use_beam_search": True}}, "BadRequestError", "use_beam_search"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("more,kind,words", ERRORS, ids=lambda one: str(one)[:30])
def test_errors(server: Server, client: Any, more: dict[str, Any], kind: str, words: str,
                streamed: bool) -> None:
    with pytest.raises(getattr(openai, kind), match=words) as caught:
        client.chat.completions.create(**{"model": server.model, "messages": USER,
                                          "stream": streamed} | more)
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


def test_a_timeout_of_the_client(server: Server) -> None:
    hasty = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(model=server.model, messages=FOX, max_tokens=4000,
                                      extra_body={"ignore_eos": True})


def test_many_at_once(server: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            found = await asyncio.gather(*(client.chat.completions.create(
                model=server.model, messages=USER, max_tokens=8, temperature=0)
                for _ in range(16)))
            return [one.choices[0].message.content for one in found]

    assert all(asyncio.run(run()))


def test_raw_answers(server: Server, client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=server.model, messages=USER, max_tokens=2)
    assert raw.headers["x-request-id"] and raw.parse().choices
