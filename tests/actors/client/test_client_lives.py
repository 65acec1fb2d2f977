"""The blocking client when its engine dies, is followed by another one, or was never there."""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic

import pytest
from helpers_text import FakeEngine, write_model

from actorium.actors.client.client import Client
from actorium.actors.errors import EngineUnavailable, InvalidRequest, UnknownRequest
from actorium.actors.params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


def test_no_engine_and_a_dying_engine(model: Path) -> None:
    with FakeEngine(model) as engine:
        with pytest.raises(EngineUnavailable, match="no engine 'other' is running"):
            Client("other", engine.base).generate("x")
        with pytest.raises(EngineUnavailable):
            Client("other", engine.base).wait_ready(0.05)
        client = Client(str(engine.dir.path))
        engine.allow = 1
        stream = client.stream("abc", SamplingParams(max_tokens=250))
        assert next(stream).text == "a"
        killer = threading.Timer(0.1, engine.die)
        killer.start()
        begin = monotonic()
        with pytest.raises(EngineUnavailable, match="went away"):
            list(stream)
        assert monotonic() - begin < 20
        killer.join()
    with pytest.raises(EngineUnavailable):
        client.generate("x")


def test_the_client_outlives_the_engine(model: Path) -> None:
    """A new engine under the same name: what was under way fails, what comes next works."""
    with FakeEngine(model) as first:
        client = Client(first.name, first.base)
        assert client.generate("ab", SamplingParams(max_tokens=2)).text == "ab"
        first.allow = 0
        lost, waiting = (client.stream("ab", SamplingParams(max_tokens=2)) for _ in range(2))
        first.die()
        with FakeEngine(model, base=first.base):
            assert client.generate("cd", SamplingParams(max_tokens=2)).text == "cd"
            for stream in (lost, waiting):
                with pytest.raises(EngineUnavailable, match="went away"):
                    list(stream)
            client.close()


def test_a_restart_is_noticed_while_waiting(model: Path) -> None:
    with FakeEngine(model) as first:
        client = Client(first.name, first.base)
        first.allow = 0
        stream = client.stream("ab", SamplingParams(max_tokens=2))
        first.die()
        with FakeEngine(model, base=first.base), pytest.raises(EngineUnavailable):
            list(stream)
        client.close()


def test_a_restarted_engine_gets_requests_that_had_not_begun(model: Path) -> None:
    """Without a common ledger the next engine knows nothing: what was begun cannot go on."""
    with FakeEngine(model) as first:
        client = Client(first.name, first.base, resume_timeout=30)
        first.allow = 1
        begun = client.stream("abc", SamplingParams(max_tokens=200))
        assert next(begun).text == "a"
        fresh = client.stream("abc", SamplingParams(max_tokens=3))
        first.die()
        engines: list[FakeEngine] = []
        second = threading.Timer(0.2, lambda: engines.append(
            FakeEngine(model, base=first.base).__enter__()))
        second.start()
        try:
            assert "".join(d.text for d in fresh) == "abc"
            with pytest.raises(UnknownRequest):
                list(begun)
            assert client.generate("cd", SamplingParams(max_tokens=2)).text == "cd"
        finally:  # sockets left open would hang the interpreter's end
            second.join()
            for engine in engines:
                engine.die()
            client.close()


def test_an_engine_that_does_not_restart_in_time_is_an_error(model: Path) -> None:
    with pytest.raises(InvalidRequest, match="resume_timeout"):
        Client(resume_timeout=-1)
    with FakeEngine(model) as engine:
        client = Client(engine.name, engine.base, resume_timeout=0.3)
        engine.allow = 0
        stream = client.stream("abc", SamplingParams(max_tokens=200))
        engine.die()
        begin = monotonic()
        with pytest.raises(EngineUnavailable, match="went away"):
            list(stream)
        assert 0.3 <= monotonic() - begin < 20
        with pytest.raises(EngineUnavailable):
            client.generate("x")
        client.close()
