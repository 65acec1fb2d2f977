"""Log-probabilities: of what was sampled, of the prompt, in both APIs, whole and streamed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from wire import CHAT, COMPLETIONS, STORY, Json, Server, chat, completion, deltas

pytestmark = pytest.mark.conformance
streamed = pytest.mark.parametrize("streamed", [False, True])


def text_logprobs(server: Server, streamed: bool, **more: Any) -> Json:
    """Of a completion; a stream's joined."""
    if not streamed:
        found: Json = server.complete(**more)["choices"][0]["logprobs"]
        return found
    joined: Json = {}
    for chunk in server.stream(COMPLETIONS, completion(**more)):
        for name, value in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] = joined.get(name, []) + value
    return joined


def chat_logprobs(server: Server, streamed: bool, **more: Any) -> list[Json]:
    """Of a chat completion."""
    if not streamed:
        found: list[Json] = server.chat(**more)["choices"][0]["logprobs"]["content"]
        return found
    return [one for chunk in server.stream(CHAT, chat(**more)) for choice in chunk["choices"]
            for one in (choice["logprobs"] or {}).get("content", [])]


@streamed
@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_of_a_completion(server: Server, streamed: bool, asked: int) -> None:
    found = text_logprobs(server, streamed, logprobs=asked, max_tokens=4, ignore_eos=True)
    assert {len(found[name]) for name in
            ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {4}
    assert all(value <= 0 for value in found["token_logprobs"])
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"],
                                 strict=True):
        assert max(asked, 1) <= len(top) <= asked + 1
        assert top[token] == pytest.approx(value)
        assert value == pytest.approx(max(top.values()))  # greedy


