"""Bodies that kill a gateway: their callers are refused, and nobody else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, ScriptedStream
from starlette.types import ASGIApp

from actorium.actors.config.tree import Config
from actorium.actors.gateway.answer_events import ChoiceReader
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.runtime.inflight_journal import SIZE, InflightJournal

CHAT = "/v1/chat/completions"


class Panic(BaseException):
    """As Rust code raises it."""


class Killed(BaseException):
    """The process ends here: nothing is tidied up."""


class Lives:
    """Incarnations of a gateway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream",
                            ScriptedStream)
        self.buffer = bytearray(SIZE)
        self.start()

    def start(self) -> None:
        self.gateway = GatewayState(Config(), Path("none"),
                                   InflightJournal(self.buffer, actor="gateway"))
        self.gateway.engine.client = Scripted(["hello there"])  # type: ignore[assignment]
        self.app: ASGIApp = build_app(self.gateway)

    def post(self, text: str, path: str = CHAT, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}]} | more
        if path != CHAT:
            body = {"prompt": text} | more

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app),
                                         base_url="http://gateway") as client:
                return await client.post(path, json=body)

        return asyncio.run(ask())

    def die(self, text: str, **more: Any) -> None:
        """It dies in the middle of this body."""
        seen: list[bytes] = []
        usual = self.gateway.journal.clear

        def never(place: int = 0) -> None:
            seen.append(bytes(self.buffer))

        self.gateway.journal.clear = never  # type: ignore[method-assign]
        self.post(text, **more)
        self.gateway.journal.clear = usual  # type: ignore[method-assign]
        at_death = next(state for state in seen if state != bytes(SIZE))
        self.buffer[:] = at_death
        self.start()


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


def plant(monkeypatch: pytest.MonkeyPatch, where: str, failure: BaseException) -> None:
    """What holds "poison" fails there."""
    if where == "decode":
        usual = bodies.decode

        def decode(body: bytes, kind: type[Any]) -> Any:
            if b"poison" in body:
                raise failure
            return usual(body, kind)

        monkeypatch.setattr(bodies, "decode", decode)
    else:
        def planted(*_: Any, **__: Any) -> Any:
            raise failure

        monkeypatch.setattr(ChoiceReader, where, planted)


@pytest.mark.parametrize("failure", [ValueError("xyzzy"), Panic("xyzzy")],
                         ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("where", "stream"), [("decode", False), ("read", False),
                                               ("read", True)])
def test_an_exception_ends_its_request(monkeypatch: pytest.MonkeyPatch, failure: BaseException,
                                       where: str, stream: bool,
                                       caplog: pytest.LogCaptureFixture) -> None:
    lives = Lives(monkeypatch)
    with monkeypatch.context() as planted:
        plant(planted, where, failure)
        answer = lives.post("poison", stream=stream)
    if stream and answer.status_code == 200:
        lines = [line for line in answer.text.splitlines() if '"error"' in line]
        told = json.loads(lines[-1].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 500
        told = error(answer)
    assert told["code"] == "quarantined" and type(failure).__name__ in told["message"]
    assert "gateway" in told["message"] and "xyzzy" not in answer.text + caplog.text
    assert lives.post("hello").json()["choices"][0]["message"]["content"] == "hello there"
    assert lives.gateway.open == 0 and lives.gateway.journal.failures == 1


@pytest.mark.parametrize("failure", [MemoryError(), OSError(24, "Too many open files")],
                         ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["decode", "read"])
def test_what_the_machine_lacks_is_blamed_on_no_request(
        monkeypatch: pytest.MonkeyPatch, failure: BaseException, where: str) -> None:
    lives = Lives(monkeypatch)
    with monkeypatch.context() as planted:
        plant(planted, where, failure)
        answer = lives.post("poison")
    assert answer.status_code == 503 and error(answer)["code"] == "unavailable"
    assert lives.gateway.journal.failures == 0 and lives.gateway.journal.quiet
    assert lives.post("poison").status_code == 200


def test_a_body_that_kills_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(monkeypatch)
    lives.die("poison")
    assert not lives.gateway.journal.quiet
    lives.die("poison")
    for _ in range(2):
        answer = lives.post("poison")
        assert answer.status_code == 500 and error(answer)["code"] == "quarantined"
        assert "died" in error(answer)["message"]
    assert lives.post("hello").status_code == 200
    assert lives.post("poison", max_tokens=3).status_code == 200, "another body"


def test_an_answered_request_is_acquitted(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(monkeypatch)
    lives.die("hello")
    assert lives.post("hello").status_code == 200 and lives.gateway.journal.quiet


def test_nothing_stands_in_the_journal_while_a_request_waits(
        monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(monkeypatch)
    seen: list[bool] = []

    async def facts() -> Any:
        await asyncio.sleep(0)
        seen.append(lives.gateway.journal.overdue(1e12) is not None)
        asyncio.get_running_loop().call_soon(
            lambda: seen.append(lives.gateway.journal.overdue(1e12) is not None))
        await asyncio.sleep(0.001)
        return await usual(None)

    usual = lives.gateway.engine.check_model
    monkeypatch.setattr(ServedEngine, "check_model", lambda self, name: facts())
    assert lives.post("hello").status_code == 200
    assert seen[:2] == [True, False]
