"""Streams: the bytes on the wire, the order of chunks, usage, several choices."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from wire import (
    CHAT,
    COMPLETIONS,
    STORY,
    TELL,
    Json,
    Server,
    chat,
    completion,
    deltas,
    events,
    finishes,
    pieces,
)

pytestmark = pytest.mark.conformance
ROUTES = {"completions": (COMPLETIONS, partial(completion, prompt=STORY)),
          "chat": (CHAT, partial(chat, messages=TELL))}
both = pytest.mark.parametrize("route", ROUTES)


def ask(route: str, **more: Any) -> tuple[str, Json]:
    path, body = ROUTES[route]
    return path, body(**more)


def text_of(route: str, chunks: list[Json], index: int = 0) -> str:
    return (pieces if route == "completions" else deltas)(chunks, index)


@both
def test_events_are_data_alone(server: Server, route: str) -> None:
    path, body = ask(route, stream=True)
    answer = server.post(path, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line and not line.startswith(":")]
    assert lines and all(line.startswith("data: ") for line in lines)
    assert answer.text.count("\n\n") == len(lines) and lines[-1] == "data: [DONE]"


@both
@pytest.mark.parametrize("asked", ["Idempotency-Key", "resumable"])
def test_events_have_ids_when_asked(server: Server, route: str, asked: str) -> None:
    path, body = ask(route, stream=True)
    headers = {}
    if asked == "resumable":
        body["stream_options"] = {"resumable": True}
    else:
        headers[asked] = f"conformance-{route}"
    answer = server.post(path, body, headers=headers)
    assert answer.status == 200 and "\nid: " in "\n" + answer.text


@both
def test_a_stream_says_what_an_answer_says(server: Server, route: str) -> None:
    path, body = ask(route, max_tokens=20)
    whole = server.post(path, body).ok()["choices"][0]
    want = whole["text"] if route == "completions" else whole["message"]["content"]
    chunks = server.stream(path, body)
    assert text_of(route, chunks) == want and want
    assert finishes(chunks) == [(0, whole["finish_reason"])]
    assert len(chunks) > 5


@both
def test_all_chunks_are_of_one_answer(server: Server, route: str) -> None:
    chunks = server.stream(*ask(route))
    assert len({one["id"] for one in chunks}) == len({one["created"] for one in chunks}) == 1
    assert {one["model"] for one in chunks} == {server.model}
    want = "text_completion" if route == "completions" else "chat.completion.chunk"
    assert {one["object"] for one in chunks} == {want}


def test_the_role_comes_first_and_once(server: Server) -> None:
    chunks = server.stream(CHAT, chat())
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not chunks[0]["choices"][0]["delta"].get("content")
    assert all("role" not in one["choices"][0]["delta"] for one in chunks[1:])


@both
@pytest.mark.parametrize("n", [2, 4])
def test_several_choices(server: Server, route: str, n: int) -> None:
    path, body = ask(route, n=n, temperature=1.0, seed=3, max_tokens=12)
    whole = server.post(path, body).ok()["choices"]
    want = [one.get("text") or one["message"]["content"] for one in whole]
    chunks = server.stream(path, body)
    assert [text_of(route, chunks, index) for index in range(n)] == want
    assert sorted(finishes(chunks)) == [(one["index"], one["finish_reason"]) for one in whole]
    assert all(len(one["choices"]) == 1 for one in chunks)


def test_every_choice_has_its_role(server: Server) -> None:
    chunks = server.stream(CHAT, chat(n=3))
    roles = [one["choices"][0]["index"] for one in chunks if "role" in one["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]


@both
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None},
                                     {"include_usage": False, "continuous_usage_stats": True}],
                         ids=str)
def test_no_usage_unless_asked(server: Server, route: str, options: Any) -> None:
    path, body = ask(route, stream_options=options)
    chunks = server.stream(path, body)
    assert all(one.get("usage") is None for one in chunks)
    assert all(one["choices"] for one in chunks)


@both
@pytest.mark.parametrize("more", [{}, {"continuous_usage_stats": False}, {"other": 1}], ids=str)
def test_usage_comes_last(server: Server, route: str, more: Json) -> None:
    path, body = ask(route, stream_options={"include_usage": True} | more)
    *chunks, last = server.stream(path, body)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 6
    assert all(one.get("usage") is None for one in chunks)
    want = server.post(path, ask(route)[1]).ok()["usage"]
    assert set(last["usage"]) == set(want)
    assert last["usage"]["prompt_tokens"] == want["prompt_tokens"]


@both
def test_usage_in_every_chunk(server: Server, route: str) -> None:
    path, body = ask(route, stream_options={"include_usage": True, "continuous_usage_stats": True})
    chunks = server.stream(path, body)
    counts = [one["usage"]["completion_tokens"] for one in chunks]
    assert counts == sorted(counts) and counts[-1] == 6
    assert all(one["usage"]["prompt_tokens"] > 0 for one in chunks)
    assert all(one["usage"]["total_tokens"] == one["usage"]["prompt_tokens"]
               + one["usage"]["completion_tokens"] for one in chunks)


@both
@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}],
                         ids=str)
def test_options_without_a_stream_are_refused(server: Server, route: str, options: Json) -> None:
    path, body = ask(route, stream_options=options)
    server.post(path, body).error(400, "stream_options")


@both
def test_a_bad_request_is_refused_before_the_stream(server: Server, route: str) -> None:
    path, body = ask(route, stream=True, temperature=-1)
    answer = server.post(path, body)
    assert answer.headers["content-type"].startswith("application/json")
    answer.error(400, "temperature")


@both
def test_a_stream_of_one_token(server: Server, route: str) -> None:
    path, body = ask(route, max_tokens=1, stream_options={"include_usage": True})
    chunks = server.stream(path, body)
    assert finishes(chunks) == [(0, "length")] and chunks[-1]["usage"]["completion_tokens"] == 1


@both
def test_letters_are_never_cut(server: Server, route: str) -> None:
    """Tokens that end inside a letter wait for the rest of it."""
    path, body = ask(route, temperature=1.5, seed=11, max_tokens=60, structured_outputs={
        "regex": "[\u00c0-\u1fff\U0001f600-\U0001f64f]{8}"})
    whole = server.post(path, body).ok()["choices"][0]
    want = whole.get("text") or whole["message"]["content"]
    chunks = server.stream(path, body)
    assert text_of(route, chunks) == want
    for chunk in chunks:
        json.dumps(chunk).encode()  # no half of a surrogate pair


@both
def test_curl_sees_the_end(server: Server, route: str) -> None:
    """The connection may be used again once the stream has ended."""
    path, body = ask(route, stream=True)
    link = server.connect()
    try:
        for _ in range(2):
            link.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            found = link.getresponse()
            assert events(found.read())[-1] == "[DONE]"
    finally:
        link.close()
