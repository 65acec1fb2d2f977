"""Callers' connections outlive a gateway that is killed: of clients that know nothing of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers_served import Served, serving

TALE = [{"role": "user", "content": "Tell me a story about a fox."}]
CHAT = "/v1/chat/completions"
STREAM: dict[str, Any] = {
    "messages": TALE, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True,
    "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
LENGTH = {"temperature": 0.9, "seed": 5, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, STREAM),
    (CHAT, STREAM | LENGTH | {"n": 2}),
    (CHAT, STREAM | {"stream": False, "stream_options": None}),
    ("/v1/completions", LENGTH | {"prompt": ["A fox", "A crow"], "max_tokens": 150, "logprobs": 1,
                                  "stream": True, "echo": True}),
    ("/v1/completions", LENGTH | {"prompt": "A fox", "max_tokens": 200}),
    ("/v1/responses", LENGTH | {"input": "A fox", "max_output_tokens": 200, "stream": True}),
    ("/v1/responses", LENGTH | {"input": "A fox", "max_output_tokens": 200}),
    ("/v1/messages", {"messages": TALE, "max_tokens": 200, "stream": True, "temperature": 0}),
    ("/v1/messages", {"messages": TALE, "max_tokens": 200, "temperature": 0}),
    ("/generate", {"text": "A fox", "stream": True, "sampling_params": {
        "max_new_tokens": 200, "temperature": 0, "ignore_eos": True}}),
    ("/v1/embeddings", {"input": [f"{i} foxes" for i in range(200)], "encoding_format": "base64"}),
    ("/api/chat", {"messages": TALE, "options": {"num_predict": 200, "temperature": 0}}),
    ("/api/generate", {"prompt": "A fox", "stream": False, "options": {
        "num_predict": 200, "temperature": 0}}),
]
"""Paths and bodies: streams and whole answers of all APIs."""
OF_THE_REQUEST = frozenset({
    "id", "item_id", "created", "created_at", "e2e_latency", "response", "sequence_number",
    "meta_info", "completion_tokens_details", "user", "total_duration", "load_duration",
    "prompt_eval_duration", "eval_duration"})
"""Fields of which each request has its own."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=32, max_restarts=50) as found:
        yield found


