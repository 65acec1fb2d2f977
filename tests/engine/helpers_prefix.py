"""Requests with shared prefixes, run through whole engines whose memory settings differ."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client, Completion, Request
from actorium.actors.messages import TokenLogprob

SETTINGS: dict[str, Any] = {"device": "cpu", "debug_memory": True, "max_num_seqs": 12,
                            "max_num_batched_tokens": 256, "threads": 2}
"""Small steps, so that prompts come in chunks; all books audited."""


class Ran(NamedTuple):
    """What came of one run."""

    completions: list[Completion]
    gauges: dict[str, float]

    @property
    def tokens(self) -> list[list[int]]:
        return [list(c.token_ids) for c in self.completions]

    @property
    def told(self) -> list[tuple[list[int], list[TokenLogprob] | None]]:
        """Tokens and log-probabilities."""
        return [(list(c.token_ids), c.logprobs) for c in self.completions]

    @property
    def cached(self) -> int:
        """Prompt tokens found in the cache."""
        return sum(c.usage.cached_tokens for c in self.completions)


@contextlib.contextmanager
def engine(**settings: Any) -> Iterator[Engine]:
    """The demo model, with its run directory in a place of its own."""
    base = tempfile.mkdtemp(dir="/tmp", prefix="act")
    try:
        with Engine(run_dir=base, **{**SETTINGS, **settings}) as running:
            yield running
    finally:
        shutil.rmtree(base, ignore_errors=True)


def gauges(client: Client, timeout: float = 20.0) -> dict[str, float]:
    """The scheduler's, once it has told that it is idle."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        (scheduler,) = [a for a in client.status().actors if a.role == "scheduler"]
        if scheduler.phase == "idle":
            return scheduler.gauges
        time.sleep(0.02)
    raise AssertionError("the scheduler is not idle")


def run(requests: list[Request], **settings: Any) -> Ran:
    """All of them at once, in an engine of their own."""
    with engine(**settings) as running:
        return run_in(running.client, requests)


def run_in(client: Client, requests: list[Request]) -> Ran:
    """All of them at once. Raises what the first one failed of."""
    found: dict[int, Completion] = {}
    for number, result in client.run(requests, window=len(requests)):
        if isinstance(result, Exception):
            raise result
        found[number] = result[0]
    return Ran([found[number] for number in range(len(requests))], gauges(client))


def mixed(count: int, seed: int, vocab: int = 1900, **params: Any) -> list[Request]:
    """Prompts of 1 to 280 tokens, most of which share a prefix (or a part of one) with others."""
    chance = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [chance.randrange(3, vocab) for _ in range(chance.randrange(low, high))]

    families = [tokens(24, 220) for _ in range(10)]
    requests = []
    for number in range(count):
        prefix = chance.choice(families) if chance.random() < 0.75 else []
        if chance.random() < 0.25:
            prefix = prefix[:chance.randrange(len(prefix) + 1)]
        # Bursts of short prompts with long answers: admitted for less than they will want.
        burst = number % 40 >= 22
        length = chance.randrange(40, 90) if burst else chance.choice((1, 2, 6, 12))
        requests.append(Request(
            prompt=tokens(1, 12) if burst else prefix + tokens(1, 60),
            params=SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, **params)))
    return requests


def closeness(completion: Completion) -> list[float]:
    """At each position of a greedy completion with logprobs=2: how far ahead the token was of the
    runner-up, in nats."""
    assert completion.logprobs is not None
    return [entry.top[0][1] - entry.top[1][1] for entry in completion.logprobs]
