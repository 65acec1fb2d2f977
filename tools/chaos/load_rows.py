"""The rows of load: ten times as much as can be served, readers that do not read, clients that
vanish (refusals must come at once, and unwanted work must be aborted); prompts that come faster
than they are encoded; and steady traffic, under which neither memory nor open files may grow.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec
import zmq

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import QueueFull
from actorium.actors.messages import Accepted, Attach, Generate, Rejected
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import address
from actorium.tools.chaos.checked_streams import CheckedRequest, RequestMaker, Traffic, quantile
from actorium.tools.chaos.faults import actors
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, resources, rig

SEQS, QUEUE = 8, 32
TOKENS = 20
FACTOR = 10
RATE = SEQS / (TOKENS * 0.012)
"""The most requests per second that can be served."""
ENDLESS = 1500
"""Tokens of a completion whose end no client waits for."""
REJECTION, BASELINE = 0.05, 1.0
"""Limits in seconds: until a refusal arrives (p99), until pages are free again."""
PATIENCE = 20.0
TICK = 0.02


class RawClient:
    """A client made of bare sockets, which may do what the SDK does not."""

    def __init__(self, made: Rig, receive_buffer: int = 1000) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = b"R" + secrets.token_bytes(12)
        self.fronts = {}
        for front in ("detokenizer", "tokenizer"):
            socket = self.fronts[front] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, receive_buffer)
            socket.connect(address(made.run_dir, f"{front}.front"))
        self.fronts["detokenizer"].send(msgspec.msgpack.encode(Attach()))
        self.fronts["detokenizer"].poll(5000)

    def generate(self, tokens: int) -> None:
        """Requests so many tokens without waiting for an answer."""
        self.fronts["tokenizer"].send(msgspec.msgpack.encode(Generate(
            secrets.token_hex(8), SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True),
            tokens=bytes(4 * 32))))

    def vanish(self) -> None:
        """Closes all sockets without a message."""
        self._context.destroy(linger=0)


async def _overload(made: Rig, seconds: float, seed: int) -> tuple[Traffic, list[float], int]:
    """Sends FACTOR times the rate. Returns the traffic, the seconds until each refusal, and the
    number of requests."""
    maker = RequestMaker(seed, (TOKENS, TOKENS), prompt=40)
    traffic, refusals, tasks = Traffic(maker), [], []

    async with AsyncClient(made.engine.name, str(made.base)) as client:
        async def send(want: CheckedRequest) -> None:
            code = await traffic.send(client, want)
            if code is not None:
                refusals.append(monotonic() - want.begun)
        began, sent = monotonic(), 0
        while (spent := monotonic() - began) < seconds:
            due = int(spent * RATE * FACTOR)
            tasks += [asyncio.create_task(send(maker.make())) for _ in range(due - sent)]
            sent = max(sent, due)
            await asyncio.sleep(TICK)
        await asyncio.gather(*tasks)
    return traffic, refusals, sent


async def _gauges(client: AsyncClient) -> dict[str, float]:
    status = await client.status()
    return next((a.gauges for a in status.actors if a.role == "scheduler"), {})


async def _until(client: AsyncClient, name: str, low: float, high: float) -> float:
    """Returns seconds until the scheduler's gauge lies between the two; `PATIENCE` if it does not.
    """
    began = monotonic()
    while (spent := monotonic() - began) < PATIENCE:
        if low <= (await _gauges(client)).get(name, -1.0) <= high:
            return spent
        await asyncio.sleep(TICK)
    return PATIENCE


async def _vanish(made: Rig, clients: int) -> tuple[float, list[str]]:
    """Lets clients vanish. Returns the seconds until all pages are free again."""
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        raws = [RawClient(made) for _ in range(clients)]
        for raw in raws:
            raw.generate(ENDLESS)
        wrong = []
        if await _until(client, "running", clients, clients) >= PATIENCE:
            wrong.append("the requests of clients that will vanish do not run")
        for raw in raws:
            raw.vanish()
        began = monotonic()
        await _until(client, "waiting", 0, 0)
        await _until(client, "running", 0, 0)
        await _until(client, "held_pages", 0, 0)
        spent = monotonic() - began
    return spent, wrong


async def _slow(made: Rig, readers: int, seed: int) -> tuple[int, list[str]]:
    """Runs readers that do not read, while others stream. Returns the growth of the detokenizer in
    bytes."""
    pid = actors(made.run_dir)["detokenizer"].pid
    maker = RequestMaker(seed, (TOKENS, TOKENS), prompt=40)
    traffic, raws = Traffic(maker), [RawClient(made, receive_buffer=1) for _ in range(readers)]
    for raw in raws:
        for _ in range(2):
            raw.generate(200)
    before = resources([pid])[0]
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        await asyncio.gather(*(traffic.send(client, maker.make()) for _ in range(QUEUE)))
        idle = await _until(client, "running", 0, 0)
        grown = resources([pid])[0] - before
    for raw in raws:
        raw.vanish()
    tally = traffic.tally
    wrong = tally.wrong + [f"beside slow readers: {code}" for code in tally.failed]
    if idle >= PATIENCE:
        wrong.append("the requests of slow readers do not end")
    return grown, wrong


def crowd(seed: int, seconds: float, readers: int, vanishing: int) -> dict[str, Any]:
    """Runs the whole row. seconds: of overload."""
    with rig(SHORT_WORKER, max_num_seqs=SEQS, max_num_queued_reqs=QUEUE,
             debug_memory=False) as made:
        traffic, refusals, sent = asyncio.run(_overload(made, seconds, seed))
    tally = traffic.tally
    wrong = tally.wrong + made.left + [f"overload: {count} failed with {code}"
                                       for code, count in tally.failed.items()]
    refused = sum(tally.refused.values())
    if tally.complete + refused != sent:
        wrong.append(f"overload: {tally.complete} + {refused} of {sent} requests are accounted for")
    with rig(SHORT_WORKER) as made:
        back, vanished_wrong = asyncio.run(_vanish(made, vanishing))
        grown, slow_wrong = asyncio.run(_slow(made, readers, seed))
    wrong += vanished_wrong + slow_wrong + made.left
    return {"sent": sent, "complete": tally.complete, "refused": refused,
            "refusal_p50_s": quantile(refusals, 0.5), "refusal_p99_s": quantile(refusals, 0.99),
            "vanished_clients": vanishing, "pages_back_s": round(back, 2),
            "slow_readers": readers, "detokenizer_grew_mb": round(grown / 2**20, 1),
            "wrong": wrong}


PROMPT = "The quick brown fox jumps over the lazy dog. " * 330
"""Nearly the longest that the tokenizer encodes between others, some ten milliseconds each."""
FLOOD_MEMORY = 48.0
"""MB by which the tokenizer may grow under a flood."""
SERVED_IN = 5.0
"""Seconds within which another tenant's request is complete meanwhile."""