@streamed
def test_offsets_of_tokens(server: Server, streamed: bool) -> None:
    found = text_logprobs(server, streamed, logprobs=1, max_tokens=8)
    text = server.complete(max_tokens=8)["choices"][0]["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset - found["text_offset"][0]:].startswith(token)


def test_none_unless_asked(server: Server) -> None:
    assert server.complete()["choices"][0]["logprobs"] is None
    assert server.complete(logprobs=None)["choices"][0]["logprobs"] is None
    assert server.chat()["choices"][0]["logprobs"] is None
    assert server.chat(logprobs=False)["choices"][0]["logprobs"] is None


@streamed
@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("asked", [0, 1, 5])
def test_echo_has_the_prompts(server: Server, streamed: bool, form: str, asked: int) -> None:
    ids = server.tokenize(STORY)
    found = text_logprobs(server, streamed, prompt=ids if form == "ids" else STORY, echo=True,
                          logprobs=asked, max_tokens=3, ignore_eos=True)
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(ids) + 3
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert all(max(asked, 1) <= len(top) <= asked + 1 for top in found["top_logprobs"][1:])
    assert "".join(found["tokens"][:len(ids)]) == STORY
    assert found["text_offset"][0] == 0


def test_a_scored_completion_is_what_was_sampled(server: Server) -> None:
    """Log-probabilities of a prompt are those of the same tokens when they were sampled."""
    sampled = server.complete(logprobs=1, max_tokens=5, return_token_ids=True,
                              ignore_eos=True)["choices"][0]
    ids = sampled["prompt_token_ids"] + sampled["token_ids"]
    scored = server.complete(ids, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    begin = len(sampled["prompt_token_ids"])
    assert (scored["token_logprobs"][begin:begin + 5]
            == pytest.approx(sampled["logprobs"]["token_logprobs"], abs=0.15))


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_of_a_prompt(server: Server, asked: int) -> None:
    for found in server.complete([STORY, "The cat sat"], prompt_logprobs=asked)["choices"]:
        first, *rest = found["prompt_logprobs"]
        assert first is None and rest
        for place in rest:
            assert max(asked, 1) <= len(place) <= asked + 1
            assert all(int(token) >= 0 for token in place)
            for one in place.values():
                assert one["logprob"] <= 0 and one["rank"] >= 1
                assert isinstance(one["decoded_token"], str)


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_of_a_chats_prompt(server: Server, asked: int | None) -> None:
    found = server.chat(prompt_logprobs=asked)
    if asked is None:
        assert found.get("prompt_logprobs") is None
    else:
        assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
        assert max(asked, 1) <= len(found["prompt_logprobs"][3]) <= asked + 1


@streamed
@pytest.mark.parametrize("asked", [None, 0, 5, 20])
def test_of_a_chat(server: Server, streamed: bool, asked: int | None) -> None:
    more = {} if asked is None else {"top_logprobs": asked}
    found = chat_logprobs(server, streamed, logprobs=True, max_tokens=4, ignore_eos=True, **more)
    assert len(found) == 4
    for one in found:
        assert one["logprob"] <= 0 and math.isfinite(one["logprob"])
        assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
        assert len(one["top_logprobs"]) == (asked or 0)
        for top in one["top_logprobs"]:
            assert set(top) >= {"token", "logprob", "bytes"}
        if asked:
            assert one["top_logprobs"][0]["token"] == one["token"]
            values = [top["logprob"] for top in one["top_logprobs"]]
            assert values == sorted(values, reverse=True)


@streamed
def test_tokens_of_a_chat_are_its_text(server: Server, streamed: bool) -> None:
    body = chat(logprobs=True, max_tokens=5, ignore_eos=True)
    found = chat_logprobs(server, streamed, logprobs=True, max_tokens=5, ignore_eos=True)
    text = (deltas(server.stream(CHAT, body)) if streamed
            else server.post(CHAT, body).ok()["choices"][0]["message"]["content"])
    assert "".join(one["token"] for one in found).startswith(text) and text


def test_every_choice_has_its_own(server: Server) -> None:
    found = server.chat(n=2, logprobs=True, temperature=1.0, seed=5, max_tokens=8)
    for one in found["choices"]:
        told = "".join(part["token"] for part in one["logprobs"]["content"])
        assert told.startswith(one["message"]["content"])


@streamed
def test_tokens_as_ids(server: Server, streamed: bool) -> None:
    ids = server.complete(return_token_ids=True)["choices"][0]["token_ids"]
    found = text_logprobs(server, streamed, logprobs=1, return_tokens_as_token_ids=True)
    assert found["tokens"] == [f"token_id:{one}" for one in ids]
    assert all(name.startswith("token_id:") for top in found["top_logprobs"] for name in top)


@streamed
def test_tokens_of_a_chat_as_ids(server: Server, streamed: bool) -> None:
    ids = server.chat(return_token_ids=True)["choices"][0]["token_ids"]
    found = chat_logprobs(server, streamed, logprobs=True, top_logprobs=2,
                          return_tokens_as_token_ids=True)
    assert [one["token"] for one in found] == [f"token_id:{one}" for one in ids]
    assert all(top["token"].startswith("token_id:") for one in found
               for top in one["top_logprobs"])


def test_of_chosen_tokens(server: Server) -> None:
    wanted = [100, 1000, 500]
    (found,) = chat_logprobs(server, False, logprobs=True, top_logprobs=3, max_tokens=1,
                             logprob_token_ids=wanted, return_tokens_as_token_ids=True)
    told = {int(one["token"].removeprefix("token_id:")) for one in found["top_logprobs"]}
    assert len(told & set(wanted)) >= 2
    assert all(math.isfinite(one["logprob"]) for one in found["top_logprobs"])


def test_they_are_told_beside_a_grammar(server: Server) -> None:
    found = chat_logprobs(server, False, logprobs=True, top_logprobs=5, max_tokens=8,
                          structured_outputs={"choice": ["Paris", "Rome"]})
    assert "".join(one["token"] for one in found).startswith(("Paris", "Rome"))
    assert all(top["logprob"] >= -9999.0 for one in found for top in one["top_logprobs"])


@pytest.mark.parametrize("path,more,param", [
    (COMPLETIONS, {"logprobs": 21}, "logprobs"), (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"), (COMPLETIONS, {"logprobs": "1"}, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": -2}, "prompt_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"logprobs": True, "logprob_token_ids": [10 ** 9]}, "logprob_token_ids"),
    (CHAT, {"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids"),
    (CHAT, {"logprobs": True, "logprob_token_ids": "x"}, "logprob_token_ids"),
], ids=str)
def test_too_many_or_of_a_wrong_type(server: Server, path: str, more: Json, param: str) -> None:
    body = (completion() if path == COMPLETIONS else chat()) | more
    server.post(path, body).error(400, param)
    server.post(path, body | {"stream": True}).error(400, param)
