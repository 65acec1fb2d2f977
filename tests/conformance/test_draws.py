"""Sampling: seeds, penalties, biases, what is allowed, where it stops; in both APIs."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from wire import CHAT, COMPLETIONS, STORY, TELL, Json, Server, chat, completion, deltas, pieces

pytestmark = pytest.mark.conformance
ROUTES = {"completions": (COMPLETIONS, partial(completion, prompt=STORY)),
          "chat": (CHAT, partial(chat, messages=TELL))}
both = pytest.mark.parametrize("route", ROUTES)
streamed = pytest.mark.parametrize("streamed", [False, True])


class Said:
    """One answer, whichever way it came."""

    def __init__(self, server: Server, route: str, streamed: bool = False, **more: Any) -> None:
        path, body = ROUTES[route]
        given = body(**more)
        if streamed:
            chunks = server.stream(path, given)
            self.text = (pieces if route == "completions" else deltas)(chunks)
            last = [one["choices"][0] for one in chunks if one["choices"]][-1]
            self.tokens = 0
        else:
            found = server.post(path, given).ok()
            last = found["choices"][0]
            self.text = last["text"] if route == "completions" else last["message"]["content"]
            self.tokens = found["usage"]["completion_tokens"]
        self.reason, self.stop = last["finish_reason"], last["stop_reason"]


@both
def test_a_seed_is_repeated(server: Server, route: str) -> None:
    more = {"temperature": 1.0, "max_tokens": 16}
    texts = [Said(server, route, seed=seed, **more).text for seed in (42, 42, 43)]
    assert texts[0] == texts[1] != texts[2]


@both
@pytest.mark.parametrize("seed", [0, -1, 2 ** 31, 2 ** 63 - 1, -2 ** 63], ids=str)
def test_seeds_of_any_size(server: Server, route: str, seed: int) -> None:
    more = {"temperature": 1.0, "seed": seed}
    assert Said(server, route, **more).text == Said(server, route, **more).text


@both
def test_choices_of_a_seed_differ(server: Server, route: str) -> None:
    path, body = ROUTES[route]
    asked = body(n=3, temperature=1.0, seed=42, max_tokens=16, ignore_eos=True)
    texts = [[str(one.get("text") or one["message"]["content"])
              for one in server.post(path, asked).ok()["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


@both
def test_without_a_seed_answers_differ(server: Server, route: str) -> None:
    assert len({Said(server, route, temperature=1.3, max_tokens=16).text for _ in range(4)}) > 1


@both
@pytest.mark.parametrize("more", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_filters_take_the_likeliest(server: Server, route: str, more: Json) -> None:
    """Of two that are equally likely, either."""
    path, body = ROUTES[route]
    asked = {"logprobs": 2} if route == "completions" else {"logprobs": True, "top_logprobs": 2}
    found = server.post(path, body(temperature=1.0, seed=1, max_tokens=12, **asked, **more)
                        ).ok()["choices"][0]["logprobs"]
    places = (zip(found["token_logprobs"], [max(one.values()) for one in found["top_logprobs"]],
                  strict=True) if route == "completions" else
              [(one["logprob"], one["top_logprobs"][0]["logprob"]) for one in found["content"]])
    assert all(value == pytest.approx(best, abs=1e-4) for value, best in places)


@both
@pytest.mark.parametrize("more", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0},
                                  {"repetition_penalty": 1.8}], ids=str)
def test_penalties_keep_it_from_repeating(server: Server, route: str, more: Json) -> None:
    path, body = ROUTES[route]

    def ids(**given: Any) -> list[int]:
        found: list[int] = server.post(path, body(
            max_tokens=96, ignore_eos=True, return_token_ids=True, **given)
        ).ok()["choices"][0]["token_ids"]
        return found

    plain, other = ids(), ids(**more)
    assert other != plain and len(set(other)) >= len(set(plain))


@both
def test_a_bias_forces_a_token(server: Server, route: str) -> None:
    (token, *_) = server.tokenize("cat")
    found = Said(server, route, logit_bias={str(token): 100}, max_tokens=3)
    assert found.text == server.detokenize([token]) * 3


@both
def test_a_bias_forbids_a_token(server: Server, route: str) -> None:
    path, body = ROUTES[route]
    found = server.post(path, body(return_token_ids=True, max_tokens=1)).ok()["choices"][0]
    (token,) = found["token_ids"]
    other = server.post(path, body(return_token_ids=True, max_tokens=4,
                                   logit_bias={str(token): -100})).ok()["choices"][0]
    assert token not in other["token_ids"]


@both
def test_tokens_that_are_allowed(server: Server, route: str) -> None:
    allowed = server.tokenize(" red") + server.tokenize(" blue")
    path, body = ROUTES[route]
    found = server.post(path, body(allowed_token_ids=allowed, max_tokens=8, temperature=1.0,
                                   return_token_ids=True)).ok()["choices"][0]
    assert set(found["token_ids"]) <= set(allowed)


@both
@streamed
def test_words_that_are_forbidden(server: Server, route: str, streamed: bool) -> None:
    plain = Said(server, route, max_tokens=24)
    words = [one for one in re.findall(r"[a-z]{3,}", plain.text)][:2]
    assert words
    found = Said(server, route, streamed, max_tokens=24, bad_words=words)
    assert not any(re.search(rf"\b{word}\b", found.text) for word in words)


@both
@streamed
def test_a_stop_text(server: Server, route: str, streamed: bool) -> None:
    plain = Said(server, route, max_tokens=24).text
    stop = plain[len(plain) // 2:][:4]
    found = Said(server, route, streamed, max_tokens=24, stop=stop)
    assert found.text == plain[:plain.index(stop)]
    assert (found.reason, found.stop) == ("stop", stop)


@both
@streamed
def test_several_stop_texts(server: Server, route: str, streamed: bool) -> None:
    plain = Said(server, route, max_tokens=24).text
    stops = ["\N{SNOWMAN}", plain[6:9], "no such text"]
    found = Said(server, route, streamed, max_tokens=24, stop=stops)
    assert found.text == plain[:plain.index(stops[1])] and found.stop == stops[1]


@both
@streamed
def test_a_stop_text_can_be_kept(server: Server, route: str, streamed: bool) -> None:
    plain = Said(server, route, max_tokens=24).text
    stop = plain[8:11]
    found = Said(server, route, streamed, max_tokens=24, stop=[stop],
                 include_stop_str_in_output=True)
    assert found.text == plain[:plain.index(stop) + len(stop)]


@both
def test_a_stop_text_that_never_comes(server: Server, route: str) -> None:
    found = Said(server, route, stop=["\N{SNOWMAN}\N{SNOWMAN}"])
    assert found.reason == "length" and found.stop is None
    assert found.text == Said(server, route).text


@both
@streamed
@pytest.mark.parametrize("form", ["one", "list"])
def test_a_stop_pattern(server: Server, route: str, streamed: bool, form: str) -> None:
    plain = Said(server, route, max_tokens=24).text
    word = re.findall(r"[a-z]{3,}", plain)[1]
    pattern = word[0] + "[a-z]" * (len(word) - 1)
    match = re.search(pattern, plain)
    assert match is not None
    found = Said(server, route, streamed, max_tokens=24,
                 stop_regex=pattern if form == "one" else ["[0-9]{9}", pattern])
    assert found.reason == "stop" and found.text == plain[:match.start()]


@both
@streamed
def test_a_stop_token(server: Server, route: str, streamed: bool) -> None:
    path, body = ROUTES[route]
    ids = server.post(path, body(return_token_ids=True, max_tokens=8,
                                 ignore_eos=True)).ok()["choices"][0]["token_ids"]
    at = next(i for i in range(2, 8) if ids[i] not in ids[:i])
    found = Said(server, route, streamed, max_tokens=8, stop_token_ids=[ids[at]])
    assert (found.reason, found.stop) == ("stop", ids[at])
    assert found.text == server.detokenize(ids[:at])


@both
@streamed
def test_ends_of_text_can_be_ignored(server: Server, route: str, streamed: bool) -> None:
    path, body = ROUTES[route]
    more = {"ignore_eos": True, "max_tokens": 48}
    if streamed:
        chunks = server.stream(path, body(**more, stream_options={"include_usage": True}))
        assert chunks[-1]["usage"]["completion_tokens"] == 48
    else:
        found = Said(server, route, **more)
        assert (found.tokens, found.reason) == (48, "length")


@pytest.mark.models("smollm2")
@both
def test_no_end_before_the_least(server: Server, route: str) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Json = ({"prompt": server.post("/tokenize", {"messages": turns}).ok()["tokens"]}
                    if route == "completions" else {"messages": turns})
    short = Said(server, route, max_tokens=64, **prompt)
    assert short.reason == "stop" and short.tokens < 64
    found = Said(server, route, max_tokens=80, min_tokens=short.tokens + 8, **prompt)
    assert found.tokens >= short.tokens + 8


@both
def test_no_stop_text_before_the_least(server: Server, route: str) -> None:
    found = Said(server, route, max_tokens=16, min_tokens=16, stop=["e", "a", "o", " "])
    assert found.tokens == 16


@both
def test_special_tokens_can_be_shown(server: Server, route: str) -> None:
    (end,) = server.tokenize("<|im_end|>")
    more = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2}
    assert Said(server, route, **more).text == ""
    assert (Said(server, route, skip_special_tokens=False, **more).text == "<|im_end|>" * 2)


REFUSED: list[tuple[Json, str]] = [
    ({"temperature": -0.1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"temperature": []}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"top_p": -0.5}, "top_p"),
    ({"top_p": 0}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 0.5}, "top_k"),
    ({"min_p": 2}, "min_p"), ({"min_p": -1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"presence_penalty": -3}, "presence_penalty"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"max_tokens": -2}, "max_tokens"), ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": 10 ** 30}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 10 ** 6}, "n"), ({"n": 1.5}, "n"),
    ({"seed": 1.5}, "seed"), ({"seed": "a"}, "seed"), ({"seed": 2 ** 63}, "seed"),
    ({"seed": -2 ** 63 - 1}, "seed"), ({"stop": 5}, "stop"), ({"stop": [5]}, "stop"),
    ({"stop": [""]}, "stop"), ({"stop_regex": "("}, "stop_regex"),
    ({"stop_regex": 3}, "stop_regex"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": -101}}, "logit_bias"), ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"), ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10 ** 8]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"), ({"bad_words": [1]}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"), ({"bad_words": [""]}, "bad_words"),
    ({"ignore_eos": "yes"}, "ignore_eos"), ({"stream": "yes"}, "stream"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10 ** 7}, "truncate_prompt_tokens"),
    ({"timeout": -1}, "timeout"), ({"priority": "high"}, "priority"),
]


@both
@pytest.mark.parametrize("more,param", REFUSED, ids=str)
def test_what_is_refused_is_named(server: Server, route: str, more: Json, param: str) -> None:
    path, body = ROUTES[route]
    server.post(path, body() | more).error(400, param)


NULLABLE = [
    "model", "n", "seed", "stop", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "prompt_logprobs", "logprobs", "return_token_ids", "stream", "stream_options", "priority",
    "timeout", "user", "request_id", "echo", "response_format", "structured_outputs",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "cache_salt",
    "use_beam_search", "return_tokens_as_token_ids", "max_tokens"]
NULLABLE_IN_CHAT = [
    "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "reasoning_effort", "include_reasoning", "separate_reasoning", "functions", "function_call",
    "metadata", "store", "modalities", "service_tier", "logprob_token_ids"]


@pytest.mark.parametrize("route,field", [
    *(("completions", one) for one in [*NULLABLE, "suffix", "best_of"]),
    *(("chat", one) for one in NULLABLE + NULLABLE_IN_CHAT)])
def test_null_is_absent(server: Server, route: str, field: str) -> None:
    path, body = ROUTES[route]
    given = body(max_tokens=2, stop=["\n", "."])
    assert server.post(path, given | {field: None}).ok()["choices"]