class Flood:
    """Clients of one tenant that send prompts as fast as they are taken, and read the answers."""

    def __init__(self, made: Rig, clients: int) -> None:
        self._raws = [RawClient(made) for _ in range(clients)]
        self.sent = self.answered = 0
        self.refused: Counter[str] = Counter()
        """Counts by error code."""

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over; what was sent is answered then."""
        while not over.is_set():
            for raw in self._raws:
                self._send(raw.fronts["tokenizer"], 200)
                self._read(raw.fronts["tokenizer"])
            await asyncio.sleep(0)
        until = monotonic() + PATIENCE
        while self.answered < self.sent and monotonic() < until:
            for raw in self._raws:
                self._read(raw.fronts["tokenizer"])
            await asyncio.sleep(TICK)
        for raw in self._raws:
            raw.vanish()

    def _send(self, front: zmq.Socket[bytes], count: int) -> None:
        with suppress(zmq.Again):
            for _ in range(count):
                front.send(msgspec.msgpack.encode(Generate(
                    secrets.token_hex(8), SamplingParams(max_tokens=1), text=PROMPT,
                    tenant="flood")), zmq.NOBLOCK)
                self.sent += 1

    def _read(self, front: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while True:
                told = msgspec.msgpack.decode(front.recv(zmq.NOBLOCK), type=Accepted | Rejected)
                self.answered += 1
                if isinstance(told, Rejected):
                    self.refused[told.code] += 1


async def _flooded(made: Rig, seconds: float, clients: int) -> tuple[Flood, list[float], float]:
    """Returns the flood, the seconds that each of another tenant's requests took meanwhile, and MB
    by which the tokenizer has grown."""
    pid, flood, over, took = actors(made.run_dir)["tokenizer"].pid, Flood(made, clients), \
        asyncio.Event(), list[float]()
    async with AsyncClient(made.engine.name, str(made.base), tenant="other") as client:
        await client.generate("a short prompt", SamplingParams(max_tokens=TOKENS))
        before, most = resources([pid])[0], 0
        running = asyncio.create_task(flood.run(over))
        began = monotonic()
        while monotonic() - began < seconds:
            asked = monotonic()
            await client.generate("a short prompt", SamplingParams(max_tokens=TOKENS))
            took.append(monotonic() - asked)
            most = max(most, resources([pid])[0])
        over.set()
        await running
    return flood, took, (most - before) / 2**20


def flood(seconds: float, clients: int) -> dict[str, Any]:
    """Runs the row: prompts come faster than the tokenizer encodes them."""
    with rig(SHORT_WORKER, skip_tokenizer=False, max_num_seqs=SEQS, max_num_queued_reqs=QUEUE,
             schedule_policy="fair") as made:
        floods, took, grown = asyncio.run(_flooded(made, seconds, clients))
    wrong = list(made.left)
    if floods.answered != floods.sent:
        wrong.append(f"{floods.answered} of {floods.sent} requests of the flood are answered")
    if not floods.refused[QueueFull.code]:
        wrong.append(f"nobody was refused with {QueueFull.code}: {floods.refused}")
    if grown > FLOOD_MEMORY:
        wrong.append(f"the tokenizer grew by {grown:.0f} MB")
    if max(took) > SERVED_IN:
        wrong.append(f"another tenant's request took {max(took):.1f} s")
    return {"sent": floods.sent, "refused": dict(floods.refused), "others": len(took),
            "others_most_s": round(max(took), 2), "tokenizer_grew_mb": round(grown, 1),
            "wrong": wrong}


WARM = 2 / 3
"""Part of the run that does not count: meanwhile caches of requests reach their bounds, the last
one the tokenizer's 65,536 requests."""
EVERY = 2.0
RETAIN = 5.0
POOL = 32_768
"""Tokens of the page pool: small, so that the prefix cache is full before counting begins."""
MOST_MEMORY, MOST_FILES = 8.0, 2.0
"""Growth of an actor over the part that counts, by the line through its samples: MB, files. A dict
of the tokenizer's size grows in steps of megabytes until it has seen twice its bound."""


