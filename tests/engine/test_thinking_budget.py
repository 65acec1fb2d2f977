"""Budgets of thoughts in whole engines: the same tokens and log-probabilities with drafts, and
whichever actor dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_prefix import engine

from actorium.actors.client.requests import Completion, Request
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams, Structured

EXACT: dict[str, Any] = {"exact": "on", "max_num_seqs": 8, "reasoning_parser": "qwen3"}
CLOSE = "</think>"
REQUESTS = 8


def request(number: int) -> Request:
    """Every second one has a format; thoughts are those that the prompt has begun."""
    wanted = Structured(regex="(yes|no)[.]") if number % 2 else None
    return Request(prompt=f"Task {number}: <think>", params=SamplingParams(
        temperature=1.0, seed=number, max_tokens=60, n=1 + number % 3 // 2, logprobs=2,
        thinking_token_budget=3 * number, structured=wanted, ignore_eos=not wanted))


def told(running: Engine, killed: str = "") -> list[Any]:
    """Tokens and log-probabilities. killed: the role of the actor that dies on the way."""
    results = running.client.run([request(number) for number in range(REQUESTS)])
    found = dict([next(results)])
    if killed:
        pids = {actor.role: actor.pid for actor in running.client.status().actors}
        os.kill(pids[killed], signal.SIGKILL)
    found |= dict(results)
    choices: list[Completion] = []
    for number in range(REQUESTS):
        result = found[number]
        assert not isinstance(result, Exception), result
        choices += result
        for choice in result:
            judge(number, choice)
    return [(choice.token_ids, choice.logprobs) for choice in choices]


def judge(number: int, choice: Completion) -> None:
    thought, mark, _ = choice.text.partition(CLOSE)
    if number % 2:  # the format says what stands behind the blanks that may follow on a thought
        assert choice.text.endswith(("yes.", "no."))
    else:
        assert mark and choice.finish_reason == "length", choice.text
    assert number or not thought


@pytest.fixture(scope="module")
def drafting() -> Iterator[Engine]:
    with engine(**EXACT, speculative="mtp:2,fixed") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(drafting: Engine) -> list[Any]:
    return told(drafting)


def test_tokens_are_the_same_whichever_actor_dies(drafting: Engine, undisturbed: list[Any]
                                                  ) -> None:
    for role in ("worker-0", "scheduler"):
        assert told(drafting, role) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"speculative": "off"}, {
    "speculative": "mtp:3,fixed", "force_preempt_every": 7}], ids=["no drafts", "preempted"])
def test_however_it_is_computed(undisturbed: list[Any], settings: dict[str, Any]) -> None:
    with engine(**EXACT, **settings) as running:
        assert told(running) == undisturbed


def test_a_forced_token_has_the_models_own_log_probability(drafting: Engine) -> None:
    """As under a grammar: what the model says of it before anything is forbidden."""
    asked: dict[str, Any] = {"seed": 1, "max_tokens": 20, "ignore_eos": True}
    done = drafting.client.generate("Hm: <think>", SamplingParams(
        **asked, logprobs=0, thinking_token_budget=2))
    free = drafting.client.generate("Hm: <think>", SamplingParams(
        **asked, logprob_token_ids=[done.token_ids[2]]))
    assert done.token_ids[:2] == free.token_ids[:2] and done.token_ids[2] != free.token_ids[2]
    assert done.logprobs is not None and free.logprobs is not None
    [other] = free.logprobs[2].top
    assert other == (done.token_ids[2], done.logprobs[2].logprob)


def test_a_budget_of_the_whole_completion_changes_nothing(drafting: Engine) -> None:
    answers = [drafting.client.generate("Hm: <think>", SamplingParams(
        seed=3, max_tokens=12, thinking_token_budget=budget)) for budget in (None, 12, 99)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
