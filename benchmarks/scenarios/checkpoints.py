"""Which states to keep: policies for checkpoints of recurrent models, on three workloads.

A model with recurrent layers can only start from a prefix whose state was kept, and a state costs
as much memory as thousands of tokens of pages: so where they are taken matters. The workloads go
through the scheduler core with the null worker (pages enough for everything, chunks of at most
2,048 tokens a step, 16 sequences at once):

- chat: 200 conversations, system prompt of 300 tokens, 6 turns of 150 asked and 60 answered, all
  first turns, then all second turns in another order, and so on;
- agents: 20 agents of 4,000 tokens of instructions, 10 tasks each of 300 tokens, with two tool
  answers of 200 that go on from it;
- few-shot: an instruction of 500 tokens, 10 tasks of 1,500 tokens of examples, 60 questions each.

Reported for each policy: prompt tokens computed again or for the first time, and as a share of all
("pages" is what a model without recurrent layers computes); the hit ratio, tokens that were found
of all that were asked for, and requests that found any; states saved, evicted, and the most bytes
that they took, for Qwen3.5-27B on one of two GPUs with float32 states.

The figures of the policy "auto" are those that `actorium plan` shows
(`gpu/plan/checkpoint_reuse.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from harness import Row, Rows, scenario
from scenarios.loop import Loop

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.params import ResolvedParams

POLICIES = ("none", "end", "chunks", "auto")
COUNTS = [2, 4, 8, 16, 32, 64, 128, 256]
RUNNING = 16
STATE_BYTES = 48 * (24 * 128 * 128 * 4 + 3 * 5120 * 2)
"""Bytes of a checkpoint: 48 GatedDeltaNet layers with 24 heads each, and their convolutions."""
Ask = Callable[[list[list[int]], int], list[list[int]]]
"""Runs prompts, each to so many tokens, and gives the answers."""


def text(rng: random.Random, count: int) -> list[int]:
    """Returns so many tokens that no other prompt has."""
    return [rng.randrange(1 << 20) for _ in range(count)]


def chat(rng: random.Random, ask: Ask) -> None:
    system = text(rng, 300)
    talks = [list(system) for _ in range(200)]
    for _ in range(6):
        rng.shuffle(talks)
        for talk in talks:
            talk += text(rng, 150)
        for talk, answer in zip(talks, ask(talks, 60), strict=True):
            talk += answer


def agents(rng: random.Random, ask: Ask) -> None:
    """Tasks of agents with long instructions, mixed, each with two tool answers."""
    instructions = [text(rng, 4000) for _ in range(20)]
    tasks = [instructions[i % 20] + text(rng, 300) for i in range(200)]
    rng.shuffle(tasks)
    for first in range(0, len(tasks), RUNNING):
        some = tasks[first:first + RUNNING]
        for _ in range(3):
            some = [task + answer + text(rng, 200)
                    for task, answer in zip(some, ask(some, 40), strict=True)]


def few_shot(rng: random.Random, ask: Ask) -> None:
    """Questions after the examples of their task, mixed."""
    instruction = text(rng, 500)
    examples = [instruction + text(rng, 1500) for _ in range(10)]
    questions = [examples[i % 10] + text(rng, 60) for i in range(600)]
    rng.shuffle(questions)
    ask(questions, 8)


WORKLOADS: dict[str, Callable[[random.Random, Ask], None]] = {
    "chat": chat, "agents": agents, "few-shot": few_shot}


def run(work: str, policy: str, count: int | None) -> Row:
    """One workload under one policy with `count` checkpoints; None: no recurrent layers."""
    loop = Loop(Config(
        memory=MemoryConfig(max_total_tokens=1 << 22, checkpoint_policy=policy),
        scheduler=SchedulerConfig(max_num_seqs=RUNNING)), checkpoints=count)
    numbers, found, held = iter(range(1 << 30)), [0], [0.0]

    def ask(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        rids = [f"r{next(numbers)}" for _ in prompts]
        answers: dict[str, list[int]] = {}
        params = ResolvedParams(max_tokens=tokens)
        for rid, prompt in zip(rids, prompts, strict=True):
            loop.submit(rid, np.array(prompt, np.int32).tobytes(), params, seed=int(rid[1:]))
        while not loop.idle:
            for heard in loop.step():
                answers[heard.rid] = heard.tokens
                found[0] += bool(heard.cached)
        held[0] = max(held[0], loop.gauges()["checkpoints"])
        return [answers[rid] for rid in rids]

    WORKLOADS[work](random.Random(work), ask)
    told = loop.gauges()
    asked, hit = told["cache_lookup_tokens"], told["cache_hit_tokens"]
    return {"workload": work, "policy": policy if count is not None else "pages",
            "checkpoints": count, "prompt_tokens": int(asked), "computed": int(asked - hit),
            "computed_share": round(1 - hit / asked, 4), "hit_ratio": round(hit / asked, 4),
            "requests_hit": round(found[0] / next(numbers), 4),
            "saved": int(told["checkpoints_saved"]), "evicted": int(told["checkpoints_evicted"]),
            "bytes": int(held[0]) * STATE_BYTES}


@scenario
def policies(counts: list[int] = COUNTS) -> Rows:
    """Prompt tokens computed, hit ratio and bytes, by workload, policy and states kept."""
    for work in WORKLOADS:
        yield run(work, "auto", None)
        for policy in POLICIES:
            for count in counts if policy != "none" else [0]:
                yield run(work, policy, count)
