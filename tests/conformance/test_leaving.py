"""Callers who go away, and many who come at once."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from wire import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    STORY,
    TELL,
    Json,
    Server,
    chat,
    completion,
    deltas,
    generate,
    message,
    response,
)

pytestmark = pytest.mark.conformance
LONG: dict[str, Json] = {
    COMPLETIONS: completion(max_tokens=3000, ignore_eos=True),
    CHAT: chat(TELL, max_tokens=3000, ignore_eos=True),
    RESPONSES: response(TELL, max_output_tokens=3000, ignore_eos=True, store=False),
    MESSAGES: message(TELL, max_tokens=3000, ignore_eos=True),
    GENERATE: generate(sampling_params={"max_new_tokens": 3000, "ignore_eos": True})}


def running(server: Server) -> float:
    """Requests that run or wait, by the engine's own count."""
    found = 0.0
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{")):
            found += float(line.rsplit(" ", 1)[1])
    return found


def until(server: Server, idle: bool, seconds: float) -> None:
    """Wait for requests to run, or for none to."""
    deadline = time.monotonic() + seconds
    while (now := running(server)) != 0 if idle else running(server) == 0:
        assert time.monotonic() < deadline, f"still {now:g}" if idle else "nothing runs"
        time.sleep(0.1)


def begin(server: Server, path: str, body: Json) -> socket.socket:
    """Send a request and read nothing."""
    link = socket.create_connection((server.url.split("//")[1].split(":")[0],
                                     int(server.url.rsplit(":", 1)[1])), timeout=30)
    data = json.dumps(body).encode()
    link.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                 f"content-length: {len(data)}\r\n\r\n".encode() + data)
    return link


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", LONG)
def test_a_caller_who_goes_away(server: Server, path: str, streamed: bool) -> None:
    until(server, True, 20)
    link = begin(server, path, LONG[path] | {"stream": streamed})
    until(server, False, 20)
    link.close()
    until(server, True, 5)


@pytest.mark.parametrize("path", LONG)
def test_twenty_who_go_away(server: Server, path: str) -> None:
    """Some before their first token."""
    until(server, True, 20)
    links = [begin(server, path, LONG[path]) for _ in range(20)]
    until(server, False, 20)
    for link in links:
        link.close()
    until(server, True, 10)
    assert server.complete(max_tokens=2)["choices"]


def test_a_caller_who_resets(server: Server) -> None:
    until(server, True, 20)
    link = begin(server, CHAT, LONG[CHAT] | {"stream": True})
    assert link.recv(100)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    link.close()
    until(server, True, 5)


def test_half_a_request(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for text in (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{", b"\x16\x03\x01",
                 b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as link:
            link.sendall(text)
    assert server.get("/health").status == 200


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("streamed", [False, True])
def test_many_at_once(server: Server, count: int, streamed: bool) -> None:
    """Each gets its own answer."""
    prompts = [f"{STORY}, number {i}," for i in range(count)]
    found: list[Any] = [None] * count

    def ask(i: int) -> None:
        body = completion(prompts[i], max_tokens=12, ignore_eos=True, echo=True)
        if streamed:
            found[i] = "".join(one["choices"][0]["text"]
                               for one in server.stream(COMPLETIONS, body))
        else:
            found[i] = server.post(COMPLETIONS, body).ok()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for prompt, text in zip(prompts, found, strict=True):
        assert text is not None and text.startswith(prompt) and len(text) > len(prompt)


def test_all_routes_at_once(server: Server) -> None:
    asks = [(COMPLETIONS, completion()), (CHAT, chat()), (RESPONSES, response()),
            (MESSAGES, message()), ("/tokenize", {"prompt": STORY}),
            (CHAT, chat(guided_choice=["yes", "no"])), (COMPLETIONS, completion(logprobs=2)),
            (COMPLETIONS, completion(echo=True, logprobs=1)), (CHAT, chat(n=2))] * 4
    assert [one.status for one in server.together(asks)] == [200] * len(asks)


def test_a_stream_beside_others_is_whole(server: Server) -> None:
    body = chat(TELL, max_tokens=32, ignore_eos=True)
    others = [(CHAT, chat(f"{i}. {TELL}", max_tokens=32)) for i in range(8)]
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(deltas(server.stream(CHAT, body))))
    thread.start()
    assert all(one.status == 200 for one in server.together(others))
    thread.join(60)
    assert said and len(said[0]) > 20


@pytest.mark.parametrize("n", [16, 64, 128])
def test_many_choices(server: Server, n: int) -> None:
    found = server.complete(n=n, temperature=1.0, max_tokens=3)["choices"]
    assert [one["index"] for one in found] == list(range(n))


def test_a_deadline(server: Server) -> None:
    """A request's own time limit ends it, in words; the engine goes on."""
    answer = server.post(COMPLETIONS, LONG[COMPLETIONS] | {"timeout": 0.5, "max_tokens": 4000})
    assert answer.status in (200, 408, 504)
    until(server, True, 5)
