"""Prompts made and completed as token ids, and SageMaker's one path, over a whole engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Served

TURNS = [{"role": "user", "content": "Tell me a story."}]
CHAT = {"messages": TURNS, "max_tokens": 7, "temperature": 0}


@pytest.fixture(scope="module")
def served(packaged: Served) -> Served:
    return packaged


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_rendered_chat_gives_the_same_when_it_is_run(served: Served, http: httpx.Client) -> None:
    made = post(http, "/v1/chat/completions/render", CHAT)
    assert made["token_ids"] == served.engine.client.tokenize_chat(TURNS)
    assert TURNS[0]["content"] in made["prompt"] and made["sampling_params"]["max_tokens"] == 7
    run = post(http, "/inference/v1/generate", made)
    chat = post(http, "/v1/chat/completions", CHAT | {"return_token_ids": True})
    assert run["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert run["request_id"] == made["request_id"] and run["usage"]["completion_tokens"] == 7
    assert run["choices"][0]["finish_reason"] == "length"


def test_rendered_texts_are_a_list(served: Served, http: httpx.Client) -> None:
    made = post(http, "/v1/completions/render", {"prompt": ["Once", "A fox"], "max_tokens": 3})
    assert [one["token_ids"] for one in made] == \
        [served.engine.client.tokenize(text) for text in ("Once", "A fox")]
    assert len({one["request_id"] for one in made}) == 2
    assert all(one["request_id"].startswith("cmpl-") for one in made)
    [cut] = post(http, "/v1/completions/render", {"prompt": [[5, 6, 7]], "max_tokens": 3,
                                                  "truncate_prompt_tokens": 2})
    assert cut["token_ids"] == [6, 7]


def test_prompts_beyond_the_context_are_not_rendered(http: httpx.Client) -> None:
    answer = http.post("/v1/completions/render", json={"prompt": "fox " * 9000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = http.post("/v1/chat/completions/render", json=CHAT | {"temperature": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


def test_streamed_token_ids(http: httpx.Client) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {
        "max_tokens": 9, "n": 2, "temperature": 0, "logprobs": 1}}
    whole = post(http, "/inference/v1/generate", body)
    text = http.post("/inference/v1/generate", json=body | {
        "stream": True, "stream_options": {"include_usage": True}}).text
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    events = [json.loads(part[6:]) for part in parts[:-2]]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 18
    for choice in whole["choices"]:
        mine = [one for event in events for one in event["choices"]
                if one["index"] == choice["index"]]
        assert [t for one in mine for t in one["token_ids"]] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert sum(len(one["logprobs"]["content"]) for one in mine if one["logprobs"]) == 9


@pytest.mark.parametrize(("change", "word"), [
    ({"token_ids": []}, "token_ids"), ({"features": {"a": 1}}, "features"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"sampling_params": {"use_beam_search": True}}, "sampling_params.use_beam_search"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"token_ids": [10**9]}, "token_ids: token id")])
def test_refusals_name_the_field(http: httpx.Client, change: dict[str, Any], word: str) -> None:
    answer = http.post("/inference/v1/generate",
                       json={"token_ids": [5], "sampling_params": {}} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(word), answer.text


@pytest.mark.parametrize(("body", "path"), [
    (CHAT, "/v1/chat/completions"),
    ({"prompt": "Once", "max_tokens": 5, "temperature": 0}, "/v1/completions"),
    ({"input": "Hi", "max_output_tokens": 5, "temperature": 0}, "/v1/responses"),
    ({"text": "Once", "sampling_params": {"max_new_tokens": 5}}, "/generate"),
    ({"input_ids": [5], "sampling_params": {"max_new_tokens": 5}}, "/generate")])
def test_invocations_answer_as_the_bodys_own_route(http: httpx.Client, body: dict[str, Any],
                                                   path: str) -> None:
    one, other = post(http, "/invocations", body), post(http, path, body)
    assert set(one) == set(other) and one.get("object") == other.get("object")


def test_invocations_stream_and_refuse_as_others_do(http: httpx.Client) -> None:
    text = http.post("/invocations", json=CHAT | {"stream": True}).text
    assert text.startswith("data: {") and text.endswith("data: [DONE]\n\n")
    for body, word in (({}, "body: one of"), ({"prompt": 3}, "prompt"), ([], "body")):
        answer = http.post("/invocations", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(word)


def test_scaling_is_not_done(http: httpx.Client) -> None:
    for method in ("GET", "POST"):
        assert http.request(method, "/is_scaling_elastic_ep").json() == {
            "is_scaling_elastic_ep": False}
    answer = http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert answer.status_code == 501 and "not supported" in answer.json()["error"]["message"]
