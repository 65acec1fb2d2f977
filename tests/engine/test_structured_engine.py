"""Structured output through whole engines: what comes out is what was asked for, however it was
computed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_masking import MODEL, SIZE
from helpers_prefix import engine
from helpers_schemas import check, schema

from actorium import Engine, InvalidRequest, SamplingParams
from actorium.actors.client.client import Completion, Request
from actorium.actors.params import Structured

SCHEMAS = 64
FIRST = 10
"""Of them, where the same is computed in another way."""
PLAIN: dict[str, Any] = {"exact": "on", "speculative": "off", "max_num_seqs": 16}
"""A recomputed token has the same bits."""


def thinks(number: int) -> bool:
    """Whether a thought with an end comes before what the schema describes."""
    return number % 4 == 3


def request(number: int, **params: Any) -> Request:
    wanted = Structured(json_schema=json.dumps(schema(number)))
    if thinks(number):
        parts = [{"type": "thought", "open": True, "max_tokens": 3 + number % 16},
                 {"type": "json_schema", "json_schema": schema(number)}]
        wanted = Structured(structural_tag=json.dumps(
            {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}))
    return Request(prompt=f"Task {number}:", params=SamplingParams(
        **{"temperature": 1.0, "seed": number, "max_tokens": 300, "structured": wanted,
           "logprobs": 2, **params}))


def complete(running: Engine, requests: list[Request]) -> list[list[Completion]]:
    found = dict(running.client.run(requests))
    for result in found.values():
        assert not isinstance(result, Exception), result
    return [found[number] for number in range(len(requests))]  # type: ignore[misc]


def judge(completions: list[list[Completion]]) -> Counter[str]:
    """How they ended; those that were not cut short are what their schema describes."""
    ends: Counter[str] = Counter()
    for number, choices in enumerate(completions):
        for choice in choices:
            ends[choice.finish_reason] += 1
            if choice.finish_reason == "stop":
                check(schema(number), answer(number, choice.text))
    return ends


def answer(number: int, text: str) -> str:
    """The text behind a thought, which must be there where one was begun."""
    thought, mark, rest = text.partition("</think>")
    assert not thinks(number) or mark
    return rest.lstrip() if thinks(number) else text


def told(completions: list[list[Completion]]) -> list[Any]:
    """What must be the same, however it was computed; log-probabilities to the bit."""
    return [(choice.token_ids, choice.logprobs) for choices in completions for choice in choices]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with engine(**PLAIN) as running:
        yield running


@pytest.fixture(scope="module")
def alone(plain: Engine) -> list[Any]:
    """Tokens and log-probabilities of all schemas."""
    done = complete(plain, [request(number) for number in range(SCHEMAS)])
    ends = judge(done)
    assert ends["stop"] > 0.95 * SCHEMAS and set(ends) <= {"stop", "length"}
    return told(done)


@pytest.mark.parametrize("settings", [
    pytest.param({"speculative": "mtp:1,fixed"}, marks=pytest.mark.slow),
    pytest.param({"speculative": "mtp:3,fixed", "force_preempt_every": 9},
                 marks=pytest.mark.slow),
    pytest.param({"overlap": False, "force_preempt_every": 5, "max_num_seqs": 5},
                 marks=pytest.mark.slow),
], ids=lambda settings: ",".join(str(value) for value in settings.values()))
def test_however_it_is_computed(alone: list[Any], settings: dict[str, Any]) -> None:
    with engine(**{**PLAIN, **settings}) as running:
        done = complete(running, [request(number) for number in range(FIRST)])
        judge(done)
        assert told(done) == alone[:FIRST]
        if "speculative" in settings:
            assert sum(choice.usage.draft_tokens for (choice,) in done)


@pytest.mark.parametrize("role", ["worker-0", "scheduler"])
@pytest.mark.slow
def test_streams_complete_whichever_actor_dies(alone: list[Any], role: str) -> None:
    with engine(**PLAIN) as running:
        pids = {actor.role: actor.pid for actor in running.client.status().actors}
        results = running.client.run([request(number) for number in range(FIRST)])
        done = dict(next(results) for _ in range(4))
        os.kill(pids[role], signal.SIGKILL)
        done |= dict(results)
        found = [done[number] for number in range(FIRST)]
        judge(found)  # type: ignore[arg-type]
        assert told(found) == alone[:FIRST]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"speculative": "mtp:2,fixed"}],
                         ids=["random", "demo"])
def test_two_hundred_schemas(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Of the demo model, with drafts, and of one that has learnt nothing."""
    if "speculative" not in settings:
        from helpers_models import write_checkpoint

        write_checkpoint(tmp_path, vocab_size=SIZE, eos_token_id=2)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, tmp_path)
        settings = {**settings, "model": str(tmp_path)}
    with engine(max_num_seqs=24, **settings) as running:
        ends = judge(complete(running, [request(number) for number in range(200)]))
    assert ends["stop"] > 180 and set(ends) <= {"stop", "length"}


def test_with_all_other_parameters(plain: Engine) -> None:
    bent = request(3, n=4, logprobs=2, presence_penalty=1.0, repetition_penalty=1.3, top_p=0.9,
                   top_k=40, logit_bias={5: 3.0}, ignore_eos=True, prompt_logprobs=0)
    (choices,) = complete(plain, [bent])
    assert len({tuple(choice.token_ids) for choice in choices}) > 1
    for choice in choices:
        assert choice.finish_reason == "stop"
        check(schema(3), answer(3, choice.text))
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
    again = complete(plain, [bent])[0]
    assert [choice.text for choice in again] == [choice.text for choice in choices]


@pytest.mark.parametrize(("wanted", "pattern"), [
    (Structured(regex="[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}"),
    (Structured(choice=["yes", "no", "it depends"]), "yes|no|it depends"),
    (Structured(grammar='root ::= "a" b b? "."\nb ::= "x" | "y"'), r"a[xy]{1,2}\."),
    (Structured(grammar='start: "v" /[0-9]{4}/'), "v[0-9]{4}"),
])
def test_the_other_kinds(plain: Engine, wanted: Structured, pattern: str) -> None:
    for done in plain.client.generate(["a"] * 4, SamplingParams(
            temperature=2.0, max_tokens=200, structured=wanted)):
        assert done.finish_reason == "stop" and re.fullmatch(pattern, done.text), done.text


def test_any_object(plain: Engine) -> None:
    done = plain.client.generate("a", SamplingParams(
        seed=2, max_tokens=150, structured=Structured(json_object=True)))
    assert done.text.startswith("{")
    if done.finish_reason == "stop":
        assert isinstance(json.loads(done.text), dict)


def test_a_stop_string_and_an_abort_end_it_early(plain: Engine) -> None:
    wanted = Structured(regex="(ab){200}")
    params = SamplingParams(seed=1, max_tokens=300, structured=wanted, stop=["x", "ba"])
    done = plain.client.generate("x", params)
    assert done.finish_reason == "stop" and done.stop_reason == "ba"
    for _ in plain.client.stream("x", SamplingParams(max_tokens=300, structured=wanted)):
        break
    assert plain.client.generate("x", SamplingParams(max_tokens=4)).token_ids


def test_grammars_that_do_not_compile_are_refused(plain: Engine) -> None:
    for wanted in (Structured(regex="("), Structured(json_schema='{"type": "nothing"}')):
        with pytest.raises(InvalidRequest, match="^structured: "):
            plain.client.generate("x", SamplingParams(structured=wanted))
