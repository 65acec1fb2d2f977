"""Responses that are stored: asked for again, gone on with, done in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2 as httpx
import openai
import pytest
from helpers_gateway import Scripted, ScriptedStream, Served

from actorium.actors.client.requests import Request
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState

KEYS = "a sk-a\nb sk-b\n"


class Slow(Scripted):
    """Answers when it is let."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(texts)
        self.go = asyncio.Event()
        self.ended = 0

    async def abort(self, rid: str) -> None:
        """Nothing: what is under way hears of it otherwise."""

    async def run(self, requests: list[Request]) -> Any:
        try:
            await self.go.wait()
            async for one in super().run(requests):
                yield one
        finally:
            self.ended += 1


def gateway(script: Scripted, **settings: Any) -> GatewayState:
    state = GatewayState(Config(gateway=GatewayConfig(**settings)), Path("none"))
    state.engine.client = script  # type: ignore[assignment]
    return state


def client_of(state: GatewayState, key: str = "-") -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app=build_app(state))
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, max_retries=0,
                              http_client=httpx.AsyncClient(transport=transport))


def talk(work: Callable[[openai.AsyncOpenAI], Awaitable[None]], script: Scripted | None = None,
         **settings: Any) -> None:
    asyncio.run(work(client_of(gateway(script or Scripted(["It rains."]), **settings))))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("file", [False, True])
def test_a_response_is_stored_until_it_is_deleted(monkeypatch: pytest.MonkeyPatch, stream: bool,
                                                  file: bool, tmp_path: Path) -> None:
    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", ScriptedStream)

    async def work(client: openai.AsyncOpenAI) -> None:
        if stream:
            events = [event async for event in await client.responses.create(
                model="demo", input="Hi", stream=True)]
            made: Any = events[-1].response  # type: ignore[union-attr]
        else:
            made = await client.responses.create(model="demo", input="Hi")
        assert made.store is True and made.status == "completed"
        again = await client.responses.retrieve(made.id)
        assert again == made and again.output_text == "It rains."
        await client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(made.id)
            assert caught.value.param == "id"

    talk(work, responses_store=str(tmp_path / "r.db") if file else None)


def test_the_conversation_goes_on() -> None:
    script = Scripted(["It rains."])

    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="demo", input="How is it?",
                                              instructions="Be kind.")
        second = await client.responses.create(model="demo", input=[
            {"role": "user", "content": "And now?"}], previous_response_id=first.id)
        assert second.previous_response_id == first.id
        await client.responses.create(model="demo", input="Still?",
                                      previous_response_id=second.id)
        asked = [[(turn.role, turn.content) for turn in one.messages or ()]
                 for one in script.asked]
        assert asked[0] == [("system", "Be kind."), ("user", "How is it?")]
        assert asked[1] == [("user", "How is it?"), ("assistant", "It rains."),
                            ("user", "And now?")]  # instructions are of one request alone
        assert asked[2] == [*asked[1], ("assistant", "It rains."), ("user", "Still?")]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="demo", input="?", previous_response_id="resp_0")
        assert caught.value.param == "previous_response_id"

    talk(work, script)


def test_calls_and_their_outputs_go_on() -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>'
    script = Scripted([call], template="<tool_call>{{ messages[0].content }}")

    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="demo", input="How is it?", tools=[tool])
        made: Any = first.output[0]
        await client.responses.create(
            model="demo", tools=[tool], previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": made.call_id, "output": "rain"}])
        turns = script.asked[1].messages or []
        assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
        assert turns[1].tool_calls[0].name == turns[2].name == "weather"
        assert (turns[2].content, turns[2].tool_call_id) == ("rain", made.call_id)

    talk(work, script)


def test_input_items_are_listed() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="demo", input="Hi")
        items = (await client.responses.input_items.list(first.id)).data
        assert [item.content[0].text for item in items] == ["Hi"]  # type: ignore[union-attr]
        many = await client.responses.create(model="demo", previous_response_id=first.id, input=[
            {"role": "user", "content": str(number)} for number in range(5)])
        page = await client.responses.input_items.list(many.id, limit=2, order="asc")
        assert page.has_more and [i.content[0].text for i in page.data] == ["0", "1"]  # type: ignore[union-attr]
        found = [i.content[0].text async for i in client.responses.input_items.list(  # type: ignore[union-attr]
            many.id, limit=2)]
        assert found == ["4", "3", "2", "1", "0"]
        for wrong in ({"limit": 0}, {"after": "none"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.responses.input_items.list(many.id, **wrong)  # type: ignore[arg-type]

    talk(work)


def test_another_tenants_response_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    state = gateway(Scripted(["ok"]), api_keys_file=str(tmp_path / "keys"))

    async def work() -> None:
        mine, other = client_of(state, "sk-a"), client_of(state, "sk-b")
        made = await mine.responses.create(model="demo", input="Hi")
        assert (await mine.responses.retrieve(made.id)).id == made.id
        calls = (other.responses.retrieve(made.id), other.responses.delete(made.id),
                 other.responses.cancel(made.id), other.responses.create(
                     model="demo", input="?", previous_response_id=made.id))
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await mine.responses.retrieve(made.id)).id == made.id

    asyncio.run(work())


@pytest.mark.parametrize("settings", [{"responses_max_bytes": 0}, {"gateways": 2, "port": 1}])
def test_where_nothing_is_stored_the_answer_says_so(settings: dict[str, Any]) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.responses.create(model="demo", input="Hi")
        assert made.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await client.responses.retrieve(made.id)
        for more in ({"previous_response_id": made.id}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="not stored"):
                await client.responses.create(model="demo", input="?", **more)  # type: ignore[call-overload]

    talk(work, **settings)


def test_store_false_is_not_stored() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.responses.create(model="demo", input="Hi", store=False)
        assert made.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)

    talk(work)


