"""SGLang's native API over a whole engine: what its clients send, and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Served

from actorium.actors.params import SamplingParams

PROMPT = "Once upon a time there was a fox"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def served(packaged: Served) -> Served:
    return packaged


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def generate(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, **body: Any) -> list[Any]:
    """The events, which end as SGLang's do."""
    text = http.post("/generate", json=body | {"stream": True}).text
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""] and all(p.startswith("data: ") for p in parts[:-1])
    return [json.loads(part[6:]) for part in parts[:-2]]


def test_one_text(served: Served, http: httpx.Client) -> None:
    want = served.engine.client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8))
    told = generate(http, text=PROMPT, sampling_params=GREEDY, rid="mine")
    assert (told["text"], told["output_ids"]) == (want.text, want.token_ids)
    meta = told["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (want.usage.prompt_tokens, 8)
    assert 0 < meta["e2e_latency"] < 60 and meta["cached_tokens"] >= 0
    assert "output_token_logprobs" not in meta
    ids = served.engine.client.tokenize(PROMPT)
    again = generate(http, input_ids=ids, sampling_params={"temperature": 0, "max_tokens": 8})
    assert again["text"] == want.text


def test_a_list_in_gives_a_list_out(http: httpx.Client) -> None:
    each = [generate(http, text=text, sampling_params=GREEDY)["text"] for text in (PROMPT, "A")]
    told = generate(http, text=[PROMPT, "A"], sampling_params=[GREEDY, GREEDY], rid="b")
    assert [one["text"] for one in told] == each
    assert [one["meta_info"]["id"] for one in told] == ["b_0", "b_1"]
    assert isinstance(generate(http, input_ids=[[1, 2]], sampling_params=GREEDY), list)
    own = generate(http, text=[PROMPT, "A"], sampling_params=[GREEDY, GREEDY | {
        "max_new_tokens": 3}], rid=["x", "y"])
    assert [one["meta_info"]["completion_tokens"] for one in own] == [8, 3]
    assert [one["meta_info"]["id"] for one in own] == ["x", "y"]


def test_several_choices_are_a_list(http: httpx.Client) -> None:
    params = {"temperature": 1.0, "n": 3, "max_new_tokens": 5, "sampling_seed": 1}
    told = generate(http, text=PROMPT, sampling_params=params)
    assert len(told) == 3 and len({one["meta_info"]["id"] for one in told}) == 3
    both = generate(http, text=[PROMPT, "A"], sampling_params=params)
    assert [one["text"] for one in both[:3]] == [one["text"] for one in told]


def test_each_event_of_a_stream_has_all_text_so_far(http: httpx.Client) -> None:
    whole = generate(http, text=PROMPT, sampling_params=GREEDY, return_logprob=True)
    events = streamed(http, text=PROMPT, sampling_params=GREEDY, return_logprob=True)
    for before, after in zip(events, events[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][:len(before["output_ids"])] == before["output_ids"]
    assert all(one["meta_info"]["finish_reason"] is None for one in events[:-1])
    assert all(one["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
               for one in events)
    last = events[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    metas = [{key: value for key, value in one["meta_info"].items()
              if key not in ("id", "e2e_latency", "cached_tokens") and not key.startswith("spec_")}
             for one in (last, whole)]
    rows = [meta.pop("output_token_logprobs") for meta in metas]
    assert metas[0] == metas[1] and "index" not in last
    assert [row[1] for row in rows[0]] == [row[1] for row in rows[1]]
    assert [row[0] for row in rows[0]] == pytest.approx([row[0] for row in rows[1]], abs=1e-4)


def test_a_stream_of_several_is_numbered(http: httpx.Client) -> None:
    params = {"temperature": 1.0, "n": 2, "max_new_tokens": 5, "sampling_seed": 1}
    whole = generate(http, text=[PROMPT, "A"], sampling_params=params)
    last = {one["index"]: one for one in streamed(http, text=[PROMPT, "A"],
                                                  sampling_params=params)}
    assert [last[i]["text"] for i in range(4)] == [one["text"] for one in whole]


@pytest.mark.parametrize("start", [0, 3])
def test_logprobs(served: Served, http: httpx.Client, start: int) -> None:
    ids = served.engine.client.tokenize(PROMPT)
    meta = generate(http, text=PROMPT, sampling_params=GREEDY, return_logprob=True,
                    logprob_start_len=start, top_logprobs_num=3,
                    return_text_in_logprobs=True)["meta_info"]
    want = served.engine.client.generate(
        ids, SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=3))
    prompt, said = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert meta["prompt_tokens"] == start + len(prompt)
    assert [row[1] for row in prompt] == ids[start:] and prompt[0][0] is None
    assert PROMPT.endswith("".join(row[2] for row in prompt[1:]))
    for row, one in zip(prompt[1:], want.prompt_logprobs[start + 1:], strict=True):
        assert row[0] == pytest.approx(one.logprob, abs=1e-4)
    assert [row[1] for row in said] == want.token_ids
    assert [row[0] for row in said] == pytest.approx([one.logprob for one in want.logprobs])
    assert meta["input_top_logprobs"][0] is None
    assert all(len(rows) == 3 for rows in meta["input_top_logprobs"][1:])
    for rows, row in zip(meta["output_top_logprobs"], said, strict=True):
        assert len(rows) == 3 and rows[0] == row  # greedy: the likeliest was taken


def test_logprobs_of_named_tokens(http: httpx.Client) -> None:
    meta = generate(http, text=PROMPT, sampling_params=GREEDY, return_logprob=True,
                    token_ids_logprob=[5, 9])["meta_info"]
    rows = meta["output_token_ids_logprobs"]
    assert len(rows) == 8 and all([row[1] for row in each] == [5, 9] for each in rows)
    assert all(row[0] < 0 for each in rows for row in each)
    assert meta["input_token_ids_logprobs"] == [] and "output_top_logprobs" not in meta


def test_only_the_prompts_logprobs(served: Served, http: httpx.Client) -> None:
    ids = served.engine.client.tokenize(PROMPT)
    told = generate(http, input_ids=[ids, ids[:4]], return_logprob=True, logprob_start_len=0,
                    sampling_params={"temperature": 0, "max_new_tokens": 0})
    for one, prompt in zip(told, (ids, ids[:4]), strict=True):
        meta = one["meta_info"]
        assert (one["text"], one["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert [row[1] for row in meta["input_token_logprobs"]] == prompt
        assert meta["output_token_logprobs"] == []


def test_stop_reasons_name_the_match(http: httpx.Client) -> None:
    whole = generate(http, text=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 30})
    word = whole["text"].split()[2]
    told = generate(http, text=PROMPT, sampling_params=GREEDY | {"stop": [word]})
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert word not in told["text"] and told["text"] == whole["text"][:len(told["text"])]
    kept = generate(http, text=PROMPT, sampling_params=GREEDY | {
        "stop": word, "no_stop_trim": True})
    assert kept["text"].endswith(word)
    token = whole["output_ids"][3]
    told = generate(http, text=PROMPT, sampling_params=GREEDY | {"stop_token_ids": [token]})
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_an_expression_that_ends_the_text(http: httpx.Client) -> None:
    whole = generate(http, text=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 30})
    told = generate(http, text=PROMPT, sampling_params=GREEDY | {
        "max_new_tokens": 30, "stop_regex": "[aeiou]{2}"})
    assert told["meta_info"]["finish_reason"]["type"] == "stop"
    assert whole["text"].startswith(told["text"]) and len(told["text"]) < len(whole["text"])


def test_formats(http: httpx.Client) -> None:
    for asked in ({"regex": "[a-c]{3}"}, {"ebnf": 'root ::= "abc" | "bca"'}):
        told = generate(http, text=PROMPT, sampling_params=GREEDY | asked)
        assert set(told["text"]) <= set("abc") and len(told["text"]) == 3
    schema = {"type": "object", "properties": {"legs": {"enum": [4]}}, "required": ["legs"]}
    for form in (schema, json.dumps(schema)):
        told = generate(http, text=PROMPT, sampling_params={"json_schema": form,
                                                            "temperature": 0})
        assert json.loads(told["text"]) == {"legs": 4}


def test_without_a_limit_there_are_128_tokens_or_what_fits(http: httpx.Client) -> None:
    told = generate(http, text=PROMPT, sampling_params={"ignore_eos": True, "temperature": 0})
    assert told["meta_info"]["completion_tokens"] == 128
    most = http.get("/get_model_info").json()["max_model_len"]
    told = generate(http, input_ids=[5] * (most - 9), sampling_params={"ignore_eos": True})
    assert told["meta_info"]["completion_tokens"] == 9


@pytest.mark.parametrize(("change", "word"), [
    ({"sampling_params": {"n": 10**9}}, "sampling_params.n"),
    ({"text": None}, "text"), ({"input_ids": [1]}, "text"), ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text"), ({"prompt": "x"}, "prompt: there is no such field"),
    ({"sampling_params": {"max_tokenz": 1}}, "sampling_params.max_tokenz"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
     "sampling_params.min_new_tokens"),
    ({"sampling_params": {"max_new_tokens": 3, "max_tokens": 4}},
     "sampling_params.max_new_tokens"),
    ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.regex"),
    ({"sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
    ({"custom_logit_processor": '{"callable": "80"}'}, "custom_logit_processor"),
    ({"custom_logit_processor": ["a", "b"]}, "custom_logit_processor: 2 for 1"),
    ({"custom_logit_processor": "nobody"}, "logits_processors: there is no 'nobody'"),
    ({"sampling_params": [GREEDY, GREEDY]}, "sampling_params: 2 for 1"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params: n"),
    ({"lora_path": "x"}, "lora_path"), ({"lora_id": "x"}, "lora_id"),
    ({"image_data": ["x"]}, "image_data"),
    ({"return_hidden_states": True}, "return_hidden_states: needs --enable-return-hidden-states"),
    ({"sampling_params": {"hidden_states": [0]}}, "sampling_params.hidden_states: by the name of"),
    ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"token_ids_logprob": [1], "return_logprob": True, "logprob_start_len": 0},
     "token_ids_logprob"),
    ({"text": None, "input_ids": [10**9]}, "input_ids: token id"),
    ({"rid": ["a", "b"]}, "rid"), ({"text": ["a", "b"], "rid": ["a", "a"]}, "rid")])
def test_refusals_name_the_field(http: httpx.Client, change: dict[str, Any], word: str) -> None:
    for stream in (False, True):
        answer = http.post("/generate", json={"text": PROMPT, "stream": stream} | change)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(word), answer.text


def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    """As `sglang.bench_serving` sends them."""
    told = generate(http, text=PROMPT, lora_path=None, stream=None, image_data=[],
                    return_hidden_states=False, return_logprob=False, logprob_start_len=-1,
                    log_metrics=True, sampling_params=GREEDY | {
                        "ignore_eos": True, "n": None, "stop": None})
    assert told["meta_info"]["completion_tokens"] == 8


LONG = {"text": PROMPT, "sampling_params": {"max_new_tokens": 1800, "ignore_eos": True}}


def running(served: Served) -> int:
    """Requests in the engine."""
    actors = served.engine.client.status().actors
    return int(next(a for a in actors if a.role == "scheduler").gauges["running"])


def until(what: Any) -> None:
    late = monotonic() + 20
    while not what():
        assert monotonic() < late
        sleep(0.02)


@pytest.mark.parametrize("order", [{"abort_all": True}, {"rid": "long"}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_returns_its_part(served: Served, http: httpx.Client, stream: bool,
                                             order: dict[str, Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        ask = streamed if stream else generate
        calls = [pool.submit(ask, http, **LONG, rid=f"long_{i}") for i in range(3)]
        until(lambda: running(served) == 3)
        ended = http.post("/abort_request", json=order).json()["aborted"]
        found = [call.result() for call in calls]
    assert len(ended) == 3
    for told in (one[-1] for one in found) if stream else found:
        assert told["meta_info"]["finish_reason"]["type"] == "abort"
        assert told["meta_info"]["completion_tokens"] < 1800
    assert http.post("/abort_request", json=order).json() == {"aborted": []}
    until(lambda: running(served) == 0)


def test_one_of_several_is_aborted_alone(served: Served, http: httpx.Client) -> None:
    params = [LONG["sampling_params"], {"max_new_tokens": 4, "temperature": 0}]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: generate(http, text=["A", PROMPT], sampling_params=params,
                                            rid="pair"))
        until(lambda: running(served) > 0)
        assert http.post("/abort_request", json={"rid": "pair_0"}).json() == {
            "aborted": ["pair_0"]}
        long, short = call.result()
    assert long["meta_info"]["finish_reason"]["type"] == "abort"
    assert short["meta_info"]["finish_reason"]["type"] == "length"


def test_an_openai_request_is_aborted_by_its_id(served: Served, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1800, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        for more, headers in (({}, {"x-request-id": "plain"}), ({"request_id": "plain"}, {})):
            call = pool.submit(http.post, "/v1/completions", json=body | more, headers=headers)
            until(lambda: running(served) > 0)
            assert http.post("/abort_request", json={"rid": "cmpl-plain"}).json()["aborted"]
            assert call.result().status_code == 409
            until(lambda: running(served) == 0)


def test_info_and_flush(served: Served, http: httpx.Client) -> None:
    info = http.get("/get_model_info").json()
    assert info == http.get("/model_info").json()
    assert info["is_generation"] is True and info["model_path"] and info["tokenizer_path"]
    server = http.get("/get_server_info").json()
    assert server["version"] and isinstance(server["internal_states"], list)
    for method in ("GET", "POST"):
        assert "pages" in http.request(method, "/flush_cache").json()
