"""`/v1/chat/completions`: messages in all their forms, templates, what an answer looks like."""

from __future__ import annotations

from typing import Any

import pytest
from wire import CHAT, QUESTION, TELL, Json, Server, chat, deltas

pytestmark = pytest.mark.conformance
USER = {"role": "user", "content": QUESTION}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CALL = {"id": "call_1", "type": "function",
        "function": {"name": "look", "arguments": '{"at": "sky"}'}}
PREFILL = {"role": "assistant", "content": "The capital of France"}


def prompt_ids(server: Server, messages: Any, **more: Any) -> list[int]:
    """What the model reads."""
    found: list[int] = server.chat(messages, max_tokens=1, return_token_ids=True,
                                   **more)["prompt_token_ids"]
    return found


def prompt_text(server: Server, messages: Any, **more: Any) -> str:
    """The same as text, special tokens and all."""
    return server.detokenize(prompt_ids(server, messages, **more))


def test_the_shape_of_an_answer(server: Server) -> None:
    found = server.chat(max_tokens=5)
    assert found["id"].startswith("chatcmpl-") and found["object"] == "chat.completion"
    assert isinstance(found["created"], int) and found["model"] == server.model
    (choice,) = found["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert not choice["message"].get("tool_calls")
    usage = found["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


@pytest.mark.models("smollm2")
def test_it_knows_the_capital_of_france(server: Server) -> None:
    found = server.chat(max_tokens=30)["choices"][0]
    assert "Paris" in found["message"]["content"] and found["finish_reason"] == "stop"


CONVERSATIONS: dict[str, list[Json]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Paris."},
              {"role": "user", "content": "Why?"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "What is "},
                                           {"type": "text", "text": "1+1?"}]}],
    "system parts": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, USER],
    "name": [USER | {"name": "anna"}],
    "unknown field": [USER | {"extra_field": "0"}],
    "custom role": [{"role": "my-custom-role", "content": "what is 1+1?"}],
    "tool turn": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                  {"role": "tool", "tool_call_id": "call_1", "content": "blue"}],
    "tool turn without content": [USER, {"role": "assistant", "tool_calls": [CALL]},
                                  {"role": "tool", "tool_call_id": "call_1", "content": "blue"}],
    "tool content in parts": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                              {"role": "tool", "tool_call_id": "call_1",
                               "content": [{"type": "text", "text": "blue"}]}],
    "nulls": [USER | {"name": None, "tool_calls": None, "tool_call_id": None}],
    "refusal": [USER, {"role": "assistant", "content": "No.", "refusal": None},
                {"role": "user", "content": "Please."}],
    "assistant last": [USER, {"role": "assistant", "content": "Paris."}],
    "two users": [USER, USER],
    "empty content": [{"role": "user", "content": ""}],
    "system alone": [SYSTEM],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(server: Server, name: str) -> None:
    found = server.chat(CONVERSATIONS[name], max_tokens=3)
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["usage"]["completion_tokens"] >= 1


def test_parts_are_joined(server: Server) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert prompt_ids(server, parts) == prompt_ids(server, [USER])


def test_a_custom_role_in_both_forms(server: Server) -> None:
    text = [{"role": "my-custom-role", "content": "what is 1+1?"}]
    parts = [{"role": "my-custom-role", "content": [{"type": "text", "text": "what is 1+1?"}]}]
    assert prompt_ids(server, text) == prompt_ids(server, parts)
    assert "my-custom-role" in prompt_text(server, text)


@pytest.mark.parametrize("given,want", [
    ({"max_tokens": 3}, 3), ({"max_completion_tokens": 4, "max_tokens": None}, 4),
    ({"max_completion_tokens": 4, "max_tokens": 9}, 4), ({"max_completion_tokens": None,
                                                          "max_tokens": 5}, 5)],
    ids=["max_tokens", "max_completion_tokens", "both", "null"])
def test_how_many_tokens(server: Server, given: Json, want: int) -> None:
    found = server.chat(**given, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == want


def test_no_limit_goes_on_to_its_end(server: Server) -> None:
    body = chat("Say hi.", stop=["\n", ".", "!"])
    del body["max_tokens"]
    assert server.post(CHAT, body).ok()["choices"][0]["finish_reason"] == "stop"


def test_several_choices(server: Server) -> None:
    found = server.chat(TELL, n=3, temperature=1.0, seed=7, max_tokens=12)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert len({one["message"]["content"] for one in found["choices"]}) > 1
    assert found["usage"]["completion_tokens"] >= 3


def test_the_prompt_of_the_template(server: Server) -> None:
    text = prompt_text(server, [SYSTEM, USER])
    assert SYSTEM["content"] in text and QUESTION in text
    assert text.rstrip("\n").endswith("<|im_start|>assistant")


def test_without_a_generation_prompt(server: Server) -> None:
    with_it = prompt_text(server, [USER])
    without = prompt_text(server, [USER], add_generation_prompt=False)
    assert with_it.startswith(without) and "assistant" in with_it[len(without):]


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}], ids=["alone", "explicit"])
def test_the_final_message_goes_on(server: Server, more: Json) -> None:
    text = prompt_text(server, [USER, PREFILL], continue_final_message=True, **more)
    assert text.endswith(PREFILL["content"])


@pytest.mark.models("smollm2")
def test_what_a_prefill_leads_to(server: Server) -> None:
    found = server.chat([USER, PREFILL], continue_final_message=True, max_tokens=8)
    content = found["choices"][0]["message"]["content"]
    assert "Paris" in content and not content.startswith(PREFILL["content"])


