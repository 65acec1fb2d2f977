"""llama-server's own routes: what its clients send, over a whole engine and over a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from helpers_gateway import Served

from actorium.actors.gateway.api.llama_body import (
    ORDER,
    LlamaCompletionBody,
    active_samplers,
    sampler_names,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.params import SamplingParams

PROMPT = "Once upon a time there was a fox"
GREEDY = {"temperature": 0, "n_predict": 8}
FINAL = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted",
    "tokens_evaluated", "generation_settings", "prompt", "has_new_line", "truncated", "stop_type",
    "stopping_word", "tokens_cached", "timings"}
"""The fields of llama-server's answer."""


@pytest.fixture(scope="module")
def http(packaged: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=packaged.url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, path: str = "/completion", **body: Any) -> Any:
    answer = http.post(path, json={"prompt": PROMPT} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, **body: Any) -> list[Any]:
    """The events, behind which llama-server writes no mark."""
    text = http.post("/completion", json={"prompt": PROMPT, "stream": True} | body).text
    parts = text.split("\n\n")
    assert parts[-1] == "" and all(part.startswith("data: {") for part in parts[:-1]), text
    return [json.loads(part[6:]) for part in parts[:-1]]


def test_one_prompt(packaged: Served, http: httpx.Client) -> None:
    client = packaged.engine.client
    expected = client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8))
    answer = complete(http, **GREEDY, return_tokens=True)
    assert set(answer) == FINAL
    assert (answer["content"], answer["tokens"]) == (expected.text, expected.token_ids)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 8
    assert answer["tokens_evaluated"] == len(client.tokenize(PROMPT)) and not answer["truncated"]
    assert answer["prompt"] == PROMPT and answer["has_new_line"] == ("\n" in expected.text)
    timings = answer["timings"]
    assert timings["prompt_n"] == answer["tokens_evaluated"] - answer["tokens_cached"]
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] > 0
    assert answer["generation_settings"]["temperature"] == 0
    assert answer["generation_settings"]["n_predict"] == 8
    assert complete(http, **GREEDY)["tokens"] == []


def test_forms_of_prompts(packaged: Served, http: httpx.Client) -> None:
    client = packaged.engine.client
    ids, expected = client.tokenize(PROMPT), complete(http, **GREEDY)["content"]
    assert complete(http, prompt=ids, **GREEDY)["content"] == expected
    assert complete(http, prompt={"prompt_string": PROMPT}, **GREEDY)["content"] == expected
    mixed = complete(http, prompt=[*ids[:2], client.detokenize(ids[2:])], **GREEDY)
    assert (mixed["prompt"], mixed["content"]) == (PROMPT, expected)
    several = complete(http, prompt=[PROMPT, ids, ["A", *ids]], **GREEDY)
    assert [one["index"] for one in several] == [0, 1, 2]
    assert [one["content"] for one in several[:2]] == [expected] * 2
    assert complete(http, prompt=[PROMPT], **GREEDY)["content"] == expected
    choices = complete(http, prompt=["a", "b"], n_cmpl=2, seed=1, n_predict=4)
    assert [one["index"] for one in choices] == [0, 1, 2, 3]
    assert [one["prompt"] for one in choices] == ["a", "a", "b", "b"]


def test_a_stream_has_the_same_in_parts(http: httpx.Client) -> None:
    whole = complete(http, **GREEDY, return_tokens=True, n_probs=2)
    *parts, last = streamed(http, **GREEDY, n_probs=2, timings_per_token=True)
    assert "".join(one["content"] for one in parts) == whole["content"]
    assert [token for one in parts for token in one["tokens"]] == whole["tokens"]
    assert not any(one["stop"] for one in parts) and last["stop"]
    assert (last["content"], last["tokens"]) == ("", []) and set(last) == FINAL
    assert all(one["tokens_evaluated"] == whole["tokens_evaluated"] for one in parts)
    assert parts[-1]["tokens_predicted"] == parts[-1]["timings"]["predicted_n"] == 8
    assert "timings" not in streamed(http, **GREEDY)[0]
    shown = [one for part in parts for one in part["completion_probabilities"]]
    assert [one["id"] for one in shown] == whole["tokens"]
    assert all(len(one["completion_probabilities"]) == 1 for one in parts)
    first = whole["completion_probabilities"][0]
    assert first["token"].encode() == bytes(first["bytes"]) and len(first["top_logprobs"]) == 2
    assert first["logprob"] == pytest.approx(first["top_logprobs"][0]["logprob"])


