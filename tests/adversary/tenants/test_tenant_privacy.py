"""Callers with a key of their own: what they learn of another tenant, and can do to it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from helpers_served import Served
from helpers_tenants import (
    ADMIN,
    ANN,
    BOB,
    CANARY,
    Answer,
    ask,
    bearer,
    completion,
    first_of,
    packed,
)


def cached_of(answer: Answer) -> int:
    """Of any route's answer."""
    assert answer.status == 200, answer
    told = answer.json
    usage = told.get("usage") or {}
    found = [told.get("meta_info", {}).get("cached_tokens"),
             (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
             (usage.get("input_tokens_details") or {}).get("cached_tokens"),
             usage.get("cache_read_input_tokens")]
    known = [one for one in found if one is not None]
    assert known, told
    return int(known[0])


def asked_of(route: str, text: str, salt: str) -> tuple[str, dict[str, Any]]:
    turn = [{"role": "user", "content": text}]
    salted = {"cache_salt": salt} if salt else {}
    return {
        "chat": ("/v1/chat/completions", {"messages": turn, "max_tokens": 2} | salted),
        "completions": ("/v1/completions", {"prompt": text, "max_tokens": 2} | salted),
        "generate": ("/generate", {"text": text,
                                   "sampling_params": {"max_new_tokens": 2}} | salted),
        "responses": ("/v1/responses", {"input": text, "max_output_tokens": 2} | salted),
        "messages": ("/v1/messages", {"messages": turn, "max_tokens": 2} | salted),
        "invocations": ("/invocations", {"prompt": text, "max_tokens": 2} | salted)}[route]


SALTED = ("chat", "completions", "generate")


@pytest.mark.parametrize("route", [*SALTED, "responses", "messages", "invocations"])
def test_what_a_tenant_has_cached_no_other_finds(served: Served, route: str, tried: Any) -> None:
    salts = ("", "s1", "ann", "\0") if route in SALTED else ("",)
    for number, salt in enumerate(salts):
        # Different from its first page on, since one's own other prompts may be found.
        path, body = asked_of(route, f"{number}{route[::-1]} {CANARY} " * 20, salt)
        mine = cached_of(ask(served, "POST", path, ANN, body))
        assert cached_of(ask(served, "POST", path, ANN, body)) > mine, "it is cached at all"
        assert cached_of(ask(served, "POST", path, BOB, body)) == 0
        assert cached_of(ask(served, "POST", path, ADMIN, body)) == 0
        tried(2)
        if route not in SALTED:
            continue
        guesses = {"ann", "ann\0", f"ann\0{salt}", f"\0ann\0{salt}", salt + "\0", "\0", "s1 "}
        for guess in guesses - {salt}:
            other = body | {"cache_salt": guess}
            assert cached_of(ask(served, "POST", path, BOB, other)) == 0, guess
            tried()


def test_an_idempotency_key_is_a_tenants_own(served: Served, tried: Any) -> None:
    key = ("Idempotency-Key", "ann-only-1")
    mine = completion(served, ANN, key)
    assert completion(served, ANN, key).json["id"] == mine.json["id"]
    assert completion(served, ANN, key, max_tokens=5).status in (400, 422)
    other = completion(served, BOB, key)
    assert other.status == 200 and other.json["id"] != mine.json["id"] and cached_of(other) == 0
    # A refusal would tell that the key is in use.
    for theirs in (("Idempotency-Key", "ann-only-2"), ("Idempotency-Key", mine.json["id"]),
                   ("Idempotency-Key", mine.json["id"].removeprefix("cmpl-"))):
        completion(served, ANN, theirs)
        assert completion(served, BOB, theirs, max_tokens=5).status == 200
        tried()
    tried(2)


def events(answer: Answer) -> list[str]:
    return [line[4:] for line in answer.body.decode().split("\n") if line.startswith("id: ")]


def test_a_stream_is_taken_up_by_its_tenant_alone(served: Served, tried: Any) -> None:
    body = {"prompt": f"{CANARY} streamed", "max_tokens": 8, "ignore_eos": True, "stream": True,
            "stream_options": {"resumable": True}}
    path = "/v1/completions"
    mine = ask(served, "POST", path, ANN, body)
    marks = events(mine)
    assert marks
    again = ask(served, "POST", path, ANN, body, [("Last-Event-ID", marks[0])])
    assert again.status == 200 and events(again)
    name, _, rest = marks[0].partition(":")
    own = events(ask(served, "POST", path, BOB, body))[0].partition(":")[0]
    forged = [marks[0], f"{name.partition('.')[0]}.{own.partition('.')[2]}:{rest}",
              f"{own.partition('.')[0]}.{name.partition('.')[2]}:{rest}",
              f"{name.partition('.')[0]}-0.{own.partition('.')[2]}:{rest}", f"{name}:{rest}"]
    texts = set()
    for mark in forged:
        for headers in ([], [("Idempotency-Key", "x")],
                        [("Idempotency-Key", name.partition(".")[0])]):
            answer = ask(served, "POST", path, BOB, body, [("Last-Event-ID", mark), *headers])
            assert answer.status in (400, 404), (mark, answer)
            texts.add((answer.status, answer.json["error"]["message"]))
            tried()
    assert not [text for _, text in texts if CANARY in text or "ann" in text.lower().split()]


class Streaming:
    """A long completion of ann's under a name, in a thread."""

    def __init__(self, served: Served, name: str, path: str = "/v1/completions",
                 tokens: int = 2000) -> None:
        body: dict[str, Any] = {"prompt": CANARY, "max_tokens": tokens, "ignore_eos": True,
                                "stream": True}
        if path == "/generate":
            body = {"text": CANARY, "rid": name, "stream": True,
                    "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        self._data = packed("POST", path, [bearer(ANN), ("X-Request-Id", name)], body)
        self._begun = threading.Event()
        self.found = b""
        self._thread = threading.Thread(target=self._read, args=(served,))
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self, served: Served) -> None:
        with socket.create_connection((served.host, served.port), timeout=120) as connection:
            connection.sendall(self._data)
            while part := connection.recv(1 << 16):
                self.found += part
                if b"data: " in self.found:
                    self._begun.set()
        self._begun.set()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> bytes:
        self._thread.join(120)
        return self.found


def test_nobody_ends_anothers_request(served: Served, amount: Any, tried: Any) -> None:
    for number in range(amount(1, 6)):
        for path in ("/v1/completions", "/generate"):
            name = f"mine-{number}-{path[-4:]}"
            stream = Streaming(served, name, path)
            for rid in (name, f"cmpl-{name}", f"{name}_0", "", f"chatcmpl-{name}", "%", "*"):
                body = {"rid": rid} if rid else {"abort_all": True}
                answer = ask(served, "POST", "/abort_request", BOB, body)
                assert answer.status == 200 and answer.json == {"aborted": []}, rid
                for way in ("/v1/responses/{}/cancel", "/responses/resp_{}/cancel"):
                    assert ask(served, "POST", way.format(rid or name), BOB).status in (404, 405)
                tried(3)
            # Its name again, by another tenant, and that one's end.
            completion(served, BOB, ("X-Request-Id", name), max_tokens=2)
            assert not stream.over, "it was still under way"
            found = stream.end()
            assert b'"length"' in found and b'"abort"' not in found
    stream = Streaming(served, "ended", tokens=3900)
    assert ask(served, "POST", "/abort_request", ANN, {"rid": "ended"}).json["aborted"]
    stream.end()
    stream = Streaming(served, "ended-2", tokens=3900)
    assert ask(served, "POST", "/abort_request", ADMIN, {"abort_all": True}).json["aborted"]
    stream.end()


def test_a_stored_response_is_its_tenants_alone(served: Served, amount: Any, tried: Any) -> None:
    for number in range(amount(2, 20)):
        body = {"input": f"{CANARY} {number}", "max_output_tokens": 3, "user": CANARY,
                "background": bool(number % 2)}
        mine = ask(served, "POST", "/v1/responses", ANN, body,
                   [("X-Request-Id", f"kept-{number}")]).json["id"]
        none = "resp_none"
        for method, way in (("GET", "/v1/responses/{}"), ("DELETE", "/v1/responses/{}"),
                            ("POST", "/v1/responses/{}/cancel"), ("GET", "/responses/{}"),
                            ("GET", "/v1/responses/{}/input_items"), ("HEAD", "/v1/responses/{}"),
                            ("GET", "/v1/responses/{}?stream=false")):
            theirs, nobodys = (ask(served, method, way.format(name), BOB) for name in (mine, none))
            assert theirs.status == nobodys.status == 404, (method, way)
            assert theirs.body.replace(mine.encode(), b"") == \
                nobodys.body.replace(none.encode(), b"")
            tried()
        follow = [ask(served, "POST", path, BOB, {"input": "and?", "previous_response_id": name})
                  for path in ("/v1/responses", "/v1/responses/input_tokens", "/invocations")
                  for name in (mine, none)]
        for theirs, nobodys in zip(follow[::2], follow[1::2], strict=True):
            assert theirs.status == nobodys.status == 404
            assert theirs.body.replace(mine.encode(), b"") == \
                nobodys.body.replace(none.encode(), b"")
            tried()
        # One of the same name, which its owner deletes.
        ask(served, "POST", "/v1/responses", BOB, {"input": "x", "max_output_tokens": 1},
            [("X-Request-Id", f"kept-{number}")])
        assert ask(served, "DELETE", f"/v1/responses/{mine}", BOB).status == 200
        kept = ask(served, "GET", f"/v1/responses/{mine}/input_items", ANN)
        assert kept.status == 200 and CANARY in kept.body.decode()
        assert ask(served, "GET", f"/v1/responses/{mine}", ADMIN).status == 404
        tried(3)


@pytest.mark.mended("/server_info told each tenant the names and weights of all the others")
def test_what_all_may_read_says_nothing_of_a_tenant(served: Served, tried: Any) -> None:
    more = {"user": CANARY, "stop": [f"{CANARY}-stop"], "cache_salt": f"{CANARY}-salt",
            "request_id": f"{CANARY}-id"}
    for _ in range(3):
        completion(served, ANN, ("Idempotency-Key", f"{CANARY}-key"), **more)
        completion(served, ANN, max_tokens=CANARY)
        ask(served, "POST", f"/{CANARY}", ANN, {})
        ask(served, CANARY.upper(), "/v1/models", ANN)
        completion(served, ANN, model=CANARY)
    stream = Streaming(served, f"{CANARY}-running")
    for path in ("/metrics", "/load", "/server_info", "/get_server_info", "/v1/models", "/health",
                 "/v1/health", "/model_info", "/readyz", "/livez", "/startupz", "/health_generate",
                 "/version", "/ping", "/openapi.json"):
        for _ in range(2):
            answer = ask(served, "GET", path, BOB)
            assert answer.status == 200, path
            assert CANARY.encode() not in answer.body.lower(), path
            assert b'"ann"' not in answer.body and ANN.encode() not in answer.body, path
            tried()
    watched = first_of(served, packed("GET", "/dashboard/events", [bearer(BOB)]))
    assert watched.startswith(b"HTTP/1.1 200") and CANARY.encode() not in watched
    assert ask(served, "GET", "/server_info", ADMIN).json["config"]["scheduler"][
        "tenant_weights"] == {"ann": 2.0, "bob": 1.0}
    stream.end()
