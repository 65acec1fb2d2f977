"""Commands that wait say for what, and come to an end: no engine of that name, a server that says
nothing, an engine that is slow to start, or to stop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers_speed import slowness

from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import EngineUnavailable
from actorium.tools.bench import http_client, load_driver
from actorium.tools.bench.datasets.sample import SampleRequest
from actorium.tools.bench.http_client import Http
from actorium.tools.cli import main, ps_command, status
from actorium.tools.cli.status import announced_wait
from actorium.tools.evaluation.http_model import HttpModel

PAGES = {"models": b'{"data": [{"id": "m"}]}'}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("ACTORIUM_RUN_DIR", str(tmp_path))
    return tmp_path


@contextmanager
def server(answers_models: bool) -> Iterator[str]:
    """The URL of one that takes every connection and every request, and answers none, or what
    models it has alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                kept.append(listener.accept()[0])
            except OSError:
                return
            if answers_models and b"GET /v1/models" in kept[-1].recv(4096):
                body = PAGES["models"]
                kept[-1].sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: "
                                 b"%d\r\n\r\n%s" % (len(body), body))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in kept:
            one.close()
        thread.join(5)


@pytest.mark.parametrize("argv", [
    ["eval", "questions", "--name", "nobody"], ["eval", "needle", "--name", "nobody"],
    ["eval", "perplexity", "--name", "nobody", "--data", __file__],
    ["bench", "serve", "--name", "nobody"], ["chat", "--name", "nobody"], ["top", "nobody"],
    ["stop", "nobody"], ["flush-cache", "nobody"], ["cluster", "status", "nobody"]],
    ids=lambda argv: " ".join(argv[:2]))
def test_an_engine_that_does_not_run_is_said_at_once(
        argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(argv) == 1
    assert time.monotonic() - began < 5 * slowness()
    assert capsys.readouterr().err.startswith(
        "actorium: error: no engine named 'nobody' is running; `actorium ps` lists")


@pytest.mark.parametrize("argv", [["eval", "questions"], ["bench", "serve"], ["verify"],
                                  ["compare", "{}", "{}"]], ids=lambda argv: argv[0])
def test_a_server_that_does_not_say_which_models_it_has(
        argv: list[str], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(http_client, "GET_SECONDS", 0.2)
    with server(False) as url:
        words = [word.format(url) for word in argv]
        assert main([*words, *([] if argv[0] == "compare" else ["--base-url", url])]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"actorium: error: --base-url: {url}/v1/models: no answer within 0.2 s")


def test_a_server_that_does_not_answer_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    with server(True) as url:
        assert main(["eval", "questions", "--count", "4", "--base-url", url,
                     "--patience", "0.2"]) == 1
        assert "4 errors" in capsys.readouterr().out
    assert main(["eval", "questions", "--patience", "0"]) == 2


def test_each_question_has_an_end() -> None:
    with server(False) as url, pytest.raises(EngineUnavailable, match="no answer within"):
        asyncio.run(HttpModel(Http(url), "m", "", 0.1).token_logprobs([1]))


def test_a_request_of_a_benchmark_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_request: SampleRequest) -> object:
        await asyncio.sleep(60)
        yield

    monkeypatch.setattr(load_driver, "REQUEST_SECONDS", 0.05)
    request = SampleRequest("x", None, 1)
    results, _ = asyncio.run(load_driver.drive(
        silent, [request], [0.0], None, lambda done: None))  # type: ignore[arg-type]
    assert results[0].error == "no answer within 0.05 s"


def test_a_wait_is_told_of_once_it_is_long(monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    with announced_wait("what comes at once", 5):
        pass
    monkeypatch.setattr(status, "NOTICE_SECONDS", 0.02)
    with announced_wait("the engine 'a' to be ready", 600):
        time.sleep(0.2 * slowness())
    assert capsys.readouterr().err == (
        "actorium: waiting for the engine 'a' to be ready, at most 600 s\n")


def test_a_stop_waits_as_long_as_the_engine_may_take(
        base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own --drain-timeout, not by the default of the command's."""
    (base / "slow").mkdir(mode=0o700)
    config = base / "slow" / "config.json"
    config.write_bytes(configs.dump(Config(runtime=RuntimeConfig(drain_timeout=0.1))))
    config.chmod(0o600)
    monkeypatch.setattr(status, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(ps_command, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(ps_command, "is_running", lambda path: True)
    monkeypatch.setattr(status, "is_running", lambda path: True)
    monkeypatch.setattr(ps_command.status, "about", lambda path: {"pid": 1234567})
    monkeypatch.setattr(ps_command.os, "kill", lambda pid, signal: None)
    assert main(["stop", "slow"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "actorium: waiting for the engine 'slow' to end what runs, at most 0.3 s"
    assert "still stopping" in told[-1]