def test_why_it_stops(http: httpx.Client) -> None:
    text = complete(http, **GREEDY)["content"]
    word = text.split()[2]
    found = complete(http, **GREEDY, stop=["nowhere", word])
    assert (found["stop_type"], found["stopping_word"]) == ("word", word)
    assert found["content"] == text[:text.index(word)]
    found = complete(http, grammar='root ::= "yes" | "no"')
    assert (found["stop_type"], found["content"] in ("yes", "no")) == ("eos", True)
    assert json.loads(complete(http, json_schema={"type": "boolean"})["content"]) in (True, False)
    full = complete(http, prompt=[5] * 4090, ignore_eos=True)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["tokens_predicted"] == 6


def test_nothing_but_the_prompt(http: httpx.Client) -> None:
    found = complete(http, n_predict=0)
    assert (found["content"], found["tokens_predicted"], found["stop_type"]) == ("", 0, "limit")
    assert found["tokens_evaluated"] > 0 and found["timings"]["predicted_n"] == 0
    (only,) = streamed(http, n_predict=0)
    assert only["stop"] and only["content"] == ""


def test_lines_with_too_little_indentation_end_it(http: httpx.Client) -> None:
    answers = {indent: complete(http, grammar='root ::= "a\\n  b\\n c"', n_indent=indent)
               for indent in (0, 1, 2, 3)}
    assert {indent: one["content"] for indent, one in answers.items()} == {
        0: "a\n  b\n c", 1: "a\n  b\n c", 2: "a\n  b", 3: "a"}
    assert answers[2]["stop_type"] == "limit" and answers[2]["stopping_word"] == ""


def test_time_ends_it_after_a_line(http: httpx.Client) -> None:
    lines = complete(http, n_predict=2000, t_max_predict_ms=1, logit_bias=[["\n", 50]])
    assert lines["stop_type"] == "limit" and 0 < lines["tokens_predicted"] < 2000
    assert lines["content"].startswith("\n")
    line = complete(http, n_predict=100, t_max_predict_ms=1, ignore_eos=True,
                    logit_bias=[["\n", False]])
    assert line["tokens_predicted"] == 100


def test_fields_of_the_answer_by_their_paths(http: httpx.Client) -> None:
    paths = ["content", "timings/prompt_n", "generation_settings/n_predict", "none/of/these"]
    found = complete(http, **GREEDY, response_fields=paths)
    assert list(found) == paths[:3] and found["generation_settings/n_predict"] == 8


def test_biases_in_all_forms(packaged: Served, http: httpx.Client) -> None:
    (token,) = packaged.engine.client.tokenize(" dog", False)
    for bias in ([[" dog", 90]], [[token, 90.5]], {" dog": 90}, {str(token): 90}):
        assert complete(http, n_predict=2, logit_bias=bias)["content"] == " dog dog"
    first = complete(http, **GREEDY, return_tokens=True)["tokens"][0]
    other = complete(http, **GREEDY, return_tokens=True, logit_bias=[[first, False]])
    assert first not in other["tokens"]
    assert other["generation_settings"]["logit_bias"] == [{"token": first, "bias": -100.0}]


def test_without_the_cache(http: httpx.Client) -> None:
    prompt = "A prompt of some pages. " * 20
    complete(http, prompt=prompt, n_predict=1)
    assert complete(http, prompt=prompt, n_predict=1)["tokens_cached"] > 0
    cold = complete(http, prompt=prompt, n_predict=1, cache_prompt=False)
    assert cold["tokens_cached"] == 0 and cold["timings"]["prompt_n"] == cold["tokens_evaluated"]


def test_what_editors_ask_for(http: httpx.Client) -> None:
    """The samplers of llama.vim and llama.vscode, of which one is passed over."""
    answer = http.post("/completion", json={
        "prompt": PROMPT, "n_predict": 4, "top_k": 40, "top_p": 0.9, "t_max_prompt_ms": 500,
        "samplers": ["top_k", "top_p", "infill"], "id_slot": 0})
    assert answer.headers["x-actorium-passed-over"] == "samplers.infill"
    settings = answer.json()["generation_settings"]
    assert settings["samplers"] == ["top_k", "top_p"] and settings["temperature"] == 1.0
    for penalty, shown in ((1.1, "repeat_last_n"), (1.0, None)):
        answer = http.post("/completion", json={
            "prompt": PROMPT, "n_predict": 1, "repeat_penalty": penalty, "repeat_last_n": 64})
        assert answer.headers.get("x-actorium-passed-over") == shown
        assert answer.json()["generation_settings"]["repeat_last_n"] == -1


