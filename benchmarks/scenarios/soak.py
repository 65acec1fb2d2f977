"""Memory and descriptors of every actor while 200,000 requests of all kinds go through HTTP.

Streams and whole answers of chat, completions, responses and messages; several choices, logprobs,
schemas and patterns (some seen before, some new each time), stop strings, prompts that share a
prefix and prompts that do not, many tenants, idempotency keys, resumable streams, stored responses,
tokenizing, bodies that are refused; and callers who leave: before the first token, in a stream, by
order to abort.

Anonymous memory (RssAnon) and open descriptors of each actor are read every two seconds. What is
kept of requests that are over is bounded, so both must be flat once those bounds are reached: the
slope is Theil and Sen's (the median of all pairs' slopes), over the second half of the run, per
request, and reported as MB a minute at 40 requests a second, which may be at most 0.1.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from harness import Row, Rows, cpu_seconds, scenario

from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.http_client import Http, RefusedByServer

TENANTS, RATE, ALLOWED = 40, 40.0, 0.1
"""Keys; requests a second that slopes are scaled to, and the most MB a minute allowed."""
POOL, STORED = 16_384, 500
"""Tokens of the pages, and responses that are kept: soon full, as after days."""
EVERY = 2.0
"""Seconds between two looks at the processes."""
LEAVES = 0.06
"""Share of callers who leave, of streams and of whole answers."""
WORDS = ("fox", "moon", "river", "stone", "bread", "night", "garden", "letter", "winter", "song",
         "clock", "bridge", "child", "door", "apple", "sea")


ID = re.compile(rb'"id": ?"([^"]+)"')
"""The id of an answer, in its first event."""


class Sample(NamedTuple):
    """One look: requests begun by then, and of each role (bytes, descriptors)."""

    requests: int
    roles: dict[str, tuple[int, int]]


class Crowd:
    """Callers that send one request after another, over connections that are kept."""

    def __init__(self, url: str, requests: int, seed: int, kinds: Kinds | None = None) -> None:
        """kinds: of requests; default: `KINDS`."""
        self.begun, self.ended, self.kinds = 0, Counter[str](), kinds or KINDS
        self.ids, self.repeated = set[bytes](), 0
        """Of answers so far, and how often one came again."""
        self.chats: list[tuple[float, float]] = []
        """Of each whole chat: when it ended, and the seconds that it took."""
        self._http, self._requests, self._random = Http(url), requests, random.Random(seed)

    def stop(self) -> None:
        """Begins no request any more."""
        self._requests = 0

    async def run(self, at_once: int) -> None:
        await asyncio.gather(*(self._caller() for _ in range(at_once)))
        self._http.close()

    async def _caller(self) -> None:
        chance = self._random
        while self.begun < self._requests:
            self.begun += 1
            (kind, (_, path, make)), = chance.choices(
                [*self.kinds.items()], [share for share, _, _ in self.kinds.values()])
            headers = f"authorization: Bearer key-{chance.randrange(TENANTS)}\r\n"
            if chance.random() < 0.05:
                headers += f"idempotency-key: {chance.randrange(10 ** 9)}\r\n"
            began = time.monotonic()
            try:
                ended = await self._call(path, make(chance), headers)
            except RefusedByServer as error:
                ended = str(error.status)
            except EngineUnavailable:
                ended = "broken"
            self.ended[f"{kind} {ended}"] += 1
            if (kind, ended) == ("chat", "200"):
                self.chats.append((now := time.monotonic(), now - began))

    async def _call(self, path: str, body: dict[str, Any], headers: str) -> str:
        """How it ended; some callers leave, half of these before anything can have come."""
        leaves = self._random.random() < LEAVES
        early = self._random.random() * 0.05 if leaves and self._random.random() < 0.5 else None
        try:
            async with asyncio.timeout(early), aclosing(
                    self._http.events(path, body, headers)) as events:
                fresh = True
                async for event in events:
                    if fresh and (found := ID.search(event)):
                        self.repeated += found[1] in self.ids
                        self.ids.add(found[1])
                    fresh = False
                    if leaves:
                        return "left"
        except TimeoutError:
            return "left"
        return "200"


# --- what is asked --------------------------------------------------------------------------------

def prompt_text(chance: random.Random) -> str:
    if chance.random() < 0.85:
        return " ".join(chance.choices(WORDS, k=chance.randrange(1, 9)))
    told = " ".join(chance.choices(WORDS, k=chance.randrange(9, 60)))
    return ("Once upon a time there was a fox. " * 4 if chance.random() < 0.5 else "") + told


def _base(chance: random.Random) -> dict[str, Any]:
    return {"model": "default", "max_tokens": chance.choice((1, 1, 1, 2, 2, 4, 8)),
            "temperature": chance.choice((0, 1)), "stream": chance.random() < 0.5}


def chat_body(chance: random.Random) -> dict[str, Any]:
    return _base(chance) | {"messages": [{"role": "user", "content": prompt_text(chance)}],
                            "user": str(chance.random())}


def _completion(chance: random.Random) -> dict[str, Any]:
    return _base(chance) | {"prompt": prompt_text(chance), "stop": chance.choices(WORDS, k=2)}


def _several(chance: random.Random) -> dict[str, Any]:
    return _base(chance) | {"prompt": prompt_text(chance), "n": chance.randrange(2, 5),
                            "logprobs": chance.choice((None, 3))}


def _logprobs(chance: random.Random) -> dict[str, Any]:
    return chat_body(chance) | {"logprobs": True, "top_logprobs": chance.randrange(0, 6)}


def _schema(chance: random.Random) -> dict[str, Any]:
    number = chance.randrange(20) if chance.random() < 0.95 else chance.randrange(10 ** 9)
    return chat_body(chance) | _formatted({"type": "object", "required": [f"field{number}"],
                                       "properties": {f"field{number}": {"type": "integer"}}})


def _formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema",
                                "json_schema": {"name": "it", "schema": schema}}}


def _pattern(chance: random.Random) -> dict[str, Any]:
    return _completion(chance) | {
        "structured_outputs": {"regex": f"[a-f]{{{chance.randrange(1, 9)}}}"}}


def _response(chance: random.Random) -> dict[str, Any]:
    return {"input": prompt_text(chance), "max_output_tokens": 4, "stream": chance.random() < 0.5,
            "store": chance.random() < 0.5}


def _message(chance: random.Random) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 4, "stream": chance.random() < 0.5,
            "messages": [{"role": "user", "content": prompt_text(chance)}]}


def _resumable(chance: random.Random) -> dict[str, Any]:
    return chat_body(chance) | {"stream": True, "stream_options": {"resumable": True}}


def _tokenize(chance: random.Random) -> dict[str, Any]:
    return {"prompt": prompt_text(chance)}


def _refused(chance: random.Random) -> dict[str, Any]:
    wrong: dict[str, Any] = chance.choice((
        {"temperature": -1}, {"messages": []}, {"max_tokens": "many"}, {"model": "no such"},
        _formatted({"type": f"t{chance.random()}"})))
    return chat_body(chance) | wrong


Kinds = dict[str, tuple[int, str, Callable[[random.Random], dict[str, Any]]]]
"""Name -> (its share, path, what makes a body)."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS: Kinds = {
    "chat": (25, CHAT, chat_body), "completion": (25, COMPLETIONS, _completion),
    "several": (8, COMPLETIONS, _several), "logprobs": (8, CHAT, _logprobs),
    "schema": (6, CHAT, _schema), "pattern": (4, COMPLETIONS, _pattern),
    "response": (6, "/v1/responses", _response), "message": (6, "/v1/messages", _message),
    "resumable": (4, CHAT, _resumable), "tokenize": (4, "/tokenize", _tokenize),
    "refused": (4, CHAT, _refused)}
