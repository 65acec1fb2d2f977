"""`/v1/messages` through the anthropic package."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from wire import QUESTION, Server

from actorium.actors.params import SamplingParams

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.conformance
PROMPT: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
ASK: dict[str, Any] = {"model": "default", "max_tokens": 24, "messages": PROMPT,
                       "extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {"name": "weather", "input_schema": {
    "type": "object", "properties": {"place": {"enum": ["Riga", "Oslo"]}}, "required": ["place"],
    "additionalProperties": False}}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)


def test_create_stream_and_count(server: Server, client: Any) -> None:
    want = server.client.chat(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))
    whole = client.messages.create(**ASK)
    assert [block.text for block in whole.content] == [want.text]
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == want.text
        final = stream.get_final_message()
    assert final.content[0].text == want.text and final.stop_reason == whole.stop_reason
    count = client.messages.count_tokens(model=server.model, messages=PROMPT)
    assert count.input_tokens == want.usage.prompt_tokens


def test_a_forced_tool(client: Any) -> None:
    ask = ASK | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"},
                 "max_tokens": 200}
    whole = client.messages.create(**ask)
    assert whole.stop_reason == "tool_use" and whole.content[0].name == "weather"
    assert whole.content[0].input["place"] in ("Riga", "Oslo")
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == whole.content[0].input
    again = client.messages.create(**ASK | {"messages": [
        *PROMPT, {"role": "assistant", "content": [b.model_dump() for b in whole.content]},
        {"role": "user", "content": [{"type": "tool_result", "content": "rain",
                                      "tool_use_id": whole.content[0].id}]}]})
    assert again.usage.input_tokens > 0


def test_several_at_once(server: Server) -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="-") as client:
            found = await asyncio.gather(*(client.messages.create(**ASK | {
                "messages": [{"role": "user", "content": QUESTION}]}) for _ in range(6)))
            return [one.content[0].text for one in found]

    assert len(set(asyncio.run(run()))) == 1


def test_errors_have_their_types(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASK | {"extra_body": {"temperature": -1}})
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**ASK | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="source.url: the model takes text"), \
            client.messages.stream(**ASK | {"messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": "x"}}]}]}):
        pass
