"""Streams of every API cut after any event and resumed, also at a gateway that was killed since:
nothing is told twice, nothing is missing, and nothing has another id, time or count.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_served import Event, Served, serving

pytestmark = pytest.mark.slow
TURNS = [{"role": "user", "content": "Tell me a story about a fox."}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "n": 2, "logprobs": True, "stream_options": USAGE},
    "/v1/completions": {"prompt": ["Once", "The cat"], "n": 2, "stream_options": USAGE},
    "/v1/responses": {"input": TURNS, "top_logprobs": 1},
    "/v1/messages": {"messages": TURNS},
    "/generate": {"text": ["Once", "The cat"], "return_logprob": True},
}
LIMITS = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=16, retain=600.0) as found:
        yield found


def told(served: Served, path: str, key: str, last: str = "") -> list[Event]:
    """The events of a stream, behind the one named `last`. A gateway that is away is waited for."""
    body = APIS[path] | {"stream": True} | (
        {"sampling_params": {"max_new_tokens": 40, "ignore_eos": True}} if path == "/generate"
        else LIMITS)
    headers = {"idempotency-key": key} | ({"last-event-id": last} if last else {})
    until = time.monotonic() + 30
    while True:
        connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
        finally:
            connection.close()
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "id" in lines:
            found.append(Event(lines["id"], lines["data"]))
    return found


def sense(path: str, events: list[Event]) -> Any:
    """What a stream says, however it was cut into events."""
    each = [json.loads(one.data) for one in events]
    if path == "/generate":
        return {one["index"]: one for one in each}
    if path == "/v1/responses":
        assert [one["sequence_number"] for one in each] == list(range(len(each)))
        return ["".join(one["delta"] for one in each if one["type"].endswith("output_text.delta")),
                [each[0]["response"], each[-1]["response"]]]
    if path == "/v1/messages":
        return ["".join(one["delta"]["text"] for one in each
                        if one["type"] == "content_block_delta"), each[0], each[-2:]]
    texts: dict[int, str] = {}
    probs: dict[int, int] = {}
    for one in each:
        for choice in one["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice.get("text")
                                                   or choice.get("delta", {}).get("content") or "")
            probs[index] = probs.get(index, 0) + len((choice.get("logprobs") or {})
                                                     .get("content", ()))
    prompts = {one["usage"]["prompt_tokens"] for one in each}
    return texts, probs, prompts, {(one["id"], one["created"]) for one in each}, each[-1]


@pytest.mark.mended("a stream that went on told sequence numbers twice, the time of the last "
                    "connection, and 0 tokens of the prompt")
@pytest.mark.parametrize("path", APIS)
def test_a_stream_may_be_cut_anywhere(served: Served, path: str, tried: Any, amount: Any) -> None:
    whole = told(served, path, f"key{path}")
    want = sense(path, whole)
    time.sleep(1.1)  # another second
    for at in range(0, len(whole) - 1, max(1, len(whole) // amount(12, 200))):
        tried()
        rest = told(served, path, f"key{path}", whole[at].id)
        assert rest and sense(path, whole[:at + 1] + rest) == want, whole[at].id
    status = served.engine.client.status()
    [pid] = [one.pid for one in status.actors if one.role == "gateway-0"]
    os.kill(pid, signal.SIGKILL)
    tried(2)
    middle = len(whole) // 2
    assert sense(path, whole[:middle] + told(served, path, f"key{path}", whole[middle - 1].id)
                 ) == want
    assert sense(path, told(served, path, f"key{path}")) == want