async def until(client: openai.AsyncOpenAI, name: str, *wanted: str) -> Any:
    late = monotonic() + 10
    while (found := await client.responses.retrieve(name)).status not in wanted:
        assert monotonic() < late, found
        await asyncio.sleep(0.01)
    return found


def test_a_response_in_the_background() -> None:
    async def work() -> None:
        script = Slow(["It rains."])
        state = gateway(script)
        client = client_of(state)
        made = await client.responses.create(model="demo", input="Hi", background=True)
        assert made.status == "queued" and made.background is True and len(state.jobs) == 1
        await until(client, made.id, "in_progress")
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            await client.responses.create(model="demo", input="?", previous_response_id=made.id)
        script.go.set()
        done = await until(client, made.id, "completed")
        assert done.output_text == "It rains." and len(state.jobs) == 0
        assert (await client.responses.cancel(made.id)).status == "completed"

    asyncio.run(work())


def test_a_fault_in_the_background_ends_that_response_alone(monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    async def work() -> None:
        state = gateway(Scripted(["It rains."]))
        client = client_of(state)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a prompt's words")

        with monkeypatch.context() as patch:
            patch.setattr("actorium.actors.gateway.api.responses.ResponsesTurn._add", broken)
            made = await client.responses.create(model="demo", input="Hi", background=True)
            found = await until(client, made.id, "failed")
        assert found.error is not None and "words" not in found.error.message
        assert (await client.responses.create(model="demo", input="Hi")).output_text

    asyncio.run(work())


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_cancelled_background_response_ends(how: str, file: bool, tmp_path: Path) -> None:
    """With a file also by another gateway."""
    async def work() -> None:
        settings: dict[str, Any] = {"responses_store": str(tmp_path / "r.db")} if file else {}
        script = Slow(["x"])
        state = gateway(script, **settings)
        client = client_of(state)
        other = client_of(gateway(Scripted(["y"]), **settings)) if file else client
        made = await client.responses.create(model="demo", input="Hi", background=True)
        await until(other, made.id, "in_progress")
        if how == "cancel":
            assert (await other.responses.cancel(made.id)).status == "cancelled"
        else:
            await other.responses.delete(made.id)
        late = monotonic() + 10
        while len(state.jobs) or not script.ended:
            assert monotonic() < late
            await asyncio.sleep(0.01)
        if how == "cancel":
            assert (await client.responses.retrieve(made.id)).status == "cancelled"
        else:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)

    asyncio.run(work())


def test_a_response_whose_gateway_died_has_failed(tmp_path: Path) -> None:
    async def work() -> None:
        state = gateway(Slow(["x"]), responses_store=str(tmp_path / "r.db"))
        assert state.responses is not None
        client = client_of(state)
        state.responses.owner = "1:0"  # no process that lives
        made = await client.responses.create(model="demo", input="Hi", background=True)
        found = await client.responses.retrieve(made.id)
        assert found.status == "failed" and found.error is not None

    asyncio.run(work())


def test_the_background_is_aborted_by_its_id_as_others_are() -> None:
    async def work() -> None:
        state = gateway(Slow(["x"]))
        client = client_of(state)
        made = await client.responses.create(model="demo", input="Hi", background=True)
        await until(client, made.id, "in_progress")
        assert await state.abort(made.id, "") == [made.id.removeprefix("resp_")]
        await client.responses.delete(made.id)
        while len(state.jobs):
            await asyncio.sleep(0.01)
        assert not state.calls

    asyncio.run(work())


def test_over_a_whole_engine(packaged: Served) -> None:
    client = packaged.client
    first = client.responses.create(model="demo", input="Tell me a story.", max_output_tokens=9,
                                    temperature=0, tool_choice="auto")
    second = client.responses.create(model="demo", input="Go on.", max_output_tokens=9,
                                     temperature=0, previous_response_id=first.id)
    whole = client.responses.create(model="demo", temperature=0, max_output_tokens=9, input=[
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."}])
    assert second.output_text == whole.output_text
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    count = client.responses.input_tokens.count(model="demo", input="Go on.",
                                                previous_response_id=first.id)
    assert count.input_tokens == whole.usage.input_tokens
    assert client.responses.input_tokens.count(model="demo", input="Hi").input_tokens < 20


def test_the_background_over_a_whole_engine(packaged: Served) -> None:
    client = packaged.client
    long = client.responses.create(model="demo", input="Tell me a story.", background=True,
                                   max_output_tokens=2000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"
    short = client.responses.create(model="demo", input="Hi", max_output_tokens=5,
                                    background=True)
    late = monotonic() + 20
    while (found := client.responses.retrieve(short.id)).status in ("queued", "in_progress"):
        assert monotonic() < late
    assert found.status in ("completed", "incomplete") and found.output_text
