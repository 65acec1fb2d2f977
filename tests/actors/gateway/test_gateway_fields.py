"""What the fields of chats and completions ask of the engine, and how their answers look."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app

from actorium.actors.client.requests import Request
from actorium.actors.errors import context_overflow
from actorium.actors.params import Structured

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "How is it?"}
BEGUN = {"role": "assistant", "content": "It is"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>'
FUNCTION = {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}}}


def post(monkeypatch: pytest.MonkeyPatch, script: Scripted, path: str, body: dict[str, Any]
         ) -> tuple[int, Any]:
    """(status, what came: the JSON, or the events of a stream)."""
    app = scripted_app(monkeypatch, script)
    least: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "How is it?"}

    async def ask() -> tuple[int, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                     base_url="http://gateway") as client:
            answer = await client.post(path, json=least | body)
        if not body.get("stream") or answer.status_code != 200:
            return answer.status_code, answer.json()
        return 200, [json.loads(one.removeprefix("data: "))
                     for one in answer.text.split("\n\n")[:-2]]

    return asyncio.run(ask())


def asked(monkeypatch: pytest.MonkeyPatch, path: str, **body: Any) -> Request:
    """What the engine is asked."""
    script = Scripted(["a"])
    status, answer = post(monkeypatch, script, path, body)
    assert status == 200, answer
    return script.asked[0]


def refused(monkeypatch: pytest.MonkeyPatch, path: str, **body: Any) -> str:
    """The field that is named, of the refusal."""
    status, answer = post(monkeypatch, Scripted(["a"]), path, body)
    assert status == 400, answer
    return str(answer["error"]["param"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_parameters_of_sampling(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    given: dict[str, Any] = {"stop_regex": "a+", "allowed_token_ids": [1, 2], "bad_words": ["x"],
                             "min_tokens": 3, "n": 2, "deterministic": True, "max_tokens": 9,
                             "logit_bias": {"5": 1}}
    params = asked(monkeypatch, path, **given, best_of=2, no_stop_trim=True).params
    assert params is not None and params.logit_bias == {5: 1.0}
    assert {name: getattr(params, name) for name in given if name != "logit_bias"} == \
        {name: value for name, value in given.items() if name != "logit_bias"}
    assert params.include_stop_str_in_output
    params = asked(monkeypatch, path, logprob_token_ids=[7, 8]).params
    assert params is not None and (params.logprob_token_ids, params.logprobs) == ([7, 8], 0)
    assert refused(monkeypatch, path, best_of=3) == "best_of"
    assert refused(monkeypatch, path, logit_bias={"x": 1}) == "logit_bias"
    params = asked(monkeypatch, path).params
    assert params is not None and params.max_tokens == (None if path == CHAT else 16)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("body", "want"), [
    ({"n_predict": 7}, 7), ({"n_predict": -1}, None), ({"n_predict": 7, "max_tokens": 3}, 3)])
def test_names_of_llama_server(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
                               want: int | None) -> None:
    params = asked(monkeypatch, path, repeat_penalty=1.5, **body).params
    assert params is not None and (params.max_tokens, params.repetition_penalty) == (want, 1.5)


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"max_tokens": -1}), (TEXT, {"max_tokens": -1}), (CHAT, {"max_completion_tokens": -1}),
    (CHAT, {"max_completion_tokens": -1, "max_tokens": 5}), (CHAT, {"max_tokens": -1.0}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": -1, "prompt": None})])
def test_minus_one_is_no_limit(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
                               ) -> None:
    params = asked(monkeypatch, path, **body).params
    assert params is not None and params.max_tokens is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_parameters_of_the_request(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    request = asked(monkeypatch, path, truncate_prompt_tokens=5, cache_salt="s", priority=2)
    assert (request.truncate_prompt_tokens, request.cache_salt, request.priority) == (5, "s", 2)


def test_how_a_chat_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(monkeypatch, CHAT)
    assert request.add_generation_prompt and not request.continue_final_message
    for body in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        request = asked(monkeypatch, CHAT, messages=[USER, BEGUN], continue_final_message=True,
                        **body)
        assert not request.add_generation_prompt and request.continue_final_message
    request = asked(monkeypatch, CHAT, messages=[USER, BEGUN | {"prefix": True}])  # Mistral's
    assert not request.add_generation_prompt and request.continue_final_message
    for wrong in ([BEGUN | {"prefix": True}, USER], [USER | {"prefix": True}]):
        assert refused(monkeypatch, CHAT, messages=wrong) == "messages"
    assert not asked(monkeypatch, CHAT, add_generation_prompt=False).add_generation_prompt
    assert refused(monkeypatch, CHAT, continue_final_message=True,
                   add_generation_prompt=True) == "continue_final_message"


def test_template_variables_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, CHAT, chat_template="{{ 1 }}").chat_template == "{{ 1 }}"
    assert asked(monkeypatch, CHAT, reasoning_effort="low", documents=[{"text": "t"}]
                 ).template_args == {"reasoning_effort": "low", "documents": [{"text": "t"}]}
    args = asked(monkeypatch, CHAT, reasoning_effort="none").template_args
    assert args["enable_thinking"] is False
    args = asked(monkeypatch, CHAT, reasoning_effort="none",
                 chat_template_kwargs={"enable_thinking": True}).template_args
    assert args["enable_thinking"] is True


TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
FORMAT = {"type": "const_string", "value": "a"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("body", "want"), [
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"grammar": "", "regex": None}, None),
    ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
      "structured_outputs": {"additional_properties": True}},
     {"json_schema": SCHEMA, "additional_properties": True}),
    ({"structured_outputs": {"json": SCHEMA, "additional_properties": True}},
     {"json_schema": SCHEMA, "additional_properties": True}),
    ({"structured_outputs": {"regex": "a", "additional_properties": True}}, ValueError),
    ({"structured_outputs": {"json": SCHEMA, "lenient": True}},
     {"json_schema": SCHEMA, "lenient": True}),
    ({"guided_json": SCHEMA, "structured_outputs": {"lenient": True}},
     {"json_schema": SCHEMA, "lenient": True}),
    ({"structured_outputs": {"choice": ["a"], "lenient": True}}, ValueError),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "schema": SCHEMA, "lenient": True}}}, {"json_schema": SCHEMA, "lenient": True}),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "schema": SCHEMA, "strict": False}}}, {"json_schema": SCHEMA, "lenient": True}),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "schema": SCHEMA, "strict": True}}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"additional_properties": True}}, ValueError),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, ValueError),
    ({"response_format": {"type": "structural_tag"} | TAG}, {"structural_tag": TAG}),
    ({"response_format": {"type": "structural_tag", "format": FORMAT}},
     {"structural_tag": {"type": "structural_tag", "format": FORMAT}}),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, {"structural_tag": TAG}),
    ({"response_format": {"type": "structural_tag"}}, ValueError)])
def test_formats(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
                 want: Any) -> None:
    if want is ValueError:
        assert refused(monkeypatch, path, **body) in body
        return
    params = asked(monkeypatch, path, **body).params
    assert params is not None
    texts = {name: json.dumps(value) if name in ("json_schema", "structural_tag") else value
             for name, value in (want or {}).items()}
    assert params.structured == (None if want is None else Structured(**texts))


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_may_begin_with_what_it_continues(monkeypatch: pytest.MonkeyPatch,
                                                 stream: bool) -> None:
    for body, want in (({"continue_final_message": True, "echo": True}, "It is fine"),
                       ({"continue_final_message": True}, " fine"),
                       ({"echo": True, "messages": [BEGUN, USER]}, " fine")):
        ask = {"messages": [USER, BEGUN], "stream": stream, "n": 2} | body
        _, answer = post(monkeypatch, Scripted([" fine", " fine"]), CHAT, ask)
        said = ["", ""]
        for chunk in answer if stream else [answer]:
            for choice in chunk["choices"]:
                part = choice["delta"] if stream else choice["message"]
                said[choice["index"]] += part.get("content") or ""
                assert part.get("role", "assistant") == "assistant"
        assert said == [want, want]


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids"])
def test_token_ids_of_a_chat(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    script = Scripted(["one two"])
    _, whole = post(monkeypatch, script, CHAT, {field: True, "truncate_prompt_tokens": 2})
    assert whole["prompt_token_ids"] == script.asked[0].prompt == script.prompt_ids[-2:]
    assert script.asked[0].messages is None
    assert (whole["choices"][0]["token_ids"] is not None) is (field == "return_token_ids")
    _, chunks = post(monkeypatch, Scripted(["one two"]), CHAT, {field: True, "stream": True})
    assert chunks[0]["prompt_token_ids"] == script.prompt_ids
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    ids = [one for chunk in chunks for choice in chunk["choices"]
           for one in choice.get("token_ids") or ()]
    assert bool(ids) is (field == "return_token_ids")


def test_token_ids_of_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(["one", "two"])
    _, chunks = post(monkeypatch, script, TEXT, {"return_token_ids": True, "stream": True, "n": 2})
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen[choice["index"]].append(choice["prompt_token_ids"])
            assert choice["token_ids"]
    for found in seen.values():
        assert found[0] == script.prompt_ids and not any(found[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_answered_in_their_own_shape(monkeypatch: pytest.MonkeyPatch,
                                                   stream: bool) -> None:
    script = Scripted([CALL], template=HERMES)
    earlier = [USER, {"role": "assistant", "content": None, "function_call": {
        "name": "weather", "arguments": "{}"}}, {"role": "function", "name": "weather",
                                                 "content": "rain"}]
    _, answer = post(monkeypatch, script, CHAT, {"messages": earlier, "functions": [FUNCTION],
                                                 "stream": stream})
    request = script.asked[0]
    assert request.tools[0]["function"]["name"] == "weather" and request.messages is not None
    assert [turn.role for turn in request.messages] == ["user", "assistant", "tool"]
    assert request.messages[1].tool_calls[0].name == "weather"
    calls, ends = {"name": "", "arguments": ""}, []
    for chunk in answer if stream else [answer]:
        [choice] = chunk["choices"]
        part = choice["delta"] if stream else choice["message"]
        assert not part.get("tool_calls")
        for name, text in (part.get("function_call") or {}).items():
            calls[name] += text
        ends.append(choice["finish_reason"])
    assert calls["name"] == "weather" and json.loads(calls["arguments"]) == {"place": "Riga"}
    assert ends[-1] == "function_call"


def test_a_function_may_be_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"functions": [FUNCTION], "function_call": {"name": "weather"}}
    params = asked(monkeypatch, CHAT, **named).params
    assert params is not None and params.structured == Structured(
        json_schema=json.dumps(FUNCTION["parameters"]))
    assert asked(monkeypatch, CHAT, functions=[FUNCTION], function_call="none").tools == []
    assert refused(monkeypatch, CHAT, functions=[FUNCTION], tools=[]) == "functions"
    assert refused(monkeypatch, CHAT, functions=[FUNCTION],
                   function_call={"name": "x"}) == "function_call"


def test_a_continued_thought_is_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0].content }}<think>"
    ask = {"messages": [USER, {"role": "assistant", "content": "<think>well"}],
           "continue_final_message": True}
    _, answer = post(monkeypatch, Scripted([", so</think>Yes."], template=template), CHAT, ask)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (", so", "Yes.")
    ask["messages"] = [USER, BEGUN]
    _, answer = post(monkeypatch, Scripted([" fine."], template=template), CHAT, ask)
    assert answer["choices"][0]["message"]["content"] == " fine."


def test_fields_that_clients_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, answer = post(monkeypatch, Scripted(["a"]), CHAT, {})
    assert {"system_fingerprint", "service_tier", "usage", "model", "created"} <= set(answer)
    assert answer["choices"][0]["message"]["refusal"] is None
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    _, answer = post(monkeypatch, Scripted(["a"]), TEXT, {})
    assert "system_fingerprint" in answer and answer["object"] == "text_completion"


@pytest.mark.parametrize(("path", "body", "param"), [
    (CHAT, {"reasoning_effort": "extreme"}, "reasoning_effort"),
    (CHAT, {"cache_salt": ""}, "cache_salt"), (TEXT, {"cache_salt": ""}, "cache_salt"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (TEXT, {"logprobs": 21}, "logprobs"), (TEXT, {"truncation_side": "up"}, "truncation_side")])
def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
                                param: str) -> None:
    assert refused(monkeypatch, path, **body) == param


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_prompt_may_lose_its_end(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    request = asked(monkeypatch, path, truncate_prompt_tokens=2, truncation_side="right")
    assert request.prompt == Scripted.prompt_ids[:2]
    assert asked(monkeypatch, path, truncate_prompt_tokens=2,
                 truncation_side="left").truncate_prompt_tokens == 2


def test_named_tokens_replace_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    params = asked(monkeypatch, CHAT, logprobs=True, top_logprobs=3, logprob_token_ids=[4]).params
    assert params is not None and (params.logprobs, params.logprob_token_ids) == (0, [4])


@pytest.mark.parametrize(("path", "body", "field"), [
    (CHAT, {"max_tokens": 64_000}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 64_000}, "max_completion_tokens"),
    (TEXT, {"n_predict": 64_000}, "n_predict"),
    ("/v1/responses", {"input": "Hi", "prompt": None, "max_output_tokens": 64_000},
     "max_output_tokens")])
def test_a_limit_that_does_not_fit_is_called_as_it_was_given(
        monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str) -> None:
    async def refuse(self: Scripted, requests: list[Request]) -> Any:
        raise context_overflow(8192, 33, 64_000, "max_tokens")
        yield

    monkeypatch.setattr(Scripted, "run", refuse)
    status, answer = post(monkeypatch, Scripted(["a"]), path, body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, field, "context_length_exceeded")
    assert error["message"] == (
        f"{field}: This model's maximum context length is 8192 tokens. However, you requested "
        "64033 tokens (33 in the messages, 64000 in the completion).")
