"""`/v1/completions`: prompts in all their forms, how many answers, what they look like."""

from __future__ import annotations

from typing import Any

import pytest
from wire import COMPLETIONS, STORY, Server, completion, pieces

pytestmark = pytest.mark.conformance
LONGER = "The quick brown fox jumps over the lazy dog and runs into the forest"


def test_the_shape_of_an_answer(server: Server) -> None:
    found = server.complete(max_tokens=5)
    assert found["id"].startswith("cmpl-") and found["object"] == "text_completion"
    assert isinstance(found["created"], int) and found["model"] == server.model
    (choice,) = found["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length"
    assert isinstance(choice["text"], str) and choice["text"] and choice["logprobs"] is None
    usage = found["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] == len(server.tokenize(STORY))
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_greedy_is_the_same_each_time(server: Server) -> None:
    assert len({server.complete(max_tokens=12)["choices"][0]["text"] for _ in range(3)}) == 1


@pytest.mark.models("smollm2")
def test_it_knows_the_capital_of_france(server: Server) -> None:
    assert "Paris" in server.complete("The capital of France is")["choices"][0]["text"]


def test_token_ids_are_as_good_as_text(server: Server) -> None:
    ids = server.tokenize(STORY)
    assert server.complete(ids)["choices"][0]["text"] == server.complete()["choices"][0]["text"]


@pytest.mark.parametrize("form", ["texts", "ids"])
@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts(server: Server, form: str, n: int) -> None:
    texts = [STORY, LONGER, STORY]
    prompts: list[Any] = texts if form == "texts" else [server.tokenize(one) for one in texts]
    found = server.complete(prompts, n=n)
    assert [one["index"] for one in found["choices"]] == list(range(3 * n))
    want = [server.complete(one)["choices"][0]["text"] for one in texts]
    assert [one["text"] for one in found["choices"]] == [text for text in want for _ in range(n)]
    assert found["usage"]["prompt_tokens"] == sum(len(server.tokenize(one)) for one in texts)
    assert found["usage"]["completion_tokens"] == 18 * n


def test_a_list_of_one_text(server: Server) -> None:
    assert (server.complete([STORY])["choices"][0]["text"]
            == server.complete()["choices"][0]["text"])


@pytest.mark.parametrize("more", [{}, {"max_tokens": None}], ids=["absent", "null"])
def test_sixteen_tokens_unless_told(server: Server, more: dict[str, Any]) -> None:
    body = {"prompt": STORY, "temperature": 0, "ignore_eos": True} | more
    assert server.post(COMPLETIONS, body).ok()["usage"]["completion_tokens"] == 16


def test_one_token(server: Server) -> None:
    found = server.complete(max_tokens=1)
    assert found["usage"]["completion_tokens"] == 1
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("n", [1, 2])
def test_echo(server: Server, form: str, n: int) -> None:
    prompt: Any = STORY if form == "text" else server.tokenize(STORY)
    want = server.complete()["choices"][0]["text"]
    found = server.complete(prompt, echo=True, n=n)
    assert [one["text"] for one in found["choices"]] == [STORY + want] * n


def test_echo_of_several_prompts(server: Server) -> None:
    found = server.complete([STORY, LONGER], echo=True)
    assert found["choices"][0]["text"].startswith(STORY)
    assert found["choices"][1]["text"].startswith(LONGER)


def test_echo_and_nothing_more(server: Server) -> None:
    found = server.complete(echo=True, max_tokens=0, logprobs=1)
    assert found["choices"][0]["text"] == STORY
    assert found["usage"]["completion_tokens"] == 0
    assert len(found["choices"][0]["logprobs"]["tokens"]) == len(server.tokenize(STORY))


@pytest.mark.parametrize("form", ["text", "ids"])
def test_echo_in_a_stream(server: Server, form: str) -> None:
    prompt: Any = STORY if form == "text" else server.tokenize(STORY)
    want = server.complete()["choices"][0]["text"]
    assert pieces(server.stream(COMPLETIONS, completion(prompt, echo=True))) == STORY + want


def test_a_stream_of_several_prompts(server: Server) -> None:
    chunks = server.stream(COMPLETIONS, completion([STORY, LONGER]))
    want = [one["text"] for one in server.complete([STORY, LONGER])["choices"]]
    assert [pieces(chunks, 0), pieces(chunks, 1)] == want


KEPT = {"left": slice(-4, None), "right": slice(None, 4)}


@pytest.mark.parametrize("side", [None, *KEPT])
def test_a_prompt_is_truncated_when_asked(server: Server, side: str | None) -> None:
    ids = server.tokenize(LONGER)
    more = {"truncation_side": side} if side else {}
    found = server.complete(ids, truncate_prompt_tokens=4, return_token_ids=True, **more)
    assert found["choices"][0]["prompt_token_ids"] == ids[KEPT[side or "left"]]
    assert found["usage"]["prompt_tokens"] == 4
    assert (found["choices"][0]["text"]
            == server.complete(ids[KEPT[side or "left"]])["choices"][0]["text"])


def test_a_short_prompt_is_not_truncated(server: Server) -> None:
    ids = server.tokenize(STORY)
    found = server.complete(ids, truncate_prompt_tokens=50, return_token_ids=True)
    assert found["choices"][0]["prompt_token_ids"] == ids


@pytest.mark.models("demo")
def test_truncated_to_what_the_context_holds(server: Server) -> None:
    limit = server.get("/v1/models").ok()["data"][0]["max_model_len"]
    ids = server.tokenize(STORY) * (limit // 3)
    found = server.complete(ids, truncate_prompt_tokens=-1, max_tokens=2)
    assert 0 < found["usage"]["prompt_tokens"] < limit


def test_ids_are_told_when_asked(server: Server) -> None:
    found = server.complete(return_token_ids=True)["choices"][0]
    assert found["prompt_token_ids"] == server.tokenize(STORY)
    assert server.detokenize(found["token_ids"]) == found["text"]
    quiet = server.complete()["choices"][0]
    assert quiet.get("token_ids") is None and quiet.get("prompt_token_ids") is None


def test_ids_are_told_in_a_stream(server: Server) -> None:
    want = server.complete(return_token_ids=True)["choices"][0]
    chunks = server.stream(COMPLETIONS, completion(return_token_ids=True))
    told = [one["choices"][0] for one in chunks if one["choices"]]
    assert told[0]["prompt_token_ids"] == want["prompt_token_ids"]
    assert not any(one.get("prompt_token_ids") for one in told[1:])
    assert [id_ for one in told for id_ in one.get("token_ids") or []] == want["token_ids"]


def test_a_repeated_prompt_is_cached(server: Server) -> None:
    prompt = "Cached: " + LONGER * 6
    server.complete(prompt)
    used = server.complete(prompt)["usage"]
    assert 0 < used["prompt_tokens_details"]["cached_tokens"] < used["prompt_tokens"]


def test_a_salt_keeps_caches_apart(server: Server) -> None:
    def cached(salt: str) -> int:
        used = server.complete("Salted: " + LONGER * 6, cache_salt=salt)["usage"]
        found: int = used["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("one") == 0 < cached("one")
    assert cached("other") == 0


LOADED = "\N{ROCKET} déjà vu 東京 \u0000 \U0001f469\u200d\U0001f4bb"


def test_any_text_goes_in(server: Server) -> None:
    found = server.complete(LOADED, echo=True, max_tokens=1)
    assert found["choices"][0]["text"].startswith(LOADED)