def test_questions_about_the_server(packaged: Served, http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["total_slots"] == 16 and props["model_path"]
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert "messages" in props["chat_template"] and props["eos_token"] == "<|im_end|>"
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert http.post("/props", json={}).status_code == 501
    for order, sleeps in (("/sleep", True), ("/wake_up", False)):
        assert http.post(order).status_code == 200
        assert http.get("/props").json()["is_sleeping"] is sleeps
    slots = http.get("/slots?fail_on_no_slot=1").json()
    assert [one["id"] for one in slots] == list(range(16))
    assert slots[0]["n_ctx"] == 4096
    assert http.get("/lora-adapters").json() == []
    assert http.get("/health").json()["status"] == "ok"
    meta = http.get("/v1/models").json()["data"][0]["meta"]
    assert [meta[name] for name in ("n_vocab", "n_ctx", "n_ctx_train", "n_embd", "ftype")] == [
        1920, 4096, 4096, 256, "BF16"]
    assert 4e6 < meta["n_params"] < 6e6 and meta["size"] > meta["n_params"]
    shown = http.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert shown.json()["prompt"].endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    [vector], = (one["embedding"] for one in http.post("/embedding", json={"content": "a"}).json())
    plain = http.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]
    assert vector == pytest.approx(plain, abs=1e-2) and len(plain) == 256


def test_slots_say_how_many_sequences_run(http: httpx.Client) -> None:
    def running() -> int:
        return sum(one["is_processing"] for one in http.get("/slots").json())

    with http.stream("POST", "/completion", json={
            "prompt": PROMPT, "stream": True, "n_cmpl": 3, "ignore_eos": True}) as answer:
        next(answer.iter_raw())
        wait_until(lambda: running() >= 3)  # of the scheduler's last heartbeat
    wait_until(lambda: running() == 0)


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    until = monotonic() + seconds
    while not true():
        assert monotonic() < until
        sleep(0.05)


def test_special_tokens_as_text(packaged: Served, http: httpx.Client) -> None:
    special = "a<|im_end|>"
    ids = [http.post("/tokenize", json={"content": special, "parse_special": on}).json()["tokens"]
           for on in (True, False)]
    assert ids[0][-1] == 2 and 2 not in ids[1]
    assert packaged.engine.client.detokenize(ids[1]) == special


def test_a_bias_of_a_text_of_digits(http: httpx.Client) -> None:
    assert complete(http, n_predict=1, logit_bias={"9" * 5000: 1})["tokens_predicted"] == 1


def test_infill_without_the_tokens_for_it(http: httpx.Client) -> None:
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 501 and "no tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("body", "field"), [
    ({"typical_p": 0.5}, "typical_p"), ({"top_n_sigma": 1.5}, "top_n_sigma"),
    ({"xtc_probability": 0.1}, "xtc_probability"), ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ({"mirostat": 2}, "mirostat"), ({"dynatemp_range": 0.5}, "dynatemp_range"),
    ({"adaptive_target": 0.5}, "adaptive_target"), ({"min_keep": 2}, "min_keep"),
    ({"mirostat": "2"}, "mirostat"), ({"post_sampling_probs": True}, "post_sampling_probs"),
    ({"return_progress": True}, "return_progress"), ({"lora": [{"id": 0}]}, "lora"),
    ({"grammar_lazy": True}, "grammar_lazy"), ({"n_probs": 21}, "n_probs"),
    ({"samplers": ["top_k", "nope"]}, "samplers"), ({"samplers": "kz"}, "samplers"),
    ({"samplers": ["top_p", "top_p"], "top_p": 0.5}, "samplers"),
    ({"samplers": ["top_p", "temperature"], "top_p": 0.5}, "samplers"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 65}, "repeat_last_n"),
    ({"repeat_penalty": -1}, "repeat_penalty"), ({"n_predict": -2}, "n_predict"),
    ({"n_cmpl": 1000}, "n_cmpl"), ({"n_cmpl": 10**9}, "n_cmpl"), ({"n": 0}, "n"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [2**40]}, "prompt"), ({"prompt": [9999]}, "prompt"),
    ({"prompt": ["a", 1] * 300}, "prompt"), ({"logit_bias": [["a", 1]] * 1025}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 0}, "n_predict": -2}, "n_predict"), ({"top_k": 2**40}, "top_k"),
    ({"logit_bias": [[2**40, 1]]}, "logit_bias"), ({"response_fields": [1]}, "response_fields"),
    ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
    ({"prompt": [["a", [1]]]}, "prompt"), ({"prompt": [1] * 5000}, "prompt"),
    ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt"),
    ({"grammar": "root ::= ("}, "grammar"), ({"json_schema": {"type": "x"}}, "json_schema"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
    ({"logit_bias": [[1]]}, "logit_bias"), ({"logit_bias": [[1, True]]}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias"), ({"stream_options": {}}, "stream_options"),
    ({"n_indent": 10**6}, "n_indent"), ({"prompt": None}, "prompt")])
