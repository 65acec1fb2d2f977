"""Memory and descriptors of every actor while 200,000 requests of all kinds go through HTTP.

    python benchmarks/soak.py [--requests 200000] [--at-once 24] [--json FILE] [MODEL]

Streams and whole answers of chat, completions, responses and messages; several choices, logprobs,
schemas and patterns (some seen before, some new each time), stop strings, prompts that share a
prefix and prompts that do not, many tenants, idempotency keys, resumable streams, stored responses,
tokenizing, bodies that are refused; and callers who leave: before the first token, in a stream, by
order to abort.

Anonymous memory (RssAnon) and open descriptors of each actor are read every two seconds. What is
kept of requests that are over is bounded, so both must be flat once those bounds are reached: the
slope is Theil and Sen's (the median of all pairs' slopes), over the second half of the run, per
request, and told as MB a minute at 40 requests a second, which may be at most 0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir

TENANTS, RATE, ALLOWED = 40, 40.0, 0.1
"""Keys; requests a second, and MB a minute, that slopes are told for and may be."""
POOL, STORED = 16_384, 500
"""Tokens of the pages, and responses that are kept: soon full, as after days."""
EVERY = 2.0
"""Seconds between two looks at the processes."""
LEAVES = 0.06
"""Of streams and whole answers, each."""
WORDS = ("fox", "moon", "river", "stone", "bread", "night", "garden", "letter", "winter", "song",
         "clock", "bridge", "child", "door", "apple", "sea")


class Sample(NamedTuple):
    """One look: requests begun by then, and of each role (bytes, descriptors)."""

    requests: int
    roles: dict[str, tuple[int, int]]


class Left(Exception):
    """The caller has gone, as it wanted to."""


class Crowd:
    """Callers that send one request after another, each over a connection that it keeps."""

    def __init__(self, host: str, port: int, requests: int, seed: int) -> None:
        self.begun, self.ended = 0, Counter[str]()
        self._host, self._port, self._requests = host, port, requests
        self._random = random.Random(seed)

    async def run(self, at_once: int) -> None:
        await asyncio.gather(*(self._caller() for _ in range(at_once)))

    async def _caller(self) -> None:
        reader: asyncio.StreamReader | None = None
        writer: asyncio.StreamWriter | None = None
        while self.begun < self._requests:
            self.begun += 1
            kind, path, body, headers = self._draw()
            try:
                if writer is None or reader is None:
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                status = await self._call(reader, writer, path, body, headers)
                self.ended[f"{kind} {status}"] += 1
            except Left:
                self.ended[f"{kind} left"] += 1
                assert writer is not None
                writer.transport.abort()
                reader = writer = None
            except (OSError, asyncio.IncompleteReadError):
                self.ended[f"{kind} broken"] += 1
                reader = writer = None
        if writer is not None:
            writer.close()

    # --- what is asked ---

    def _draw(self) -> tuple[str, str, bytes, str]:
        """(kind, path, body, further headers)"""
        chance = self._random
        kind, make = chance.choices(KINDS, WEIGHTS)[0]
        path, body = make(chance)
        headers = f"authorization: Bearer key-{chance.randrange(TENANTS)}\r\n"
        if chance.random() < 0.05:
            headers += f"idempotency-key: {chance.randrange(10 ** 9)}\r\n"
        return kind, path, json.dumps(body).encode(), headers

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str,
                    body: bytes, headers: str) -> int:
        head = (f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n{headers}\r\n")
        writer.write(head.encode() + body)
        leaves = self._random.random() < LEAVES
        if leaves and self._random.random() < 0.5:
            await asyncio.sleep(self._random.random() * 0.05)
            raise Left
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        told = {name.lower(): value.strip() for name, _, value in
                (line.partition(":") for line in lines[1:] if line)}
        if told.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await reader.readexactly(size + 2)
                if leaves:
                    raise Left
            await reader.readexactly(2)
        else:
            await reader.readexactly(int(told["content-length"]))
        return int(lines[0].split()[1])


def _text(chance: random.Random) -> str:
    if chance.random() < 0.85:
        return " ".join(chance.choices(WORDS, k=chance.randrange(1, 9)))
    told = " ".join(chance.choices(WORDS, k=chance.randrange(9, 60)))
    return ("Once upon a time there was a fox. " * 4 if chance.random() < 0.5 else "") + told


def _base(chance: random.Random) -> dict[str, Any]:
    return {"model": "default", "max_tokens": chance.choice((1, 1, 1, 2, 2, 4, 8)),
            "temperature": chance.choice((0, 1)), "stream": chance.random() < 0.5}


def _chat(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", _base(chance) | {
        "messages": [{"role": "user", "content": _text(chance)}], "user": str(chance.random())}


def _completion(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", _base(chance) | {
        "prompt": _text(chance), "stop": chance.choices(WORDS, k=2)}


def _several(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", _base(chance) | {
        "prompt": _text(chance), "n": chance.randrange(2, 5), "logprobs": chance.choice((None, 3))}


def _logprobs(chance: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _chat(chance)
    return path, body | {"logprobs": True, "top_logprobs": chance.randrange(0, 6)}


def _schema(chance: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _chat(chance)
    number = chance.randrange(20) if chance.random() < 0.95 else chance.randrange(10 ** 9)
    return path, body | {"response_format": {"type": "json_schema", "json_schema": {
        "name": "it", "schema": {"type": "object", "required": [f"field{number}"], "properties": {
            f"field{number}": {"type": "integer"}}}}}}


def _pattern(chance: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _completion(chance)
    return path, body | {"structured_outputs": {"regex": f"[a-f]{{{chance.randrange(1, 9)}}}"}}


def _response(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": _text(chance), "max_output_tokens": 4,
                             "stream": chance.random() < 0.5, "store": chance.random() < 0.5}


def _message(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "default", "max_tokens": 4, "stream": chance.random() < 0.5,
                            "messages": [{"role": "user", "content": _text(chance)}]}


def _resumable(chance: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _chat(chance)
    return path, body | {"stream": True, "stream_options": {"resumable": True}}


def _tokenize(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/tokenize", {"prompt": _text(chance)}


def _refused(chance: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _chat(chance)
    wrong: dict[str, Any] = chance.choice((
        {"temperature": -1}, {"messages": []}, {"max_tokens": "many"}, {"model": "no such"},
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "it", "schema": {"type": f"t{chance.random()}"}}}}))
    return path, body | wrong


KINDS = (("chat", _chat), ("completion", _completion), ("several", _several),
         ("logprobs", _logprobs), ("schema", _schema), ("pattern", _pattern),
         ("response", _response), ("message", _message), ("resumable", _resumable),
         ("tokenize", _tokenize), ("refused", _refused))
WEIGHTS = (25, 25, 8, 8, 6, 4, 6, 6, 4, 4, 4)


# --- the processes ---


def look(pids: dict[str, int], requests: int) -> Sample:
    """Memory and descriptors of each role now."""
    found = {}
    for role, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        found[role] = int(anonymous.split()[1]) << 10, len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(requests, found)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def slope(points: list[tuple[int, int]], most: int = 300) -> float:
    """The median of the slopes of all pairs of points, of at most `most` of them (Theil 1950; Sen,
    J. Am. Stat. Assoc. 63, 1968)."""
    thinned = points[::-(-len(points) // most)] if points else []
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(thinned, 2) if a[0] != b[0]]
    return statistics.median(slopes) if slopes else 0.0


def figures(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Of each role: memory at the start, in the middle and at the end, and slopes of the second
    half."""
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
    """The crowd, and a look now and then."""
    work = asyncio.create_task(crowd.run(at_once))
    samples = [look(pids, 0)]
    while not work.done():
        await asyncio.wait({work}, timeout=EVERY)
        samples.append(look(pids, crowd.begun))
        if len(samples) % 30 == 0:
            told = "  ".join(f"{role} {row[0] / 1e6:.1f}"
                             for role, row in samples[-1].roles.items())
            print(f"{crowd.begun:>8,} requests; MB: {told}", file=sys.stderr, flush=True)
    await work
    return samples


