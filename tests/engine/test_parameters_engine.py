"""Request parameters through whole engines: what they promise holds, and the tokens do not depend
on overlap, preemption, drafts, or the death of an actor, nor do bits of log-probabilities."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_prefix import engine

from actorium import Engine, InvalidRequest, SamplingParams
from actorium.actors.client.client import Completion, Request
from actorium.actors.params import Structured

PLAIN: dict[str, Any] = {"exact": "on", "speculative": "off", "max_num_seqs": 16}
"""A recomputed token has the same bits."""
PROMPT = "Once upon a time"
ALLOWED = [*range(300, 360), 2]
WORDS = ["there", "a lazy", "cheerful", "One morning", ","]
NAMED = [300, 11, 1900, 42]
TAGS = {"triggers": ["there"], "structures": [
    {"begin": "there", "end": ".", "schema": {"enum": ["lived", "was"]}}]}


def requests() -> list[Request]:
    """Greedy and sampled, one choice and several."""
    made = []
    for number, params in enumerate([
            {"allowed_token_ids": ALLOWED}, {"bad_words": WORDS},
            {"logprob_token_ids": NAMED},
            {"stop_regex": [r"[a-z]+ (shark|named)", "zzz", r"\. [A-Z]"], "stop": "and"},
            {"structured": Structured(structural_tag=json.dumps(TAGS)), "bad_words": ["dog"]},
            {"allowed_token_ids": ALLOWED[:20], "min_tokens": 9, "logit_bias": {301: 2.0}}]):
        for temperature, n in ((0.0, 1), (1.0, 3)):
            made.append(Request(prompt=PROMPT, params=SamplingParams(
                temperature=temperature, n=n, seed=number, max_tokens=40, **params)))
    return made


def complete(running: Engine) -> list[list[Completion]]:
    done = dict(running.client.run(requests()))
    for result in done.values():
        assert not isinstance(result, Exception), result
    return [done[number] for number in range(len(done))]  # type: ignore[misc]


def told(completions: list[list[Completion]]) -> list[Any]:
    """What must be the same, however it was computed."""
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs)
            for choices in completions for c in choices]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with engine(**PLAIN) as running:
        yield running


@pytest.fixture(scope="module")
def alone(plain: Engine) -> list[list[Completion]]:
    return complete(plain)


def test_they_hold(plain: Engine, alone: list[list[Completion]]) -> None:
    words = [plain.client.tokenize(start + word.strip(), False)
             for word in WORDS for start in ("", " ")]
    for request, choices in zip(requests(), alone, strict=True):
        params = request.params
        assert params is not None and len(choices) == params.n
        for done in choices:
            if params.allowed_token_ids:
                assert set(done.token_ids) <= set(params.allowed_token_ids)
            if params.bad_words == WORDS:
                assert not any(done.token_ids[at:at + len(word)] == word for word in words
                               for at in range(len(done.token_ids)))
            if params.stop_regex:
                found = re.search(r"[a-z]+ (shark|named)|\. [A-Z]|and", done.text)
                assert found is None and done.stop_reason in (None, "and", *params.stop_regex)
            if params.structured:
                assert "dog" not in done.text
                assert re.search(r'there *\s*"(lived|was)"\s*\.', done.text) or \
                    "there" not in done.text, done.text
    assert "stop" in {c.finish_reason for c in alone[6]} and alone[6][0].stop_reason is not None
    free = plain.client.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))
    assert free.token_ids != alone[0][0].token_ids
    assert "there" in free.text and "," in free.text, "or there is nothing to forbid"


def test_logprobs_of_named_tokens(plain: Engine, alone: list[list[Completion]]) -> None:
    for request, choices in zip(requests(), alone, strict=True):
        if request.params is None or not request.params.logprob_token_ids:
            assert all(done.logprobs is None for done in choices)
            continue
        for done in choices:
            assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
            assert all([token for token, _ in entry.top] == NAMED for entry in done.logprobs)
    known = SamplingParams(temperature=0, max_tokens=8, logprobs=20)
    likeliest = plain.client.generate(PROMPT, known)
    ids = [token for token, _ in likeliest.logprobs[0].top[::3]]
    found = plain.client.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8,
                                                         logprob_token_ids=ids * 2))
    assert found.token_ids == likeliest.token_ids
    for entry, other in zip(found.logprobs, likeliest.logprobs, strict=True):
        assert (entry.logprob, entry.rank) == (other.logprob, other.rank)
        assert [token for token, _ in entry.top] == ids, "each once"
    assert dict(found.logprobs[0].top) == dict(likeliest.logprobs[0].top[::3])


@pytest.mark.parametrize("settings", [
    {"speculative": "mtp:3,fixed", "force_preempt_every": 9},
    pytest.param({"speculative": "mtp:1,fixed"}, marks=pytest.mark.slow),
    pytest.param({"overlap": False, "force_preempt_every": 5, "max_num_seqs": 5},
                 marks=pytest.mark.slow),
], ids=lambda settings: ",".join(str(value) for value in settings.values()))
def test_however_it_is_computed(alone: list[list[Completion]], settings: dict[str, Any]) -> None:
    with engine(**{**PLAIN, **settings}) as running:
        done = complete(running)
    assert told(done) == told(alone)
    if "speculative" in settings:
        assert sum(choice.usage.draft_tokens for choices in done for choice in choices)


@pytest.mark.parametrize("role", [
    "scheduler", pytest.param("worker-0", marks=pytest.mark.slow),
    pytest.param("detokenizer", marks=pytest.mark.slow)])
def test_streams_complete_whichever_actor_dies(
        plain: Engine, alone: list[list[Completion]], role: str) -> None:
    pids = {actor.role: actor.pid for actor in plain.client.status().actors}
    results = plain.client.run(requests())
    done = dict([next(results)])
    os.kill(pids[role], signal.SIGKILL)
    done |= dict(results)
    assert told([done[number] for number in range(len(done))]) == told(alone)  # type: ignore


def test_a_cache_salt_keeps_prefixes_apart(plain: Engine) -> None:
    def cached(salt: str | None, tenant: str = "") -> int:
        (done,) = [result for _, result in plain.client.run([Request(
            prompt=list(range(300, 400)), params=SamplingParams(max_tokens=1), cache_salt=salt,
            tenant=tenant)])]
        assert not isinstance(done, Exception), done
        return done[0].usage.cached_tokens

    assert cached("a") == 0 and cached("a") == 96
    assert cached("b") == 0 and cached(None) == 0 and cached("a", "other") == 0
    assert cached("") == 96, "no salt is the empty one"
    assert cached("a") == cached("b") == cached("a", "other") == 96


def test_many_choices_take_turns_at_the_slots(plain: Engine) -> None:
    params = SamplingParams(n=128, seed=3, temperature=1.0, max_tokens=6)
    choices = plain.client.generate(PROMPT, params)
    assert [choice.index for choice in choices] == list(range(128))
    assert all(choice.finish_reason in ("stop", "length") for choice in choices)
    few = plain.client.generate(PROMPT, SamplingParams(n=3, seed=3, temperature=1.0, max_tokens=6))
    assert [c.token_ids for c in few] == [c.token_ids for c in choices[:3]]
    seen = {delta.index for delta in plain.client.stream(PROMPT, params) if delta.finish_reason}
    assert seen == set(range(128))
    with pytest.raises(InvalidRequest, match="n: 129 choices; the engine allows 128") as refused:
        plain.client.generate(PROMPT, SamplingParams(n=129))
    assert refused.value.param == "n"


def test_a_stream_brings_the_prompts_logprobs_with_its_first_delta(plain: Engine) -> None:
    params = SamplingParams(max_tokens=5, n=2, seed=1, prompt_logprobs=2)
    whole = plain.client.generate(PROMPT, params)
    firsts: dict[int, Any] = {}
    for delta in plain.client.stream(PROMPT, params):
        if delta.token_ids and delta.index not in firsts:
            firsts[delta.index] = delta.prompt_logprobs
        else:
            assert delta.prompt_logprobs is None
    assert [firsts[0], firsts[1]] == [choice.prompt_logprobs for choice in whole]
    assert firsts[0][0] is None and len(firsts[0][1].top) == 2


def test_how_a_prompt_is_made(plain: Engine) -> None:
    """Rendered as it is generated from."""
    turns = [{"role": "user", "content": "Tell me a story."},
             {"role": "assistant", "content": "Once upon a"}]
    client = plain.client
    for options in ({}, {"add_generation_prompt": False, "continue_final_message": True},
                    {"chat_template": "{% for m in messages %}{{ m.content }}|{% endfor %}"}):
        ids = client.tokenize_chat(turns, **options)
        params = SamplingParams(max_tokens=4, temperature=0)
        said = client.chat(turns, params, **options)
        assert said.usage.prompt_tokens == len(ids)
        assert said.token_ids == client.generate(ids, params).token_ids
        cut = client.chat(turns, params, truncate_prompt_tokens=5, **options)
        assert cut.usage.prompt_tokens == 5
        assert cut.token_ids == client.generate(ids[-5:], params).token_ids
        assert client.generate(ids, params, truncate_prompt_tokens=5).token_ids == cut.token_ids
    with pytest.raises(InvalidRequest, match="not with add_generation_prompt") as refused:
        client.chat(turns, continue_final_message=True)
    assert refused.value.param == "continue_final_message"