def ask(served: Served, path: str, body: dict[str, Any]) -> bytes:
    """Returns the whole answer of a client that asks for nothing special."""
    request = urllib.request.Request(f"{served.url}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=90) as answer:
        return bytes(answer.read())


def kill_gateway(served: Served) -> None:
    """Kills the gateway that runs now."""
    [pid] = [one.pid for one in served.engine.client.status().actors if one.role == "gateway-0"]
    os.kill(pid, signal.SIGKILL)


def pieces(answer: bytes) -> list[Any]:
    """Returns the answer's JSON: of each event of a stream, of which the last must be its last."""
    if not answer.startswith((b"data: ", b"event: ")):  # JSON, or lines of it
        found = [json.loads(line) for line in answer.splitlines()]
        assert [one.get("done", True) for one in found] == [False] * (len(found) - 1) + [True]
        return found
    events = [line[6:] for line in answer.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]" or re.search(r'"type":"(response.completed|response.incomplete|'
                                               r'message_stop)"', events[-1])
    return [json.loads(event) for event in events if event != "[DONE]"]


def said(answer: bytes) -> dict[str, Any]:
    """Joins what an answer says, whatever it was cut into: the strings and lists of each choice by
    their place, but for `OF_THE_REQUEST`; and the last value of all else."""
    out: dict[str, Any] = {}

    def walk(value: Any, where: str) -> None:
        if isinstance(value, dict):
            index = f"#{value['index']}" if "index" in value else ""
            for name, child in value.items():
                if name not in OF_THE_REQUEST:
                    walk(child, f"{where}{index}.{name}")
        elif isinstance(value, list) and "logprob" in where:
            out[where] = out.get(where, []) + value
        elif isinstance(value, list):
            for child in value:
                walk(child, where)
        elif (isinstance(value, str) and where.endswith((".content", ".delta", ".text"))
              and where != ".text"):  # that one is repeated whole
            out[where] = out.get(where, "") + value
        else:
            out[where] = value

    for piece in pieces(answer):
        walk(piece, "")
    return out


def sequence_numbers(answer: bytes) -> list[int]:
    """Returns the numbers of the events of a stream of `/v1/responses`."""
    return [piece["sequence_number"] for piece in pieces(answer) if "sequence_number" in piece]


def undisturbed(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return said(ask(served, path, body))


def test_the_next_gateway_ends_the_request_of_a_caller_that_leaves(served: Served) -> None:
    with socket.create_connection((served.host, served.port), 60) as sock:
        sock.sendall(post(STREAM | {"max_tokens": 3900, "n": 8}))
        _received(sock, 1000)
        kill_gateway(served)
        _received(sock, 1 << 20)
        ask(served, CHAT, SHORT)
        assert _received(sock, 1 << 20)
        assert _running(served) >= 8
    _until(lambda: _running(served) == 0)


def test_twenty_streams_outlive_a_gateway(served: Served) -> None:
    expected = undisturbed(served, CHAT, STREAM)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(ask, served, CHAT, STREAM | {"user": f"user {number}"})
                   for number in range(20)]
        time.sleep(1.0)
        kill_gateway(served)
        for answer in answers:
            events = pieces(answer.result())
            assert said(answer.result()) == expected
            assert len({event["id"] for event in events}) == 1
            assert events[-1]["usage"]["completion_tokens"] == 300


def test_answers_of_all_apis_outlive_gateways(served: Served) -> None:
    """Which of their moments is hit depends on the clock."""
    expected = [undisturbed(served, *request) for request in REQUESTS]
    with ThreadPoolExecutor(2 * len(REQUESTS)) as pool:
        for wait in (0.0, 0.5):
            answers = [pool.submit(ask, served, *request) for request in 2 * REQUESTS]
            time.sleep(wait)
            kill_gateway(served)
            for number, answer in enumerate(answers):
                assert said(answer.result()) == expected[number % len(REQUESTS)], \
                    (wait, REQUESTS[number % len(REQUESTS)])
                numbers = sequence_numbers(answer.result())
                assert numbers == list(range(len(numbers)))


# --- connections ---

def head(path: str, size: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json",
             f"content-length: {size}", *more, "", ""]
    return "\r\n".join(lines).encode()


def post(body: dict[str, Any], *more: str) -> bytes:
    data = json.dumps(body).encode()
    return head(CHAT, len(data), *more) + data


def read_answer(sock: socket.socket) -> dict[str, Any]:
    """Reads one whole answer, and nothing behind it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(sock, 1)
    size = int(data.lower().partition(b"content-length: ")[2].split(b"\r")[0])
    body = b""
    while len(body) < size:
        body += _received(sock, size - len(body))
    assert data.startswith(b"HTTP/1.1 200"), (data, body)
    return dict(json.loads(body))


def _received(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size)
    assert data, "the connection has ended"
    return data


SHORT = {"messages": TALE, "max_tokens": 4, "temperature": 0}


def idle(sock: socket.socket) -> Iterator[None]:
    sock.sendall(post(SHORT))
    assert read_answer(sock)["usage"]["completion_tokens"] == 4
    yield
    sock.sendall(post(SHORT))
    read_answer(sock)


def half_a_request(sock: socket.socket, cut: int) -> Iterator[None]:
    whole = post(SHORT | {"user": "x" * 300_000})
    sock.sendall(whole[:cut])
    yield
    sock.sendall(whole[cut:])
    assert read_answer(sock)["usage"]["completion_tokens"] == 4


def pipelined(sock: socket.socket) -> Iterator[None]:
    counts = [2, 250, 3, 4]
    sock.sendall(b"".join(post(SHORT | {"max_tokens": count, "ignore_eos": True})
                          for count in counts))
    assert read_answer(sock)["usage"]["completion_tokens"] == 2
    yield
    assert [read_answer(sock)["usage"]["completion_tokens"] for _ in counts[1:]] == counts[1:]
    sock.sendall(post(SHORT))
    read_answer(sock)


def expecting(sock: socket.socket) -> Iterator[None]:
    body = json.dumps(SHORT).encode()
    sock.sendall(head(CHAT, len(body), "expect: 100-continue"))
    assert _received(sock, 100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    yield
    sock.sendall(body)
    read_answer(sock)


def closing(sock: socket.socket) -> Iterator[None]:
    sock.sendall(post(SHORT | {"max_tokens": 300, "ignore_eos": True}, "connection: close"))
    yield
    assert read_answer(sock)["usage"]["completion_tokens"] == 300
    assert sock.recv(1) == b""


def unread(sock: socket.socket) -> Iterator[None]:
    """An answer that is larger than the buffers of the connection, of which a part is written."""
    body = STREAM | {"stream": False, "stream_options": None, "max_tokens": 250, "n": 10,
                     "top_logprobs": 20}
    sock.sendall(post(body))
    data = _received(sock, 1)  # it is written as far as there is room
    yield
    while b"\r\n\r\n" not in data:
        data += _received(sock, 1)
    size = int(data.lower().partition(b"content-length: ")[2].split(b"\r")[0])
    whole = b""
    while len(whole) < size:
        whole += _received(sock, size - len(whole))
    choices = json.loads(whole)["choices"]
    assert size > 2_000_000
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [250] * 10


def test_connections_in_all_states_outlive_a_gateway(served: Served) -> None:
    states: list[Callable[[socket.socket], Iterator[None]]] = [
        idle, pipelined, expecting, closing, unread, lambda sock: half_a_request(sock, 10),
        lambda sock: half_a_request(sock, 200), lambda sock: half_a_request(sock, 100_000)]
    with contextlib.ExitStack() as stack:
        running = []
        for state in sorted(states, key=lambda state: state is not unread):
            sock = stack.enter_context(socket.socket())
            if state is unread:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(60)
            sock.connect((served.host, served.port))
            running.append(state(sock))
            next(running[-1])
        time.sleep(0.1)
        kill_gateway(served)
        with ThreadPoolExecutor(8) as pool:  # they come before there is a gateway
            answers = [pool.submit(ask, served, CHAT, SHORT) for _ in range(8)]
            assert len({json.dumps(said(answer.result())) for answer in answers}) == 1
        for state_ in running:
            assert next(state_, "the end") == "the end"


def test_an_answer_may_be_its_head_alone(served: Served) -> None:
    call = http.client.HTTPConnection(served.host, served.port, timeout=30)
    for _ in range(3):
        call.request("HEAD", "/version")
        answer = call.getresponse()
        assert answer.status == 200 and int(answer.headers["content-length"]) and not answer.read()
        call.request("GET", "/version")
        assert call.getresponse().read()
    call.close()


def test_connections_that_have_ended_are_not_kept(served: Served) -> None:
    launcher = served.engine.pid

    def held() -> int:
        return len(os.listdir(f"/proc/{launcher}/fd"))

    before = held()
    for _ in range(20):
        ask(served, CHAT, SHORT)
    sockets = [socket.create_connection((served.host, served.port)) for _ in range(20)]
    _until(lambda: held() >= before + 15)  # those of other tests may have been among the first
    for sock in sockets:
        sock.close()
    _until(lambda: held() <= before)


def _running(served: Served) -> int:
    return sum(int(one.gauges.get("running", 0)) for one in served.engine.client.status().actors)


def _until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