"""Of a hundred requests."""


# --- the processes ---


def look(pids: dict[str, int], requests: int) -> Sample:
    """Memory and descriptors of each role now."""
    found = {}
    for role, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        found[role] = int(anonymous.split()[1]) << 10, len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(requests, found)


def slope(points: list[tuple[int, int]], most: int = 300) -> float:
    """The median of the slopes of all pairs of points, of at most `most` of them (Theil 1950; Sen,
    J. Am. Stat. Assoc. 63, 1968)."""
    thinned = points[::-(-len(points) // most)] if points else []
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(thinned, 2) if a[0] != b[0]]
    return statistics.median(slopes) if slopes else 0.0


def figures(samples: list[Sample]) -> dict[str, Row]:
    """Returns for each role memory at the start, middle and end, and slopes of the second half."""
    last = samples[-1].requests
    half = [sample for sample in samples if sample.requests >= last / 2]
    rows = {}
    for role in samples[0].roles:
        memory = [(sample.requests, sample.roles[role][0]) for sample in half]
        descriptors = [(sample.requests, sample.roles[role][1]) for sample in half]
        rows[role] = {
            "start_mb": samples[0].roles[role][0] / 1e6, "middle_mb": memory[0][1] / 1e6,
            "end_mb": memory[-1][1] / 1e6,
            "bytes_a_request": slope(memory),
            "mb_a_minute": slope(memory) * RATE * 60 / 1e6,
            "descriptors": descriptors[-1][1],
            "descriptors_a_minute": slope(descriptors) * RATE * 60}
    return rows


async def drive(crowd: Crowd, at_once: int, pids: dict[str, int]) -> list[Sample]:
    work = asyncio.create_task(crowd.run(at_once))
    samples = [look(pids, 0)]
    while not work.done():
        await asyncio.wait({work}, timeout=EVERY)
        samples.append(look(pids, crowd.begun))
        if len(samples) % 30 == 0:
            print(f"{crowd.begun:,} requests; MB: " + "  ".join(
                f"{role} {row[0] / 1e6:.1f}" for role, row in samples[-1].roles.items()),
                flush=True)
    await work
    return samples


@scenario
def memory(model: str = "", requests: int = 200_000, at_once: int = 24, seed: int = 1) -> Rows:
    """Memory and descriptors of every actor under requests of eleven kinds; both must be flat."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"tenant{i} key-{i}\n" for i in range(TENANTS)))
        with Engine(model, port=0, api_keys_file=str(keys), max_num_seqs=16,
                    access_log=False, max_total_tokens=POOL, silence=10.0,
                    responses_max=STORED) as engine:
            path = engine_dir(engine.name)
            assert isinstance(path, Path) and engine.status is not None
            where = actor.where(path)
            assert where is not None
            pids = {one.role: one.pid for one in engine.status.actors} | {
                "launcher": int(engine.pid or 0)}
            crowd, began = Crowd(where.url, requests, seed), time.monotonic()
            samples = asyncio.run(drive(crowd, at_once, pids))
            seconds = time.monotonic() - began
            busy = {role: cpu_seconds(pid) for role, pid in pids.items()}
            assert engine.client.generate("Once upon a time", SamplingParams(max_tokens=4)).text
    rows = figures(samples)
    for role, spent in busy.items():
        yield {"actor": role, **rows[role], "cpu_ms_a_request": 1000 * spent / requests}
    yield {"requests": requests, "seconds": seconds, "requests_per_s": requests / seconds,
           "ended": dict(sorted(crowd.ended.items()))}
    if not all(row["mb_a_minute"] <= ALLOWED and row["descriptors_a_minute"] <= 0.01
               for row in rows.values()):
        raise SystemExit("not flat")
