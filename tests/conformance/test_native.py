"""SGLang's own API: `/generate`, what belongs to it, and how its benchmark reads its streams."""

from __future__ import annotations

import json
import re
import time
from threading import Thread
from typing import Any

import pytest
from wire import GENERATE, STORY, Json, Server, events, generate

pytestmark = pytest.mark.conformance
OTHER = "The cat sat on the"


def run(server: Server, **more: Any) -> Any:
    return server.post(GENERATE, generate(**more)).ok()


def chunks(server: Server, **more: Any) -> list[Json]:
    """Of a stream."""
    answer = server.post(GENERATE, generate(**more, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = events(answer.body)
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


def test_the_shape_of_an_answer(server: Server) -> None:
    found = run(server)
    assert isinstance(found["text"], str) and found["text"]
    assert len(found["output_ids"]) == 6
    meta = found["meta_info"]
    assert meta["id"] and meta["prompt_tokens"] == len(server.tokenize(STORY))
    assert meta["completion_tokens"] == 6 and meta["cached_tokens"] >= 0
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["e2e_latency"] > 0


def test_it_says_what_the_other_api_says(server: Server) -> None:
    assert run(server)["text"] == server.complete()["choices"][0]["text"]


def test_token_ids(server: Server) -> None:
    assert run(server, input_ids=server.tokenize(STORY))["text"] == run(server)["text"]


@pytest.mark.parametrize("form", ["text", "input_ids"])
def test_several_at_once(server: Server, form: str) -> None:
    given = [STORY, OTHER]
    found = run(server, **{form: given if form == "text" else [server.tokenize(one)
                                                               for one in given]})
    assert [one["text"] for one in found] == [run(server, text=one)["text"] for one in given]
    assert len({one["meta_info"]["id"] for one in found}) == 2


def test_a_list_of_one(server: Server) -> None:
    (found,) = run(server, text=[STORY])
    assert found["text"] == run(server)["text"]


def test_parameters_of_each(server: Server) -> None:
    body = {"text": [STORY, OTHER], "sampling_params": [
        {"temperature": 0, "max_new_tokens": 2}, {"temperature": 0, "max_new_tokens": 4}]}
    found = server.post(GENERATE, body).ok()
    assert [one["meta_info"]["completion_tokens"] for one in found] == [2, 4]


def test_several_choices(server: Server) -> None:
    found = run(server, sampling_params={"n": 3, "temperature": 1.0})
    assert len(found) == 3 and len({one["text"] for one in found}) > 1


@pytest.mark.parametrize("given", [{}, None], ids=["empty", "absent"])
def test_without_parameters(server: Server, given: Json | None) -> None:
    body: Json = {"text": STORY} | ({} if given is None else {"sampling_params": given})
    assert 0 < server.post(GENERATE, body).ok()["meta_info"]["completion_tokens"] <= 128


def test_a_stream_is_cumulative(server: Server) -> None:
    found = chunks(server, sampling_params={"max_new_tokens": 12})
    texts = [one["text"] for one in found]
    assert all(after.startswith(before)
               for before, after in zip(texts, texts[1:], strict=False))
    assert texts[-1] == run(server, sampling_params={"max_new_tokens": 12})["text"]
    counts = [one["meta_info"]["completion_tokens"] for one in found]
    assert counts == sorted(counts) and counts[-1] == 12 and len(found) > 4
    assert found[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(one["meta_info"]["finish_reason"] is None for one in found[:-1])


def test_its_benchmark_reads_the_stream(server: Server) -> None:
    """`sglang.bench_serving`'s loop: text beyond what was there, tokens beyond those counted."""
    text, counted, gaps = "", 0, []
    for one in chunks(server, sampling_params={"max_new_tokens": 10, "ignore_eos": True}):
        if one["text"]:
            assert len(one["text"]) >= len(text)
            text = one["text"]
            gaps.append(one["meta_info"]["completion_tokens"] - counted)
            counted = one["meta_info"]["completion_tokens"]
    assert sum(gaps) == counted == 10 and text


def test_a_stream_of_several(server: Server) -> None:
    found = chunks(server, text=[STORY, OTHER])
    last = {one["index"]: one["text"] for one in found}
    assert last == {0: run(server)["text"], 1: run(server, text=OTHER)["text"]}


@pytest.mark.parametrize("more", [
    {"stop": ["e"]}, {"stop": "e"}, {"stop_token_ids": [5]}, {"stop_regex": "[aeiou]"},
    {"top_p": 0.9}, {"top_k": 5}, {"top_k": -1}, {"min_p": 0.1}, {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"min_new_tokens": 3},
    {"ignore_eos": True}, {"skip_special_tokens": False}, {"spaces_between_special_tokens": True},
    {"no_stop_trim": True}, {"n": 1}, {"regex": "[ab]{3}"}, {"json_schema": '{"const": 1}'},
    {"ebnf": 'root ::= "a"'}, {"logit_bias": {"5": 1.0}}, {"sampling_seed": 3},
    {"stop": None}, {"regex": None}, {"max_new_tokens": 0}], ids=str)
def test_parameters(server: Server, more: Json) -> None:
    found = run(server, sampling_params=more)
    assert found["meta_info"]["completion_tokens"] <= 6


def test_a_stop_text(server: Server) -> None:
    plain = run(server, sampling_params={"max_new_tokens": 16})["text"]
    stop = plain[6:9]
    found = run(server, sampling_params={"max_new_tokens": 16, "stop": stop})
    assert found["text"] == plain[:plain.index(stop)]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = run(server, sampling_params={"max_new_tokens": 16, "stop": stop, "no_stop_trim": True})
    assert kept["text"] == plain[:plain.index(stop) + len(stop)]


def test_a_pattern(server: Server) -> None:
    found = run(server, sampling_params={"regex": r"[a-f]{4}-\d{2}", "max_new_tokens": 40})
    assert re.fullmatch(r"[a-f]{4}-\d{2}", found["text"])


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("texts", [True, False])
def test_logprobs(server: Server, top: int, texts: bool) -> None:
    meta = run(server, return_logprob=True, top_logprobs_num=top, logprob_start_len=0,
               return_text_in_logprobs=texts)["meta_info"]
    ids = server.tokenize(STORY)
    assert [one[1] for one in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_token_logprobs"]) == 6
    for value, token, text in meta["output_token_logprobs"]:
        assert value <= 0 and isinstance(token, int)
        assert isinstance(text, str) if texts else text is None
    if top:
        assert all(len(one) == top for one in meta["output_top_logprobs"])
        assert [one[0][1] for one in meta["output_top_logprobs"]] == [
            one[1] for one in meta["output_token_logprobs"]]
        assert meta["input_top_logprobs"][0] is None


def test_logprobs_of_the_answer_alone(server: Server) -> None:
    meta = run(server, return_logprob=True)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 6 and not meta["input_token_logprobs"]


def test_logprobs_from_a_place(server: Server) -> None:
    meta = run(server, return_logprob=True, logprob_start_len=2)["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 2


def test_scoring_without_new_tokens(server: Server) -> None:
    found = run(server, return_logprob=True, logprob_start_len=0,
                sampling_params={"max_new_tokens": 0})
    assert found["text"] == "" and found["meta_info"]["completion_tokens"] == 0
    assert len(found["meta_info"]["input_token_logprobs"]) == len(server.tokenize(STORY))


def test_its_own_request_id(server: Server) -> None:
    assert run(server, rid="conformance-rid")["meta_info"]["id"] == "conformance-rid"


REFUSED: list[tuple[Json, str]] = [
    ({"txt": STORY}, "txt"), ({"text": STORY, "unknown": 1}, "unknown"), ({}, "text"),
    ({"text": STORY, "input_ids": [1]}, "text"), ({"text": 5}, "text"),
    ({"input_ids": ["a"]}, "input_ids"), ({"input_ids": [10 ** 9]}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"text": STORY, "sampling_params": {"max_new_tokens": -1}}, ""),
    ({"text": STORY, "sampling_params": {"temperature": -1}}, ""),
    ({"text": STORY, "sampling_params": {"top_p": 2}}, ""),
    ({"text": STORY, "sampling_params": {"regex": "("}}, ""),
    ({"text": STORY, "sampling_params": {"max_tokens_typo": 4}}, ""),
    ({"text": STORY, "sampling_params": 5}, "sampling_params"),
    ({"text": [STORY, OTHER], "sampling_params": [{}]}, "sampling_params"),
    ({"text": STORY, "stream": "yes"}, "stream")]


@pytest.mark.parametrize("body,param", REFUSED, ids=str)
def test_what_is_refused_is_named(server: Server, body: Json, param: str) -> None:
    answer = server.post(GENERATE, body)
    assert answer.status == 400, answer.text
    assert param in answer.text


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_what_is_served(server: Server, path: str) -> None:
    found = server.get(path).ok()
    assert found["model_path"] and isinstance(found["tokenizer_path"], str)
    assert found["is_generation"] is True


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_how_it_is_served(server: Server, path: str) -> None:
    assert isinstance(server.get(path).ok(), dict)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_cache_is_flushed(server: Server, method: str) -> None:
    assert server.send(method, "/flush_cache").status == 200


@pytest.mark.parametrize("body", [{"rid": "no-such"}, {"abort_all": True}], ids=str)
def test_aborting_nothing(server: Server, body: Json) -> None:
    assert server.post("/abort_request", body).status == 200


@pytest.mark.parametrize("body", [{"rid": "conformance-long"}, {"abort_all": True}], ids=str)
def test_aborting_one(server: Server, body: Json) -> None:
    found: list[Any] = []

    def ask() -> None:
        found.append(server.post(GENERATE, generate(rid="conformance-long", sampling_params={
            "max_new_tokens": 3000, "ignore_eos": True})))

    thread = Thread(target=ask)
    thread.start()
    time.sleep(1.0)
    assert server.post("/abort_request", body).status == 200
    thread.join(20)
    assert not thread.is_alive()
    (answer,) = found
    if answer.status == 200:
        assert answer.json["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.complete(max_tokens=1)["choices"]
