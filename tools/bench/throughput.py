"""Offline throughput: the requests of a dataset all at once, under the names of SGLang's result."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from msgspec import Struct

from actorium.actors.client.client import Client
from actorium.actors.client.requests import Request
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams
from actorium.tools.bench.datasets.sample import SampleRequest

POLL = 0.2
"""Seconds between looks at the scheduler's counters, which come with its heartbeats."""


class Counted(Struct):
    seconds: float
    prompt_tokens: int = 0
    tokens: int = 0
    errors: list[str] = []


def requests_of(samples: Sequence[SampleRequest], base: SamplingParams) -> Iterator[Request]:
    from msgspec.structs import replace

    for sample in samples:
        params = replace(base, max_tokens=sample.output_len)
        yield Request(prompt=sample.prompt, messages=sample.messages, params=params)


def run_batch(client: Client, samples: Sequence[SampleRequest], base: SamplingParams) -> Counted:
    """Every request, all at once as far as the client's window goes; an error ends that request
    alone."""
    found = Counted(0.0, errors=[])
    began = perf_counter()
    for _, result in client.run(requests_of(samples, base)):
        if isinstance(result, ActoriumError):
            found.errors.append(f"{result.code}: {result.message}")
            continue
        found.prompt_tokens += result[0].usage.prompt_tokens
        found.tokens += sum(len(choice.token_ids) for choice in result)
    found.seconds = perf_counter() - began
    return found


def throughput(backend: str, counted: Counted, number: int, last: float | None) -> dict[str, Any]:
    """The figures of `number` requests. last: output tokens a second in the latest stretch that was
    looked at; None (a run shorter than two heartbeats) = those of the whole run."""
    seconds, inputs, outputs = counted.seconds, counted.prompt_tokens, counted.tokens
    good = number - len(counted.errors)
    return {
        "backend": backend, "successful_requests": good,
        "failed_requests": len(counted.errors) or None, "total_latency": seconds,
        "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": good / seconds, "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds, "total_throughput": (inputs + outputs) / seconds,
        "last_gen_throughput": outputs / seconds if last is None else last}


def latest_rate(readings: Sequence[Mapping[str, float]]) -> float | None:
    """Tokens a second between the last two readings of the scheduler's gauges that differ: of the
    time in which it had work. None if there are no two."""
    marks = [(r.get("tokens", 0.0), r.get("busy_us", 0.0) + r.get("idle_us", 0.0))
             for r in readings]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(marks, marks[1:], strict=False)
             if b[0] > a[0] and b[1] > a[1]]
    return 1e6 * steps[-1][0] / steps[-1][1] if steps else None


class Watch:
    """Reads the scheduler's gauges of a running engine, from a thread of its own."""

    def __init__(self, target: str, run_dir: str | None) -> None:
        self._client = Client(target, run_dir)
        self._over = threading.Event()
        self._readings: list[Mapping[str, float]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()

    @property
    def rate(self) -> float | None:
        return latest_rate(self._readings)

    def _look(self) -> None:
        while not self._over.wait(POLL):
            try:
                actors = self._client.status().actors
            except ActoriumError:
                continue
            self._readings += [actor.gauges for actor in actors if actor.role == "scheduler"]