def slope(points: list[tuple[float, float]]) -> float:
    """Returns the slope of the least-squares line through (x, y)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def _watch(made: Rig, seconds: float) -> dict[str, list[tuple[float, int, int]]]:
    """Returns samples of (time, bytes, files) by role."""
    samples: dict[str, list[tuple[float, int, int]]] = {}
    began = monotonic()
    while (now := monotonic() - began) < seconds:
        for role, actor in actors(made.run_dir).items():
            samples.setdefault(role, []).append((now, *resources([actor.pid])))
        await asyncio.sleep(EVERY)
    return samples


async def _drive(made: Rig, seconds: float, streams: int, seed: int
                 ) -> tuple[Traffic, dict[str, list[tuple[float, int, int]]]]:
    traffic, over = Traffic(RequestMaker(seed, (1, 6), prompt=60), aborts=0.05), asyncio.Event()
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        running = asyncio.create_task(traffic.keep(client, streams, over))
        samples = await _watch(made, seconds)
        over.set()
        await running
    return traffic, samples


def soak(seed: int, seconds: float, streams: int) -> dict[str, Any]:
    with rig(SHORT_WORKER, debug_memory=False, retain=RETAIN, max_total_tokens=POOL) as made:
        traffic, samples = asyncio.run(_drive(made, seconds, streams, seed))
    tally, grown = traffic.tally, {}
    wrong = tally.wrong + made.left + [f"{n} requests: {code}" for code, n in tally.failed.items()]
    for role, rows in samples.items():
        counted = [row for row in rows if row[0] >= WARM * seconds]
        span = counted[-1][0] - counted[0][0]
        memory = slope([(at, size / 2**20) for at, size, _ in counted])
        files = slope([(at, float(count)) for at, _, count in counted])
        grown[role] = {"mb_per_minute": round(memory * 60, 3), "files_per_minute":
                       round(files * 60, 3), "mb": round(counted[-1][1] / 2**20, 1)}
        if memory * span > MOST_MEMORY:
            wrong.append(f"{role} grew by {memory * span:.1f} MB in {span:.0f} s")
        if files * span > MOST_FILES:
            wrong.append(f"{role} opened {files * span:.0f} files in {span:.0f} s")
    return {"seconds": seconds, "requests": tally.requests, "tokens": tally.tokens,
            "actors": grown, "wrong": wrong}
