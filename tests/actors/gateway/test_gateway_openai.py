"""Fields of chats and completions over a whole engine: what was asked for is what comes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from helpers_gateway import Scripted, Served, scripted_client

USER: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
BEGUN: list[Any] = [*USER, {"role": "assistant", "content": "Once upon a time, a fox"}]


@pytest.fixture(scope="module")
def served(packaged: Served) -> Served:
    return packaged


def chat(served: Served, **body: Any) -> Any:
    own = {name: body.pop(name) for name in ("messages", "stream", "logprobs", "n")
           if name in body}
    return served.client.chat.completions.create(
        model="demo", max_tokens=body.pop("max_tokens", 8), temperature=0,
        **({"messages": USER} | own), extra_body=body)


def text(served: Served, prompt: Any = "Once upon a time", **body: Any) -> Any:
    own = {name: body.pop(name) for name in ("stream", "logprobs", "n", "echo") if name in body}
    return served.client.completions.create(
        model="demo", prompt=prompt, max_tokens=body.pop("max_tokens", 8), temperature=0, **own,
        extra_body={"ignore_eos": True} | body)


def test_a_final_message_is_continued(served: Served) -> None:
    ask: dict[str, Any] = {"messages": BEGUN, "continue_final_message": True, "ignore_eos": True}
    whole, begun = chat(served, echo=True, **ask), chat(served, **ask)
    said = begun.choices[0].message.content
    assert said and whole.choices[0].message.content == BEGUN[1]["content"] + said
    ids = served.engine.client.tokenize_chat(BEGUN, add_generation_prompt=False,
                                             continue_final_message=True)
    assert begun.usage.prompt_tokens == len(ids)
    stream = chat(served, echo=True, stream=True, **ask)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == \
        whole.choices[0].message.content


def test_prompt_token_ids_are_returned(served: Served) -> None:
    want = served.engine.client.tokenize_chat(USER)
    whole = chat(served, return_token_ids=True)
    assert whole.prompt_token_ids == want
    assert len(whole.choices[0].token_ids) == whole.usage.completion_tokens
    chunks = list(chat(served, return_token_ids=True, stream=True))
    assert chunks[0].prompt_token_ids == want
    assert [token for c in chunks for token in getattr(c.choices[0], "token_ids", None) or ()] == \
        whole.choices[0].token_ids
    cut = chat(served, return_token_ids=True, truncate_prompt_tokens=4)
    assert cut.prompt_token_ids == want[-4:] and cut.usage.prompt_tokens == 4
    assert chat(served, truncate_prompt_tokens=4).usage.prompt_tokens == 4


def test_a_request_may_bring_its_template(served: Served) -> None:
    found = chat(served, chat_template="{{ messages[0].content }}!", return_token_ids=True)
    assert found.prompt_token_ids == served.engine.client.tokenize(
        USER[0]["content"] + "!", add_special_tokens=False)


def test_tokens_are_called_by_their_ids(served: Served) -> None:
    named = chat(served, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True,
                 return_token_ids=True).choices[0]
    assert [one.token for one in named.logprobs.content] == \
        [f"token_id:{token}" for token in named.token_ids]
    plain = chat(served, logprobs=True, top_logprobs=2).choices[0]
    assert [one.bytes for one in plain.logprobs.content] == \
        [one.bytes for one in named.logprobs.content]
    found = text(served, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = found.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert choice.logprobs.text_offset == text(served, logprobs=1).choices[0].logprobs.text_offset


def test_offsets_do_not_depend_on_how_an_answer_is_cut(served: Served) -> None:
    """Of tokens that the text is without."""
    [eos] = served.engine.client.server_info()["eos_ids"][:1]
    ask: dict[str, Any] = {"logprobs": 1, "logit_bias": {str(eos): 100}}
    choice = text(served, **ask).choices[0]
    offsets = [offset for chunk in text(served, stream=True, **ask) for one in chunk.choices
               for offset in (one.logprobs.text_offset if one.logprobs else ())]
    assert choice.text == "" and len(set(choice.logprobs.tokens)) == 1
    assert offsets == choice.logprobs.text_offset


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_echo_logprobs_equal_the_whole_answers(served: Served, n: int
                                                                    ) -> None:
    ask: dict[str, Any] = {"echo": True, "logprobs": 2, "n": n}
    whole = text(served, **ask)
    found: list[Any] = [{"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [],
                         "text_offset": []} for _ in range(n)]
    for chunk in text(served, stream=True, **ask):
        for choice in chunk.choices:
            mine = found[choice.index]
            mine["text"] += choice.text
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                mine[name] += getattr(choice.logprobs, name) if choice.logprobs else []
    for choice in whole.choices:
        mine = found[choice.index]
        assert mine["text"] == choice.text
        assert mine["tokens"] == choice.logprobs.tokens
        assert mine["text_offset"] == choice.logprobs.text_offset
        assert mine["token_logprobs"][0] is None is choice.logprobs.token_logprobs[0]
        assert mine["token_logprobs"][1:] == pytest.approx(
            choice.logprobs.token_logprobs[1:], abs=1e-3)
        assert "".join(mine["tokens"]) == choice.text


def test_a_prompt_alone_in_a_stream(served: Served) -> None:
    ask: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
    [chunk] = text(served, stream=True, **ask)
    whole = text(served, **ask)
    assert chunk.choices[0].text == whole.choices[0].text == "Once upon a time"
    assert chunk.choices[0].logprobs == whole.choices[0].logprobs
    assert whole.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_ends_by_its_length(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Whatever the one token would be that the engine makes all the same."""
    client = scripted_client(monkeypatch, Scripted(["x"]))
    answer = asyncio.run(client._client.post("http://gateway/v1/completions", json={
        "prompt": "a", "echo": True, "max_tokens": 0, "stream": stream}))
    assert '"finish_reason":"length"' in answer.text and '"stop"' not in answer.text


