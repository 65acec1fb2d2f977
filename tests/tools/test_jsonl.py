"""Batches in JSON lines: every kind of bad line, order, and a bounded window."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from actorium.actors.client.requests import Request
from actorium.actors.errors import EngineUnavailable, InvalidRequest
from actorium.actors.gateway.batch import json_lines
from actorium.actors.messages import TokenLogprob, Usage
from actorium.actors.params import SamplingParams, Structured
from actorium.tools.cli.jsonl import BadLine, BatchJob, parse_line, parse_lines, run_batch

BAD = [
    (b"not json", "the line is not JSON"),
    (b'{"prompt": "a"', "the line is not JSON"),
    (b'{"prompt": "a"} trailing', "the line is not JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "the line is not JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "the line is not JSON"),
    (b'{"prompt": "\xff"}', "the line is not UTF-8"),
    (b"[1, 2]", "a line must hold a JSON object, got list"),
    (b'"text"', "a line must hold a JSON object, got str"),
    (b"null", "a line must hold a JSON object, got NoneType"),
    (b"[" * 100_000, "the line is nested too deeply"),
    (b"{}", "one of prompt, prompt_token_ids, messages is needed, got none"),
    (b'{"prompt": null}', "one of prompt, prompt_token_ids, messages is needed, got none"),
    (b'{"prompt": "a", "messages": []}', "one of prompt, prompt_token_ids, messages is needed"),
    (b'{"prompt": 5}', "prompt: must be a string, got int"),
    (b'{"prompt": ["a"]}', "prompt: must be a string, got list"),
    (b'{"prompt_token_ids": "abc"}', "prompt_token_ids: Expected array | null, got str"),
    (b'{"prompt_token_ids": [1, "2"]}', "prompt_token_ids: Expected int, got str"),
    (b'{"prompt_token_ids": [1.5]}', "prompt_token_ids: Expected int, got float"),
    (b'{"messages": [{"role": "user"}]}', "messages: every message needs role and content"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "messages: Expected str, got int"),
    (b'{"messages": "hi"}', "messages: Expected array"),
    (b'{"prompt": "a", "max_token": 3}', "max_token: no such field (did you mean max_tokens"),
    (b'{"prompt": "a", "max_tokens": "3"}', "max_tokens: Expected int | null, got str"),
    (b'{"prompt": "a", "max_tokens": true}', "max_tokens: Expected int | null, got bool"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens: must be between 1"),
    (b'{"prompt": "a", "temperature": -0.1}', "temperature: must be between"),
    (b'{"prompt": "a", "n": 1025}', "n: must be between 1 and 1024, got 1025"),
    (b'{"prompt": "a", "truncate_prompt_tokens": "3"}', "truncate_prompt_tokens: Expected int"),
    (b'{"messages": [], "add_generation_prompt": 1}', "add_generation_prompt: Expected bool"),
    (b'{"prompt": "a", "cache_salt": 1}', "cache_salt: Expected str"),
    (b'{"prompt": "a", "allowed_token_ids": []}', "allowed_token_ids: 1 to"),
    (b'{"prompt": "a", "structured": {"regexp": "x"}}', "structured: Object contains unknown"),
    (b'{"prompt": "a", "structured": {}}', "structured: exactly one of"),
    (b'{"prompt": "a", "bad_words": "x"}', "bad_words: Expected array"),
    (b'{"prompt": "a", "stop": 3}', "stop: Expected"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: Expected int, got str"),
    (b'{"prompt": "a", "logit_bias": {"1": 101}}', "logit_bias: must be between"),
    (b'{"prompt": "a", "seed": -1}', "seed: must be between"),
    (b'{"prompt": "a", "seed": 99999999999999999999999}', "seed: "),
    (b'{"prompt": "a", "top_logprobs": 3}', "top_logprobs: needs logprobs: true"),
    (b'{"prompt": "a", "logprobs": true, "top_logprobs": 21}', "logprobs: must be between"),
    (b'{"prompt": "a", "max_tokens": 3, "max_completion_tokens": 3}', "max_completion_tokens: "),
    (b'{"prompt": "a", "min_tokens": 5, "max_tokens": 3}', "min_tokens: 5 exceeds"),
    (b'{"prompt": "a", "priority": "high"}', "priority: must be a whole number between"),
    (b'{"prompt": "a", "priority": 2147483648}', "priority: must be a whole number between"),
    (b'{"prompt": "a", "priority": true}', "priority: must be a whole number between"),
    (b'{"prompt": "a", "tenant": "a b"}', "tenant: must be at most 64 printable ASCII"),
    (b'{"prompt": "a", "tenant": 5}', "tenant: must be at most 64 printable ASCII"),
    (b'{"prompt": "a", "tenannt": "x"}', "tenannt: no such field (did you mean tenant"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_names_its_error(line: bytes, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_line(0, line, {})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def asked(index: int, prompt: str) -> BatchJob:
    return BatchJob(index, Request(prompt=prompt, params=SamplingParams()))


def test_good_lines() -> None:
    assert parse_line(3, b'{"prompt": "a"}', {}) == asked(3, "a")
    assert parse_line(0, b'{"prompt_token_ids": [1, 2]}', {}).request.prompt == [1, 2]
    turns = [{"role": "user", "content": "hi"}]
    assert parse_line(0, json.dumps({"messages": turns}).encode(), {}).request.messages == turns
    job = parse_line(0, b'{"prompt": "a", "temperature": 1, "stop": "x", "stop_token_ids": [5], '
                        b'"logit_bias": {"7": -1}, "max_completion_tokens": 4}', {})
    assert job.request.params == SamplingParams(temperature=1, stop="x", stop_token_ids=[5],
                                        logit_bias={7: -1.0}, max_tokens=4)


def test_tenant_and_priority_of_a_line() -> None:
    job = parse_line(0, b'{"prompt": "a", "tenant": "acme", "priority": -4}', {"max_tokens": 2})
    assert (job.request.tenant, job.request.priority) == ("acme", -4)
    assert job.request == Request(prompt="a", params=SamplingParams(max_tokens=2),
                                    tenant="acme", priority=-4)
    job = parse_line(0, b'{"prompt_token_ids": [1], "tenant": null, "priority": null}', {})
    assert job.request == Request(prompt=[1], params=SamplingParams())
    turns = [{"role": "user", "content": "hi"}]
    job = parse_line(0, json.dumps({"messages": turns, "tenant": ""}).encode(), {})
    assert job.request == Request(messages=turns, params=SamplingParams(), tenant="")


def test_how_the_prompt_of_a_line_is_made() -> None:
    options = {"chat_template": "{{ messages }}", "add_generation_prompt": False,
               "continue_final_message": True, "truncate_prompt_tokens": -1, "cache_salt": "s"}
    line = {"messages": [{"role": "user", "content": "x"}], **options, "bad_words": ["y"],
            "structured": {"regex": "a"}}
    job = parse_line(0, json.dumps(line).encode(), {})
    request = job.request
    assert {name: getattr(request, name) for name in options} == options
    assert request.params == SamplingParams(bad_words=["y"], structured=Structured(regex="a"))
    plain = parse_line(0, b'{"prompt": "x", "cache_salt": null}', {}).request
    assert plain == Request(prompt="x", params=SamplingParams())


def test_logprobs_as_openai_asks_for_them() -> None:
    def asked(text: str) -> int | None:
        return parse_line(0, text.encode(), {}).request.params.logprobs

    assert asked('{"prompt": "a", "logprobs": true, "top_logprobs": 5}') == 5
    assert asked('{"prompt": "a", "logprobs": true}') == 0
    assert asked('{"prompt": "a", "logprobs": false}') is None
    assert asked('{"prompt": "a", "logprobs": 2}') == 2
    assert asked('{"prompt": "a", "logprobs": null}') is None


def test_a_line_wins_over_the_defaults() -> None:
    defaults = {"max_tokens": 7, "temperature": 0.5}
    params = parse_line(0, b'{"prompt": "a", "temperature": 0}', defaults).request.params
    assert params.max_tokens == 7
    assert params.temperature == 0
    with pytest.raises(ValueError, match="min_tokens"):
        parse_line(0, b'{"prompt": "a", "min_tokens": 8}', defaults)


def test_lines_are_numbered_and_blank_ones_skipped() -> None:
    file = io.BytesIO(b'{"prompt": "a"}\n\n  \nbad\r\n{"prompt": "b"}')
    items = list(parse_lines(json_lines.read_lines(file), {}))
    assert [item.index for item in items] == [0, 1, 2]
    assert isinstance(items[1], BadLine)
    assert isinstance(items[2], BatchJob) and items[2].request.prompt == "b"


def test_a_line_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 100)
    long = b'{"prompt": "' + b"x" * 1000 + b'"}'
    for end in (b"\n", b"\n" + b'{"prompt": "b"}'):
        items = list(parse_lines(json_lines.read_lines(io.BytesIO(long + end)), {}))
        assert isinstance(items[0], BadLine)
        assert "longer than 100 bytes" in items[0].error
        assert len(items) == (1 if end == b"\n" else 2)
    exact = b'{"prompt": "' + b"x" * 86 + b'"}\n'
    assert len(exact) == 101
    assert isinstance(next(parse_lines(json_lines.read_lines(io.BytesIO(exact)), {})), BatchJob)


class FakeCompletion:
    def __init__(self, text: str, token_ids: list[int]) -> None:
        self.text, self.token_ids, self.finish_reason = text, token_ids, "stop"
        self.usage = Usage(3, 1, len(token_ids))
        self.logprobs = [TokenLogprob(t, -0.5, 1, [(t, -0.5)]) for t in token_ids]
        self.prompt_logprobs = [None, *self.logprobs]


def collect(items: Any, generate: Any, window: int = 4) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return [record async for record in run_batch(items, generate, window)]

    return asyncio.run(run())


def test_records_come_in_input_order_whatever_finishes_first() -> None:
    async def generate(job: BatchJob) -> list[Any]:
        for _ in range(20 - job.index):
            await asyncio.sleep(0)
        return [FakeCompletion(job.request.prompt or "", [job.index])]

    jobs = [asked(i, str(i)) for i in range(20)]
    records = collect(jobs, generate, window=20)
    assert [record["index"] for record in records] == list(range(20))
    assert records[7] == {"index": 7, "text": "7", "token_ids": [7], "finish_reason": "stop",
                          "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 1}


def test_no_more_than_the_window_is_held() -> None:
    running = most = read = 0

    async def generate(job: BatchJob) -> list[Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert read - job.index <= 8
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1
        return [FakeCompletion("", [1])]

    def lines() -> Iterator[bytes]:
        nonlocal read
        for _ in range(500):
            read += 1
            yield b'{"prompt": "a"}'

    assert len(collect(parse_lines(lines(), {}), generate, window=8)) == 500
    assert 1 < most <= 8


def test_errors_become_records_and_the_rest_run() -> None:
    async def generate(job: BatchJob) -> list[Any]:
        if job.request.prompt == "refused":
            raise InvalidRequest("prompt: too long", "prompt")
        return [FakeCompletion("ok", [1, 2])]

    lines = [b'{"prompt": "refused"}', b"bad", b'{"prompt": "fine"}']
    first, second, third = collect(parse_lines(lines, {}), generate)
    assert first == {"index": 0, "error": "prompt: too long"}
    assert second["index"] == 1 and "not JSON" in second["error"]
    assert third["text"] == "ok"


def test_a_dead_engine_ends_the_batch() -> None:
    async def generate(job: BatchJob) -> list[Any]:
        raise EngineUnavailable("gone")

    with pytest.raises(EngineUnavailable):
        collect([asked(i, "a") for i in range(9)], generate)


def test_logprobs_and_choices() -> None:
    async def generate(job: BatchJob) -> list[Any]:
        return [FakeCompletion("x", [4]) for _ in range(job.request.params.n)]

    lines = [b'{"prompt": "a", "n": 2}', b'{"prompt": "a", "logprobs": 1, "prompt_logprobs": 0}']
    choices, logprobs = collect(parse_lines(lines, {}), generate)
    assert set(choices) == {"index", "choices"}
    assert [choice["index"] for choice in choices["choices"]] == [0, 1]
    assert "logprobs" not in choices["choices"][0]
    entry = {"token_id": 4, "logprob": -0.5, "rank": 1, "top": [[4, -0.5]]}
    assert logprobs["logprobs"] == [entry]
    assert logprobs["prompt_logprobs"] == [None, entry]
