"""A client's session without sockets, and what the blocking client makes of its coroutines."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.client.calls import ClientCalls
from actorium.actors.client.client import BlockingSession, Client
from actorium.actors.client.connection import Link
from actorium.actors.client.requests import Request
from actorium.actors.client.target import LocalTarget
from actorium.actors.errors import EngineUnavailable


class GoneTarget(LocalTarget):
    """An engine that has ended."""

    def gone(self) -> bool:
        return True


class BrokenLink(Link):
    """Connections that broke, and take nothing."""

    def __init__(self) -> None:
        self.identity, self.closed = b"c1", False
        self.breaks = [[], ["tokenizer.front"]]

    def connect(self, *fronts: str) -> list[int]:
        return []

    def reconnected(self) -> list[str]:
        return self.breaks.pop(0) if self.breaks else []

    def receive(self) -> Iterator[Any]:
        return iter(())

    def send(self, front: str, frame: bytes) -> None:
        raise EngineUnavailable("the engine takes no messages")

    def close(self) -> None:
        self.closed = True


def session_with(tmp_path: Path, link: BrokenLink, resume_timeout: float) -> BlockingSession:
    session = BlockingSession(GoneTarget(tmp_path), resume_timeout=resume_timeout)
    session.link = link
    session.core.submit(Request(prompt="x"), 0.0, streaming=False)
    return session


def test_an_end_seen_twice_is_reported_once(tmp_path: Path) -> None:
    """What waits goes on waiting for the next engine."""
    link = BrokenLink()
    session = session_with(tmp_path, link, 30.0)
    session.step(1.0, quiet=True)
    assert not link.breaks and link.closed and session.link is None
    assert session.resuming and len(session.core.waiting) == 1


def test_closing_disconnects_from_an_engine_that_does_not_read(tmp_path: Path) -> None:
    link = BrokenLink()
    client = Client(tmp_path)
    client._session = session_with(tmp_path, link, 0.0)
    client._calls = ClientCalls(client._session)
    client.close()
    assert link.closed and client._session.link is None and not client._session.core.waiting


def test_an_interrupted_call_leaves_the_client_usable(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path)

    def interrupt(_self: object, _now: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingSession, "delay", interrupt)
    monkeypatch.setattr(Link, "send", lambda *_: None)
    monkeypatch.setattr(LocalTarget, "check_running", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        client.tokenize("x")
    assert not client._session.core.waiting
    monkeypatch.undo()
    client.close()


def test_both_clients_have_every_call_with_one_signature() -> None:
    for name, method in vars(ClientCalls).items():
        if name.startswith("_"):
            continue
        theirs = inspect.signature(getattr(Client, name)).parameters
        assert list(theirs) == list(inspect.signature(method).parameters), name
        assert getattr(Client, name).__doc__, name
        assert not inspect.iscoroutinefunction(getattr(Client, name)), name


def test_a_session_is_due_when_its_first_deadline_is(tmp_path: Path) -> None:
    session = BlockingSession(LocalTarget(tmp_path))
    assert session.core.next_due == math.inf and session.delay(5.0) == 0.02
    session.link = BrokenLink()
    assert session.delay(5.0) == 0.25
    session.core.submit(Request(prompt="x", timeout=0.1), 4.0, streaming=False)
    assert session.delay(5.0) == pytest.approx(0.1) and session.delay(6.0) == 0.001