def test_tokens_allowed_and_bad_words(served: Served) -> None:
    allowed = served.engine.client.tokenize("fox", add_special_tokens=False)
    found = text(served, allowed_token_ids=allowed, return_token_ids=True)
    assert set(found.choices[0].token_ids) <= set(allowed)
    plain = text(served).choices[0].text
    word = plain.split()[0]
    assert word not in text(served, bad_words=[word]).choices[0].text.split()


def test_schemas_as_other_engines_write_them(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}
    for body in ({"response_format": {"type": "json_object", "schema": schema}},
                 {"json_schema": schema}):
        found = json.loads(chat(served, max_tokens=60, **body).choices[0].message.content)
        assert isinstance(found["a"], bool)
    assert chat(served, grammar='root ::= "yes" | "no"').choices[0].message.content in ("yes", "no")


def test_more_choices_than_the_engine_allows(served: Served) -> None:
    assert len(chat(served, n=64, max_tokens=1).choices) == 64
    with pytest.raises(openai.BadRequestError) as caught:
        chat(served, n=129)
    assert caught.value.param == "n"


def test_an_expression_ends_a_completion(served: Served) -> None:
    plain = text(served, max_tokens=40).choices[0].text
    found = text(served, max_tokens=40, stop_regex="[aeiou]").choices[0]
    assert found.finish_reason == "stop" and plain.startswith(found.text)
    assert not set(found.text) & set("aeiou")


def test_log_probabilities_of_named_tokens(served: Served) -> None:
    found = chat(served, logprob_token_ids=[5, 9], return_tokens_as_token_ids=True)
    for one in found.choices[0].logprobs.content:
        assert {"token_id:5", "token_id:9"} <= {top.token for top in one.top_logprobs}


def test_tagged_parts_follow_their_schema(served: Served) -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "as said"}}
    assert chat(served, response_format=tag, max_tokens=60).choices[0].message.content == "as said"


def test_objects_are_closed_unless_additional_properties_are_allowed(served: Served) -> None:
    schema = {"type": "object", "properties": {}, "minProperties": 1}
    with pytest.raises(openai.BadRequestError):
        chat(served, json_schema=schema)
    found = chat(served, json_schema=schema, max_tokens=200, logit_bias=None,
                 structured_outputs={"additional_properties": True})
    assert found.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(("body", "param"), [
    ({"guided_regex": "("}, "guided_regex"), ({"grammar": "root = ???"}, "grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
     "response_format"), ({"structured_outputs": {"choice": ["a"], "regex": "b"}},
                          "structured_outputs"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "hiccup"}}}],
      "tool_choice": "required"}, "tools")])
def test_a_wrong_format_is_named_as_it_was_written(served: Served, body: dict[str, Any],
                                                   param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(served, stream=stream, **body)
        assert caught.value.param == param and caught.value.message.find(param) >= 0
        if param != "tools":
            with pytest.raises(openai.BadRequestError) as caught:
                text(served, stream=stream, **body)
            assert caught.value.param == param


def test_documents_go_to_the_template(served: Served) -> None:
    template = "{% for one in documents %}{{ one.text }} {% endfor %}!"
    found = chat(served, chat_template=template, documents=[{"text": "a"}, {"text": "b"}],
                 return_token_ids=True)
    assert found.prompt_token_ids == served.engine.client.tokenize("a b !", False)
