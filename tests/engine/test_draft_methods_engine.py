"""Engines that draft, by every method: with two ranks, and after the death of a worker in
mid-stream, what they say is to the bit what an engine of one rank says that drafts nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers_drafting import follow_tokens
from helpers_eagle import with_head
from helpers_kinds import write_bf16_kind
from helpers_models import load, write_checkpoint
from helpers_runtime import short_dir
from helpers_speed import slowness
from helpers_text import byte_level, write_tokenizer

from actorium import Client, Engine, SamplingParams
from actorium.actors.config.parsed_values import DRAFTS
from actorium.actors.messages import ActorStatus
from actorium.actors.params import Structured

PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (3, 40, 131)]
KEYS = [f"{name}_of_the_measurement" for name in ("temperature", "humidity", "velocity")]
SCHEMA = json.dumps({"type": "object", "required": KEYS, "additionalProperties": False,
                     "properties": {key: {"type": "boolean"} for key in KEYS}})
LONG = {"max_tokens": 250, "ignore_eos": True, "logprobs": 0}
EACH = [SamplingParams(temperature=0, **LONG), SamplingParams(temperature=0.9, seed=5, **LONG),
        SamplingParams(temperature=0.8, seed=6, max_tokens=250, logprobs=0,
                       structured=Structured(json_schema=SCHEMA))]
KILLED_AT = 30
"""Tokens of the first answer that its client has when a worker is killed."""


class Models(NamedTuple):
    target: Path
    """A hybrid with an MTP layer."""
    by: dict[str, str]
    """Method -> the model that drafts by it."""
    plain: list[Any]
    """What is to come out."""


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with short_dir() as base:
        target, draft, head = base / "target", base / "draft", base / "head"
        write_bf16_kind(target, "qwen35")
        tokenizer = byte_level()
        write_checkpoint(draft, "LlamaForCausalLM", 3, dtype=torch.bfloat16, head_dim=32,
                         vocab_size=283, eos_token_id=tokenizer.token_to_id("<eos>"))
        write_tokenizer(draft, tokenizer)
        follow_tokens(draft)
        with_head(load(target), head)
        with serving(target, speculative="off") as engine:
            plain = answers(engine.client.generate(PROMPTS, EACH))
        yield Models(target, {"draft": str(draft), "eagle3": str(head)}, plain)


def serving(target: Path, **config: Any) -> Engine:
    """To the bit the same with one rank and two."""
    return Engine(target, device="cpu", threads=1, exact="on", exact_ranks=2, max_num_seqs=4,
                  kv_cache_bytes=8 << 20, crash_reports=False, **config)


def answers(completions: list[Any]) -> list[Any]:
    return [(list(own.token_ids), [entry.logprob for entry in own.logprobs])
            for own in completions]


def actor(engine: Engine, role: str) -> ActorStatus:
    return next(own for own in engine.client.status().actors if own.role == role)


def streamed(engine: Engine, kill: str) -> tuple[list[Any], int]:
    """(the answers, asked for at the same time, the first as a stream; how many drafts of them were
    accepted). kill: the role whose process is killed when the first has begun."""
    tokens, entries, usage = list[int](), list[Any](), None
    pid = actor(engine, kill).pid if kill else 0
    with ThreadPoolExecutor(1) as pool, Client(engine.name) as beside:
        others = pool.submit(beside.generate, PROMPTS[1:], EACH[1:])
        for delta in engine.client.stream(PROMPTS[0], EACH[0]):
            tokens += delta.token_ids
            entries += delta.logprobs or []
            usage = delta.usage or usage
            if pid and len(tokens) >= KILLED_AT:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        rest = others.result()
    assert usage is not None and not pid
    return ([(tokens, [entry.logprob for entry in entries]), *answers(rest)],
            usage.accepted_tokens + sum(own.usage.accepted_tokens for own in rest))


def taken_back(engine: Engine) -> None:
    """Waits until the scheduler says that the worker died with sequences."""
    until = time.monotonic() + 20 * slowness()
    while not actor(engine, "scheduler").gauges.get("preemptions_worker"):
        assert time.monotonic() < until, "no sequence was under way"
        time.sleep(0.02)


SETTINGS = {**{method: f"{method}:3,fixed" for method in DRAFTS},
            "several": "auto+eagle3:3+ngram:4+suffix:6+grammar:4"}
QUICK = ("eagle3", 2, True)
ACCEPTED = {"grammar": 40}
"""At the least; else more than before the death."""


@pytest.mark.parametrize(("method", "ranks", "killed"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (case != QUICK))
    for case in ((method, ranks, killed) for method in SETTINGS
                 for ranks, killed in ((1, True), (2, False), (2, True)))])
def test_the_answers_are_those_without_drafts(models: Models, method: str, ranks: int, killed: bool
                                              ) -> None:
    drafts_by = models.by.get("eagle3" if method == "several" else method, "")
    with serving(models.target, speculative=SETTINGS[method], tensor_parallel_size=ranks,
                 speculative_model=drafts_by) as engine:
        found, accepted = streamed(engine, f"worker-{ranks - 1}" if killed else "")
        assert found == models.plain
        assert accepted >= ACCEPTED.get(method, 100)
        if killed:
            taken_back(engine)
