"""A cluster with a real model in bfloat16, `--exact on`: what a request says does not depend on who
dies, log-probabilities to the bit."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from helpers_cli import Cli, cli, eventually

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.params import Structured

__all__ = ["cli"]
MODEL = ("--device", "cpu", "--dtype", "bfloat16", "--exact", "on", "--threads", "2",
         "--name", "c")
ASKED: list[tuple[Any, SamplingParams]] = [(prompt, SamplingParams(logprobs=3, **params))
                                           for prompt, params in [
    ("Once upon a time", {"max_tokens": 250, "ignore_eos": True, "temperature": 0.0}),
    ("The sun", {"max_tokens": 250, "ignore_eos": True, "seed": 3, "n": 2}),
    ("A list:", {"max_tokens": 200, "seed": 5, "temperature": 1.0,
                 "structured": Structured(json_object=True)}),
    ("Words", {"max_tokens": 250, "ignore_eos": True, "seed": 7, "frequency_penalty": 0.7,
               "presence_penalty": 0.4, "repetition_penalty": 1.1}),
    ("Stops", {"max_tokens": 250, "ignore_eos": True, "seed": 9, "stop": ["qqzz"]}),
    ("Ends", {"max_tokens": 250, "ignore_eos": True, "seed": 11, "min_tokens": 30})]]


def answers(cli: Cli, kill: Any = None) -> list[Any]:
    """Text, tokens, logprobs and reasons of all choices of all requests, streamed at once."""
    found: list[Any] = [None] * len(ASKED)
    begun = threading.Semaphore(0)

    def ask(number: int) -> None:
        prompt, params = ASKED[number]
        told: dict[int, list[Any]] = {}
        begins = True
        with Client("c", cli.run_dir, resume_timeout=60.0) as client:
            for delta in client.stream(prompt, params):
                one = told.setdefault(delta.index, ["", [], [], None])
                one[0] += delta.text
                one[1] += delta.token_ids
                one[2] += delta.logprobs or ()
                one[3] = delta.finish_reason or one[3]
                if begins and len(one[1]) >= 8:
                    begins = False
                    begun.release()
        found[number] = told

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(ASKED))]
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=60) for _ in range(3))
    if kill is not None:
        kill()
    for thread in threads:
        thread.join(120)
    return found


@pytest.mark.slow
def test_a_death_changes_nothing(cli: Cli) -> None:
    """Greedy and sampled, several choices, logprobs, a grammar, penalties, stop strings; by one
    engine without drafts, and by two that draft."""
    with cli.serve(*MODEL, "--speculative", "off"):
        whole = answers(cli)
    assert all(whole) and all(one[3] and len(one[1]) == len(one[2]) > 0
                              for told in whole for one in told.values())
    with cli.serve(*MODEL, "--speculative", "mtp:2", "--replicas", "2"):
        assert eventually(lambda: cli.run("ps", "--json").returncode == 0)
        pids = {(row["name"], row["role"]): row["pid"] for row in cli.actors()}
        got = answers(cli, lambda: os.kill(pids["c", "replica-0"], signal.SIGKILL))
        assert got == whole
        gauges = next(row for row in cli.actors()
                      if (row["name"], row["role"]) == ("c", "scheduler"))["gauges"]
        assert gauges["migrated_requests"] >= 1