def test_a_prefill_in_parts(server: Server) -> None:
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": "The capital "},
                                                     {"type": "text", "text": "of France"}]}]
    assert prompt_text(server, parts, continue_final_message=True).endswith(PREFILL["content"])


def test_continuing_and_beginning_exclude_each_other(server: Server) -> None:
    body = chat([USER, PREFILL], continue_final_message=True, add_generation_prompt=True)
    server.post(CHAT, body).error(400, "continue_final_message")


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_echo(server: Server, streamed: bool) -> None:
    body = chat([USER, PREFILL], continue_final_message=True, add_generation_prompt=False)
    plain = server.post(CHAT, body).ok()["choices"][0]["message"]["content"]
    body |= {"echo": True}
    found = (deltas(server.stream(CHAT, body)) if streamed else
             server.post(CHAT, body).ok()["choices"][0]["message"]["content"])
    assert found == PREFILL["content"] + plain


def test_a_template_of_the_request(server: Server) -> None:
    ids = prompt_ids(server, [USER], chat_template="{{ messages[0]['content'] }} ->")
    assert server.detokenize(ids) == f"{QUESTION} ->"


def test_arguments_of_a_template(server: Server) -> None:
    ids = prompt_ids(server, [USER], chat_template="{{ mood }}: {{ messages[0].content }}",
                     chat_template_kwargs={"mood": "glad"})
    assert server.detokenize(ids) == f"glad: {QUESTION}"


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no') }}",
                                      "{{ ''.__class__.__mro__ }}"],
                         ids=["syntax", "raises", "escape"])
def test_a_template_that_fails_is_refused(server: Server, template: str) -> None:
    server.post(CHAT, chat(chat_template=template)).error(400)
    assert server.chat(max_tokens=1)["choices"]


@pytest.mark.parametrize("level", ["none", "minimal", "low", "medium", "high"])
def test_efforts_are_taken(server: Server, level: str) -> None:
    assert server.chat(reasoning_effort=level, max_tokens=1)["choices"]


def test_the_effort_reaches_the_template(server: Server) -> None:
    ids = prompt_ids(server, [USER], reasoning_effort="low",
                     chat_template="effort={{ reasoning_effort }}")
    assert server.detokenize(ids) == "effort=low"


def test_an_unknown_effort_is_refused(server: Server) -> None:
    server.post(CHAT, chat(reasoning_effort="extreme")).error(400, "reasoning_effort")


def test_a_salt_keeps_caches_apart(server: Server) -> None:
    def cached(salt: str) -> int:
        used = server.chat("Salt. " + QUESTION * 12, cache_salt=salt)["usage"]
        found: int = used["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("one") == 0 < cached("one")
    assert cached("other") == 0


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
def test_a_bad_salt_is_refused(server: Server, salt: Any) -> None:
    server.post(CHAT, chat(cache_salt=salt)).error(400, "cache_salt")


def test_ids_are_told_when_asked(server: Server) -> None:
    found = server.chat(return_token_ids=True)
    assert QUESTION in server.detokenize(found["prompt_token_ids"])
    assert len(found["prompt_token_ids"]) == found["usage"]["prompt_tokens"]
    content = found["choices"][0]["message"]["content"]
    assert server.detokenize(found["choices"][0]["token_ids"]).startswith(content)
    quiet = server.chat()
    assert quiet.get("prompt_token_ids") is None
    assert quiet["choices"][0].get("token_ids") is None


def test_ids_are_told_in_a_stream(server: Server) -> None:
    want = server.chat(return_token_ids=True)
    chunks = server.stream(CHAT, chat(return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == want["prompt_token_ids"]
    assert not any(one.get("prompt_token_ids") for one in chunks[1:])
    told = [id_ for one in chunks for choice in one["choices"]
            for id_ in choice.get("token_ids") or []]
    assert told == want["choices"][0]["token_ids"]


def test_prompt_ids_alone(server: Server) -> None:
    found = server.chat(return_prompt_token_ids=True)["choices"][0]
    assert QUESTION in server.detokenize(found["prompt_token_ids"])


def test_a_truncated_conversation(server: Server) -> None:
    whole = prompt_ids(server, [SYSTEM, USER])
    assert prompt_ids(server, [SYSTEM, USER], truncate_prompt_tokens=6) == whole[-6:]


HARMLESS: list[Json] = [
    {"user": "anna"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"},
    {"parallel_tool_calls": True}, {"modalities": ["text"]}, {"prediction": None},
    {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"verbosity": "low"},
    {"some_router_field": 1}, {"priority": 0}, {"request_id": "mine"},
    {"skip_special_tokens": False}, {"spaces_between_special_tokens": True},
    {"add_special_tokens": False}, {"include_reasoning": True}, {"tools": []},
    {"response_format": {"type": "text"}}, {"logit_bias": {}}, {"stop": []}, {"bad_words": []},
    {"stop_token_ids": []}, {"chat_template_kwargs": {}}, {"documents": []},
    {"use_beam_search": False}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0}, {"top_p": 1},
    {"repetition_penalty": 1}, {"length_penalty": 1.0}, {"mm_processor_kwargs": None},
]


@pytest.mark.parametrize("more", HARMLESS, ids=lambda more: str(more)[1:-1].replace("'", ""))
def test_fields_that_change_nothing_here(server: Server, more: Json) -> None:
    want = server.chat(max_tokens=3)["choices"][0]["message"]["content"]
    assert server.chat(max_tokens=3, **more)["choices"][0]["message"]["content"] == want