def test_what_is_refused_is_named(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = http.post("/completion", json={"prompt": "a", "n_predict": 1} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field, answer.text


@pytest.mark.parametrize("body", [
    {"typical_p": 1, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
     "dry_multiplier": 0, "dry_base": 1.75, "dry_penalty_last_n": -1, "mirostat": 0,
     "mirostat_tau": 5.0, "dynatemp_range": 0, "dynatemp_exponent": 1, "min_keep": 0,
     "adaptive_target": -1.0, "n_keep": 0, "repeat_penalty": 1.0, "repeat_last_n": 64, "lora": [],
     "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
                  "temperature"], "top_p": 1.0},
    {"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repeat_penalty": 1.1, "repeat_last_n": 0},
    {"samplers": [], "seed": -1}, {"samplers": "edkypmxt", "temperature": 0}])
def test_values_that_switch_samplers_off(http: httpx.Client, body: dict[str, Any]) -> None:
    assert complete(http, n_predict=1, **body)["tokens_predicted"] == 1


def body(**fields: Any) -> LlamaCompletionBody:
    return msgspec.convert({"prompt": "a"} | fields, LlamaCompletionBody)


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, {}), ({"samplers": []}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                                  "repetition_penalty": 1.0}),
    ({"samplers": "kt", "top_k": 5}, {"top_k": 5, "top_p": 1.0, "min_p": 0.0,
                                      "repetition_penalty": 1.0}),
    ({"samplers": ["temp", "top_k", "nucleus", "min_p", "penalties"], "temperature": -1.0,
      "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
    ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
    ({"repeat_penalty": 1.2, "repeat_last_n": 999}, {"repetition_penalty": 1.2})])
def test_samplers_that_are_not_listed_are_off(fields: Any, expected: Any) -> None:
    found = body(**fields).sampling({"top_k": 20, "temperature": 0.6}, 999)
    assert found == expected | {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize(("listed", "fine"), [
    (ORDER, True), (["top_k", "temperature", "top_p"], True), (["top_k", "min_p"], True),
    (["min_p", "top_k"], True), (["top_p", "top_k"], False), (["min_p", "top_p"], False),
    (["temperature", "penalties"], False), (["top_k", "penalties"], False),
    (["min_p", "temperature"], False), (["dry", "top_p", "xtc", "min_p"], True)])
def test_another_order_is_refused_where_it_gives_another_answer(listed: list[str], fine: bool
                                                                ) -> None:
    fields = {"samplers": list(listed), "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
              "repeat_penalty": 1.1}
    if fine:
        body(**fields).sampling({}, 99)
        return
    with pytest.raises(HttpError, match="another answer"):
        body(**fields).sampling({}, 99)


def test_which_samplers_do_something() -> None:
    assert active_samplers({"top_k": -1, "top_p": 1.0, "temperature": 1.0}) == []
    assert active_samplers({"top_k": 3, "presence_penalty": 0.5, "min_p": 0.1, "temperature": 0}) \
        == ["penalties", "temperature", "top_k", "min_p"]
    assert sampler_names("kpi") == ["top_k", "top_p", "infill"]
