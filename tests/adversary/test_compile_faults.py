"""Who dies while grammars are checked and compiled: every answer is still what its schema says, and
those beside it go on."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from helpers_served import Served, serving

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.params import Structured

ROLES = ("tokenizer", "scheduler", "worker-0", "detokenizer")
ASKED = 6


def schema(draw: random.Random) -> dict[str, Any]:
    """Nobody has asked for it before; its compilation takes some tens of milliseconds."""
    names = [f"f{draw.randrange(10 ** 9)}" for _ in range(40)]
    return {"type": "object", "required": names[:2], "additionalProperties": False,
            "properties": {name: {"enum": [f"{name}{i}" for i in range(6)]} for name in names}}


def pid_of(served: Served, role: str) -> int:
    (found,) = [one.pid for one in served.engine.client.status().actors if one.role == role]
    return int(found)


def checkers(tokenizer: int) -> list[int]:
    """Processes that the tokenizer has started: they check grammars."""
    with open(f"/proc/{tokenizer}/task/{tokenizer}/children") as file:
        own = [int(pid) for pid in file.read().split()]
    for task in os.listdir(f"/proc/{tokenizer}/task"):
        with open(f"/proc/{tokenizer}/task/{task}/children") as file:
            own += [int(pid) for pid in file.read().split()]
    return sorted(set(own))


def ask(served: Served, wanted: dict[str, Any], seed: int, answers: list[str]) -> None:
    with Client(served.engine.name) as client:
        done = client.generate("Once upon a time", SamplingParams(
            max_tokens=400, seed=seed, structured=Structured(json_schema=json.dumps(wanted))))
    answers.append(done.text if done.finish_reason == "stop" else f"ended by {done.finish_reason}")


@pytest.mark.mended("a grammar whose checker was killed by somebody was refused as too large")
@pytest.mark.parametrize("victim", [
    "tokenizer", "checker", *(pytest.param(role, marks=pytest.mark.slow) for role in ROLES[1:])])
def test_struck_while_a_grammar_is_compiled(served: Served, victim: str, tried: Callable[..., None],
                                            amount: Callable[[int, int], int]) -> None:
    draw = random.Random(victim)
    for number in range(amount(1, 5)):
        schemas, answers = [schema(draw) for _ in range(ASKED)], []
        threads = [threading.Thread(target=ask, args=(served, one, number, answers))
                   for one in schemas]
        tokenizer = pid_of(served, "tokenizer")
        victims = [tokenizer if victim == "checker" else pid_of(served, victim)]
        for thread in threads:
            thread.start()
        time.sleep(draw.uniform(0.005, 0.08))
        if victim == "checker":
            victims = checkers(tokenizer)
            assert victims
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert len(answers) == ASKED
        for text in answers:
            found = json.loads(text)
            assert any(set(one["required"]) <= set(found) <= set(one["properties"]) and
                       all(found[name] in one["properties"][name]["enum"] for name in found)
                       for one in schemas), text
        tried()


@pytest.fixture(scope="module")
def served() -> Any:
    with serving(max_num_seqs=16, max_restarts=200, max_model_len=4096) as made:
        made.engine.client.generate("Once", SamplingParams(max_tokens=8, structured=Structured(
            json_schema='{"type": "integer"}')))
        yield made