def run(model: str, requests: int, at_once: int, seed: int) -> dict[str, Any]:
    """The whole of it."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"tenant{i} key-{i}\n" for i in range(TENANTS)))
        with Engine(model, port=0, api_keys_file=str(keys), max_num_seqs=16,
                    access_log=False, max_total_tokens=POOL, silence=10.0,
                    responses_max=STORED) as engine:
            path = engine_dir(engine.name)
            assert not isinstance(path, str)
            where = actor.where(path)  # type: ignore[arg-type]
            assert where is not None
            assert engine.status is not None
            pids = {one.role: one.pid for one in engine.status.actors} | {
                "launcher": int(engine.pid or 0)}
            crowd = Crowd(where.host, where.port, requests, seed)
            began = time.monotonic()
            samples = asyncio.run(drive(crowd, at_once, pids))
            seconds = time.monotonic() - began
            busy = {role: cpu_seconds(pid) for role, pid in pids.items()}
            served = engine.client.generate("Once upon a time", SamplingParams(max_tokens=4)).text
    assert served
    rows = figures(samples)
    for role, spent in busy.items():
        rows[role]["cpu_ms_a_request"] = 1000 * spent / requests
    return {"requests": requests, "seconds": seconds, "requests_per_s": requests / seconds,
            "ended": dict(sorted(crowd.ended.items())), "actors": rows,
            "flat": all(row["mb_a_minute"] <= ALLOWED and row["descriptors_a_minute"] <= 0.01
                        for row in rows.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args.model, args.requests, args.at_once, args.seed)
    print(f"{found['requests']:,} requests in {found['seconds']:.0f} s")
    for what, count in found["ended"].items():
        print(f"  {what:<24}{count:>9,}")
    print(f"{'actor':<14}{'MB: start':>10}{'middle':>8}{'end':>8}{'bytes/req':>11}"
          f"{'MB/min':>8}{'fds':>6}{'ms/req':>8}")
    for role, row in found["actors"].items():
        print(f"{role:<14}{row['start_mb']:>10.1f}{row['middle_mb']:>8.1f}{row['end_mb']:>8.1f}"
              f"{row['bytes_a_request']:>11.1f}{row['mb_a_minute']:>8.3f}{row['descriptors']:>6.0f}"
              f"{row['cpu_ms_a_request']:>8.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
