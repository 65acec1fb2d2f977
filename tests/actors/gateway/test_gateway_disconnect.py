"""Callers who go away without waiting for their answer: their requests end, others go on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from helpers_gateway import Served

from actorium import Client
from actorium.actors.gateway.http.guard import AnswerSender, until_disconnected

PROMPT = "Tell me a story about a fox."
LONG = {"max_tokens": 3000, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "n": 2, **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], **LONG},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 3000, "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], **LONG},
    "/generate": {"text": PROMPT, "sampling_params": LONG},
}


@pytest.fixture(scope="module")
def served(packaged: Served) -> Served:
    """Slow enough for requests to be under way when their callers go, and for most of them to wait.
    """
    return packaged


def begin(served: Served, path: str, headers: str = "", **more: Any) -> socket.socket:
    """Send a request, and do not wait for anything."""
    body = json.dumps(BODIES[path] | more).encode()
    connection = socket.create_connection(served.where)
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
                       f"content-type: application/json\r\n{headers}content-length: {len(body)}"
                       "\r\n\r\n".encode() + body)
    return connection


def gauges(client: Client) -> dict[str, float]:
    status = client.status()
    return next(one.gauges for one in status.actors if one.role == "scheduler")


def busy(client: Client) -> int:
    now = gauges(client)
    return int(now["running"] + now["waiting"])


def wait_for(condition: Any, seconds: float) -> float:
    """Seconds that it took to become true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, "it did not come"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_disconnect_ends_the_request(served: Served, path: str, stream: bool) -> None:
    with Client(served.engine.name) as client:
        callers = [begin(served, path, stream=stream) for _ in range(6)]
        wait_for(lambda: busy(client) >= 6, 20)
        for caller in callers:
            caller.close()
        wait_for(lambda: busy(client) == 0, 10)


def test_pages_of_disconnected_callers_are_freed(served: Served) -> None:
    """Most of them wait for a slot when their callers go."""
    with Client(served.engine.name) as client:
        client.flush_cache()
        wait_for(lambda: gauges(client)["used_pages"] == 0, 10)
        free = gauges(client)["free_pages"]
        callers = [begin(served, "/v1/chat/completions", stream=i % 2 == 0) for i in range(100)]
        wait_for(lambda: busy(client) >= 100, 30)
        for caller in callers:
            caller.close()
        wait_for(lambda: busy(client) == 0 and gauges(client)["held_pages"] == 0, 10)
        client.flush_cache()
        wait_for(lambda: gauges(client)["free_pages"] == free, 10)


def test_a_connected_caller_is_answered(served: Served) -> None:
    with Client(served.engine.name) as client:
        left = [begin(served, "/v1/completions") for _ in range(3)]
        stays = begin(served, "/v1/completions", max_tokens=20, n=1)
        for caller in left:
            caller.close()
        answer = _answer(stays)
        assert answer["usage"]["completion_tokens"] == 20
        wait_for(lambda: busy(client) == 0, 10)


def _answer(connection: socket.socket) -> Any:
    connection.settimeout(30)
    file = connection.makefile("rb")
    size = 0
    while (line := file.readline().strip()):
        name, _, value = line.partition(b":")
        size = int(value) if name.lower() == b"content-length" else size
    return json.loads(file.read(size))


def test_a_request_with_a_key_survives_a_disconnect(served: Served) -> None:
    """An Idempotency-Key says that somebody will come back."""
    with Client(served.engine.name) as client:
        key, before = "idempotency-key: comes-back\r\n", gauges(client)["tokens"]
        begin(served, "/v1/completions", key, max_tokens=400, n=1).close()
        wait_for(lambda: gauges(client)["tokens"] > before, 20)
        time.sleep(0.5)
        again = _answer(begin(served, "/v1/completions", key, max_tokens=400, n=1))
        assert again["usage"]["completion_tokens"] == 400
        wait_for(lambda: busy(client) == 0 and gauges(client)["tokens"] >= before + 400, 10)
        assert gauges(client)["tokens"] == before + 400, "it was ended, and begun anew"


# --- the watcher alone ----------------------------------------------------------------------------


class Connection:
    """An ASGI server's side of one request."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._events.put_nowait({"type": "http.request", "body": b"{}"})

    def leave(self) -> None:
        self._events.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Any:
        return await self._events.get()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.leave()


def run(app: Any, connection: Connection) -> bool:
    return asyncio.run(until_disconnected(app, {"type": "http", "method": "POST"},
                                          connection.receive, AnswerSender(connection.send)))


def test_work_after_the_answer_is_not_cancelled() -> None:
    done = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await asyncio.sleep(0.05)
        done.append(True)

    assert run(app, Connection()) and done


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    connection, ended = Connection(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        connection.leave()
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    assert not run(app, connection) and ended


def test_an_error_of_the_app_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(app, Connection())
