"""`/tokenize` and `/detokenize`, and `/render`: what a prompt becomes before it is run."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from wire import CHAT, COMPLETIONS, QUESTION, STORY, Json, Server, chat, completion

pytestmark = pytest.mark.conformance
USER = {"role": "user", "content": "Hi there!"}
TURNS = [USER, {"role": "assistant", "content": "Nice to meet you!"},
         {"role": "user", "content": "Can I ask a question? vllm1"}]
SURE = {"role": "assistant", "content": "Sure,"}
TEXTS = {"plain": "vllm1 This is a test prompt.", "letters": "naïve 東京 \U0001f917", "empty": "",
         "spaces": "  two  spaces\n\n", "special": "<|im_start|>user\nHi<|im_end|>",
         "digits": "2024"}
TOOL: Json = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"location": {"type": "string"}}}}}


def own(server: Server) -> Tokenizer:
    """The model's tokenizer, by the library."""
    return Tokenizer.from_file(str(server.directory / "tokenizer.json"))


def tokenized(server: Server, **body: Any) -> Json:
    found: Json = server.post("/tokenize", body).ok()
    assert found["count"] == len(found["tokens"])
    return found


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_a_text(server: Server, name: str, special: bool) -> None:
    found = tokenized(server, prompt=TEXTS[name], add_special_tokens=special)
    assert found["tokens"] == own(server).encode(TEXTS[name], add_special_tokens=special).ids
    assert found["max_model_len"] > 0 and found.get("token_strs") is None


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "empty"])
def test_there_and_back(server: Server, name: str) -> None:
    ids = tokenized(server, prompt=TEXTS[name], add_special_tokens=False)["tokens"]
    found = server.post("/detokenize", {"tokens": ids, "model": server.model}).ok()
    assert found["prompt"] == TEXTS[name]


def test_texts_of_tokens(server: Server) -> None:
    found = tokenized(server, prompt=TEXTS["plain"], return_token_strs=True)
    tokenizer = own(server)
    assert found["token_strs"] == [tokenizer.id_to_token(one) for one in found["tokens"]]


def test_a_list_of_texts(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": list(TEXTS.values())[:2]}).ok()
    assert found["tokens"] == [server.tokenize(one) for one in list(TEXTS.values())[:2]]
    assert found["count"] == [len(one) for one in found["tokens"]]


def test_a_list_of_lists_comes_back(server: Server) -> None:
    texts = list(TEXTS.values())[:2]
    found = server.post("/detokenize", {"tokens": [server.tokenize(one) for one in texts]}).ok()
    assert found["text"] == texts


@pytest.mark.parametrize("more,turns", [
    ({}, TURNS), ({"add_generation_prompt": True}, TURNS),
    ({"add_generation_prompt": False}, TURNS),
    ({"add_generation_prompt": False, "continue_final_message": True}, [*TURNS, SURE]),
    ({"add_special_tokens": True}, TURNS)], ids=str)
def test_a_conversation(server: Server, more: Json, turns: list[Json]) -> None:
    ids = tokenized(server, messages=turns, **more)["tokens"]
    text = server.detokenize(ids)
    assert all(str(one["content"]) in text for one in turns)
    if more.get("continue_final_message"):
        assert text.endswith(str(SURE["content"]))
    else:
        asked = {name: value for name, value in more.items() if name == "add_generation_prompt"}
        told = server.chat(turns, max_tokens=1, return_token_ids=True, **asked)
        assert ids == told["prompt_token_ids"]


def test_a_conversation_with_tools(server: Server) -> None:
    ids = tokenized(server, messages=[USER], tools=[TOOL])["tokens"]
    told = server.chat([USER], tools=[TOOL], max_tokens=1, return_token_ids=True)
    assert ids == told["prompt_token_ids"]


def test_a_template_of_the_request(server: Server) -> None:
    found = tokenized(server, messages=[USER], chat_template="<{{ messages[0].content }}>")
    assert server.detokenize(found["tokens"]) == "<Hi there!>"


@pytest.mark.parametrize("skip,want", [(True, "Hi"), (False, "Hi<|im_end|>")])
def test_special_tokens_of_a_text(server: Server, skip: bool, want: str) -> None:
    ids = server.tokenize("Hi<|im_end|>")
    assert server.post("/detokenize", {"tokens": ids,
                                       "skip_special_tokens": skip}).ok()["prompt"] == want


@pytest.mark.parametrize("path,body,param", [
    ("/tokenize", {}, ""), ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": None}, ""), ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, ""),
    ("/tokenize", {"messages": [USER, SURE], "continue_final_message": True,
                   "add_generation_prompt": True}, "continue_final_message"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10 ** 9]}, "tokens")], ids=str)
def test_what_is_refused_is_named(server: Server, path: str, body: Json, param: str) -> None:
    server.post(path, body).error(400, param or None)


@pytest.mark.parametrize("path,body,prefix", [
    (COMPLETIONS, completion(), "cmpl-"), (CHAT, chat(), "chatcmpl-")], ids=["completions", "chat"])
def test_render(server: Server, path: str, body: Json, prefix: str) -> None:
    found = server.post(f"{path}/render", body | {"temperature": 0.125, "top_p": 0.5}).ok()
    one = found[0] if isinstance(found, list) else found
    assert isinstance(found, list) == (path == COMPLETIONS)
    text = server.detokenize(one["token_ids"])
    assert (text == STORY) if path == COMPLETIONS else (QUESTION in text)
    assert one["model"] == server.model and one["request_id"].startswith(prefix)
    assert one["sampling_params"]["temperature"] == 0.125
    assert one["sampling_params"]["top_p"] == 0.5
    assert one["sampling_params"]["max_tokens"] == 6


def test_render_several(server: Server) -> None:
    found = server.post(f"{COMPLETIONS}/render", completion([STORY, "The cat"])).ok()
    assert [server.detokenize(one["token_ids"]) for one in found] == [STORY, "The cat"]


def test_render_is_what_is_run(server: Server) -> None:
    body = chat(TURNS)
    ids = server.post(f"{CHAT}/render", body).ok()["token_ids"]
    told = server.post(CHAT, body | {"return_token_ids": True}).ok()
    assert ids == told["prompt_token_ids"]


def test_render_of_a_stream_is_json(server: Server) -> None:
    answer = server.post(f"{CHAT}/render", chat(stream=True, stream_options={
        "include_usage": True}))
    assert answer.ok()["token_ids"]
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("path,body,param", [
    (COMPLETIONS, {}, "prompt"), (COMPLETIONS, {"prompt": []}, "prompt"),
    (CHAT, {}, "messages"), (CHAT, {"messages": []}, "messages"),
    (CHAT, chat(temperature=-1), "temperature")], ids=str)
def test_render_refuses_too(server: Server, path: str, body: Json, param: str) -> None:
    server.post(f"{path}/render", body).error(400, param)
