"""Streams that break off and go on, at any gateway of an engine, under an Idempotency-Key too."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_served import Event, Served, serving

from actorium.actors.gateway.resume.event_ids import MAX_CHOICES

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}],
                        "max_tokens": 60, "temperature": 0, "stream": True,
                        "stream_options": {"include_usage": True, "resumable": True}}
LONG = BODY | {"max_tokens": 3000, "ignore_eos": True}
MANY = LONG | {"max_tokens": 350}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=16, resume_grace=4.0, retain=20.0) as found:
        yield found


def open_(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions",
          **headers: str) -> Any:
    ask = urllib.request.Request(
        f"{served.url}{path}", json.dumps(body).encode(),
        {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()})
    return urllib.request.urlopen(ask, timeout=60)


def read(answer: Any, most: int = 10**9) -> list[Event]:
    """Events until [DONE], or so many, or the end."""
    out: list[Event] = []
    name = ""
    for line in answer:
        text = line.decode().rstrip("\n")
        if text.startswith("id: "):
            name = text[4:]
        elif text == "data: [DONE]":
            break
        elif text.startswith("data: "):
            out.append(Event(name, text[6:]))
            if len(out) >= most:
                break
    return out


def said(found: list[Event]) -> str:
    return "".join(choice["delta"].get("content") or "" for one in found
                   for choice in json.loads(one.data)["choices"])


def refused(call: Any) -> tuple[int, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        call()
    return caught.value.code, json.loads(caught.value.read())["error"]


def test_a_request_under_a_key_is_done_once(served: Served) -> None:
    body = {k: v for k, v in BODY.items() if not k.startswith("stream")} | {"temperature": 1.0}
    first, second = (json.load(open_(served, body, Idempotency_Key="a")) for _ in range(2))
    assert first["choices"] == second["choices"] and first["id"] == second["id"]
    other = json.load(open_(served, body, Idempotency_Key="b"))
    assert other["choices"] != first["choices"]
    code, error = refused(lambda: open_(served, body | {"seed": 1}, Idempotency_Key="a"))
    assert code in (400, 422) and error["type"] == "invalid_request_error"
    code, _ = refused(lambda: open_(served, body, Idempotency_Key="x" * 300))
    assert code == 400


TOLD_AGAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODY | {"stream_options": {
        "include_usage": True, "continuous_usage_stats": True}},
    "/v1/messages": {"messages": BODY["messages"], "max_tokens": 8, "stream": True},
    "/v1/responses": {"input": "Once", "max_output_tokens": 8, "stream": True, "store": False}}


def test_a_stream_told_again_under_a_key_begins_as_it_began(served: Served) -> None:
    """Its prompt's tokens and its time are the engine's records."""
    first, second = {}, {}
    for found in (first, second):
        for path, body in TOLD_AGAIN.items():
            with open_(served, body, path, Idempotency_Key=f"told{path}") as answer:
                found[path] = read(answer)
        time.sleep(1.1)
    for path in TOLD_AGAIN:
        assert second[path][0].data == first[path][0].data
    begun = [json.loads(one[0].data) for one in second.values()]
    assert begun[0]["usage"]["prompt_tokens"] > 5
    assert begun[1]["message"]["usage"]["input_tokens"] > 5


def test_a_second_request_under_a_key_joins_the_first(served: Served) -> None:
    body = LONG | {"temperature": 1.0, "max_tokens": 200}
    found: list[list[Event]] = [[], []]

    def run(number: int) -> None:
        with open_(served, body, Idempotency_Key="join") as answer:
            found[number] = read(answer)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said(found[0]) == said(found[1]) and len(said(found[0])) > 100


def test_a_broken_stream_under_a_key_goes_on(served: Served) -> None:
    body = LONG | {"temperature": 1.0, "max_tokens": 250, "n": 2}
    with open_(served, body, Idempotency_Key="go") as answer:
        begun = read(answer, 40)
    with open_(served, body, Idempotency_Key="go", Last_Event_ID=begun[-1].id) as answer:
        rest = read(answer)
    with open_(served, body, Idempotency_Key="go") as answer:
        whole = read(answer)
    for index in range(2):
        mine, all_ = ("".join(c["delta"].get("content") or "" for one in events_
                              for c in json.loads(one.data)["choices"] if c["index"] == index)
                      for events_ in (begun + rest, whole))
        assert mine == all_
    usage = [json.loads(events_[-1].data)["usage"] for events_ in (rest, whole)]
    assert usage[0] == usage[1] and usage[0]["completion_tokens"] == 500
    code, error = refused(lambda: open_(served, body | {"seed": 2}, Last_Event_ID=begun[-1].id))
    assert (code, error["param"]) == (400, "Last-Event-ID")


SEVERAL: dict[str, Any] = {
    "prompt": ["Once upon a time", [5, 6, 7], "The cat"], "n": 2, "max_tokens": 120,
    "temperature": 0, "ignore_eos": True, "stream": True, "echo": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True,
                       "resumable": True}}


def texts(found: list[Event]) -> list[str]:
    """Of each choice of each prompt."""
    said = [""] * 6
    for one in found:
        for choice in json.loads(one.data)["choices"]:
            said[choice["index"]] += choice["text"]
    return said


def test_a_stream_of_several_prompts_goes_on(served: Served) -> None:
    path = "/v1/completions"
    with open_(served, SEVERAL, path, Idempotency_Key="several") as answer:
        begun = read(answer, 25)
    with open_(served, SEVERAL, path, Idempotency_Key="several",
               Last_Event_ID=begun[-1].id) as answer:
        rest = read(answer)
    with open_(served, SEVERAL, path, Idempotency_Key="several") as answer:
        whole = read(answer)
    assert texts(begun + rest) == texts(whole) and all(texts(whole))
    assert len(texts(begun)[0]) < len(texts(whole)[0])
    used = [json.loads(one[-1].data)["usage"] for one in (rest, whole)]
    assert used[0] == used[1] and used[0]["completion_tokens"] == 6 * 120
    counted = {json.loads(one.data)["usage"]["prompt_tokens"] for one in rest}
    assert counted == {used[0]["prompt_tokens"]}


def test_a_stream_of_too_many_choices_has_no_ids_and_does_not_go_on(served: Served) -> None:
    many = SEVERAL | {"prompt": ["a"] * (MAX_CHOICES // 2 + 1), "max_tokens": 1,
                      "stream_options": {"include_usage": True}}
    with open_(served, many, "/v1/completions") as answer:
        whole = read(answer)
    assert len(whole) > MAX_CHOICES and {one.id for one in whole} == {""}
    body = json.dumps(many).encode()
    asked = b"\0".join((b"", b"/v1/completions", body))
    forged = f"sx.{hashlib.sha256(asked).hexdigest()[:16]}::::1"
    code, error = refused(lambda: open_(served, many, "/v1/completions", Last_Event_ID=forged))
    assert (code, error["param"]) == (400, "Last-Event-ID") and "choices" in error["message"]


def test_without_a_key_a_request_ends_with_its_connection(served: Served) -> None:
    with open_(served, LONG) as answer:
        begun = read(answer, 5)
    _until(lambda: running(served) == 0)
    code, error = refused(lambda: open_(served, LONG, Last_Event_ID=begun[-1].id))
    assert (code, error["code"]) == (404, "unknown_request")


def test_with_a_key_it_ends_after_the_grace(served: Served) -> None:
    with open_(served, LONG | {"max_tokens": 4000}, Idempotency_Key="late") as answer:
        read(answer, 5)
    time.sleep(0.3)  # well within the grace
    assert running(served) == 1
    _until(lambda: running(served) == 0)


def running(served: Served) -> int:
    status = served.engine.client.status()
    return sum(int(one.gauges.get("running", 0)) for one in status.actors)


def _until(true: Any, seconds: float = 15.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def pids(served: Served, role: str = "gateway") -> dict[str, int]:
    status = served.engine.client.status()
    return {one.role: one.pid for one in status.actors if one.role.startswith(role)}


def test_a_killed_gateway_comes_back_and_its_streams_go_on(served: Served) -> None:
    """Over their connections, and over others after any of their events."""
    before = pids(served)["gateway-0"]
    with open_(served, MANY) as answer:
        whole = read(answer, 10)
        os.kill(before, signal.SIGKILL)
        whole += read(answer)
    rest = _again(served, MANY, whole[9].id)
    assert pids(served)["gateway-0"] != before
    with open_(served, MANY) as answer:
        assert said(whole) == said(whole[:10] + rest) == said(read(answer))
    assert said(rest) and len({json.loads(one.data)["id"] for one in whole + rest}) == 1


def test_llama_servers_streams_go_on_at_the_gateway_that_follows(served: Served) -> None:
    """Without ids, too: the connection outlives the gateway."""
    body = {"prompt": ["A fox", "A cat"], "n_predict": 350, "temperature": 0, "ignore_eos": True,
            "stream": True}
    with open_(served, body, "/completion") as answer:
        whole = read(answer, 20)
        os.kill(pids(served)["gateway-0"], signal.SIGKILL)
        whole += read(answer)
    with open_(served, body | {"stream": False}, "/completion") as answer:
        expected = [one["content"] for one in json.load(answer)]
    found = ["", ""]
    for one in map(json.loads, (event.data for event in whole)):
        found[one["index"]] += one["content"]
    assert found == expected and all(found)
    assert [one["tokens_predicted"] for one in map(json.loads, (
        event.data for event in whole)) if one["stop"]] == [350, 350]


def test_several_prompts_go_on_at_the_gateway_that_follows(served: Served) -> None:
    with open_(served, SEVERAL, "/v1/completions") as answer:
        whole = read(answer, 20)
        os.kill(pids(served)["gateway-0"], signal.SIGKILL)
        whole += read(answer)
    rest = _again(served, SEVERAL, whole[19].id, "/v1/completions")
    again = whole[:1] + _again(served, SEVERAL, whole[0].id, "/v1/completions")
    assert texts(whole) == texts(whole[:20] + rest) == texts(again) and all(texts(whole))


def _again(served: Served, body: dict[str, Any], last: str,
           path: str = "/v1/chat/completions") -> list[Event]:
    until = time.monotonic() + 20
    while True:
        try:
            with open_(served, body, path, Last_Event_ID=last) as answer:
                return read(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.slow
def test_two_gateways_at_one_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(port, gateways=2, max_num_seqs=16, resume_grace=200.0, exact="on") as served:
        client = served.engine.client
        streams = [open_(served, MANY) for _ in range(8)]
        begun = [read(one, 3) for one in streams]
        gauges = {one.role: one.gauges for one in client.status().actors}
        victim = pids(served)["gateway-0"]
        _until(lambda: all(one.gauges.get("http_requests", 0) > 0 for one in
                           client.status().actors if one.role.startswith("gateway")))
        assert set(gauges) >= {"gateway-0", "gateway-1"}
        os.kill(victim, signal.SIGKILL)
        for one, events_ in zip(streams, begun, strict=True):
            whole = events_ + read(one)
            assert said(whole) == said(events_[:1] + _again(served, MANY, events_[0].id))
