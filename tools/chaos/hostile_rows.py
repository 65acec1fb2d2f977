"""The rows of hostile input: requests that kill the worker, or make an actor fail, among others
that must complete; and bytes that are no message, sent to every inbox and front, of which no actor
may die."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import zmq

from actorium.actors import messages as m
from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway.actor import where
from actorium.actors.params import ResolvedParams, SamplingParams, TextParams
from actorium.actors.runtime.rundir import address
from actorium.tools.bench.http_client import Http
from actorium.tools.chaos import fault_injection
from actorium.tools.chaos.checked_streams import CheckedRequest, RequestMaker, Traffic
from actorium.tools.chaos.fault_injection import EXCEPTION, HANG, KILL, POISON
from actorium.tools.chaos.faults import actors
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, held_at_rest, rig

AT_ONCE = 64
QUARANTINED, COMPLETE = "quarantined", "complete"


async def drive_poisoned(requests: int, maker: RequestMaker, tokens: Sequence[int],
                         ask: Callable[[CheckedRequest], Awaitable[str]]) -> dict[str, Any]:
    """Runs so many requests, `AT_ONCE` at a time. Those with one of these tokens in their prompts
    must end with `quarantined`, the others with "complete". ask: returns how a request ends."""
    bad = dict(zip(random.Random(requests).sample(range(requests), len(tokens)), tokens,
                   strict=True))
    gate = asyncio.Semaphore(AT_ONCE)
    ends: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    async def send(number: int) -> None:
        async with gate:
            ends[number in bad][await ask(maker.make(bad.get(number)))] += 1

    await asyncio.gather(*(send(number) for number in range(requests)))
    return {"quarantined": ends[True][QUARANTINED], "complete": ends[False][COMPLETE],
            "wrong": [f"{count} {kind} requests: {end}"
                      for poisoned, kind, right in ((True, "poisoned", QUARANTINED),
                                                    (False, "innocent", COMPLETE))
                      for end, count in ends[poisoned].items() if end != right]}


async def _by_sdk(made: Rig, traffic: Traffic, requests: int, maker: RequestMaker,
                  tokens: Sequence[int]) -> dict[str, Any]:
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        async def ask(want: CheckedRequest) -> str:
            return await traffic.send(client, want) or COMPLETE

        return await drive_poisoned(requests, maker, tokens, ask)


async def _over_http(made: Rig, requests: int, maker: RequestMaker, tokens: Sequence[int],
                     latest: float) -> dict[str, Any]:
    """HTTP clients resend the same body when their connection breaks."""
    found = where(made.run_dir)
    assert found is not None
    http = Http(found.url)
    try:
        return await drive_poisoned(requests, maker, tokens, lambda want: post(http, want, latest))
    finally:
        http.close()


def poison(seed: int, requests: int, poisoned: int, latest: float) -> dict[str, Any]:
    """Runs requests of which `poisoned` kill the worker: they alone must end with `quarantined`.
    latest: seconds that a request may take."""
    maker = RequestMaker(seed, (10, 40), prompt=60)
    traffic, began = Traffic(maker, latest=latest), monotonic()
    with rig(SHORT_WORKER) as made:
        row = asyncio.run(_by_sdk(made, traffic, requests, maker, [POISON] * poisoned))
        deaths = actors(made.run_dir)["worker-0"].epoch - 1
    wrong = traffic.tally.wrong + row.pop("wrong") + made.left
    return {"requests": requests, "poisoned": poisoned, **row, "deaths": deaths,
            "seconds": round(monotonic() - began, 1), "wrong": wrong}


FAILING = ("tokenizer", "scheduler", "detokenizer", "gateway")
SHARES = (KILL, EXCEPTION, HANG, KILL, EXCEPTION)
"""Two fifths kill, two fifths raise, one fifth hangs."""
BUDGET = 2.0
"""Seconds after which a request counts as hanging."""
AGAIN = 0.2
"""Seconds until an HTTP client tries again."""


def quarantine(actor: str, seed: int, requests: int, poisoned: int, latest: float
               ) -> dict[str, Any]:
    """Runs requests of which `poisoned` make the actor fail: they alone must end with
    `quarantined`, and the engine must go on within its default number of restarts. latest: seconds
    that a request may take."""
    role = "gateway-0" if actor == "gateway" else actor
    modes = [SHARES[i % len(SHARES)] for i in range(poisoned)]
    maker, began = RequestMaker(seed, (10, 40), prompt=60), monotonic()
    traffic = Traffic(maker, latest=latest)
    more = {"port": 0} if actor == "gateway" else {}
    with rig(SHORT_WORKER, {role: f"{fault_injection.__name__}:{actor}"}, max_restarts=5,
             request_budget=BUDGET, **more) as made:
        if actor == "gateway":
            row = asyncio.run(_over_http(made, requests, maker, modes, latest))
        else:
            row = asyncio.run(_by_sdk(made, traffic, requests, maker, modes))
        wrong = traffic.tally.wrong + row.pop("wrong") + asyncio.run(_afterwards(made, maker))
        deaths = actors(made.run_dir)[role].epoch - 1
    expected = 2 * modes.count(KILL) + modes.count(HANG)
    if deaths > expected:
        wrong.append(f"{deaths} deaths, {expected} at the most were to be expected")
    return {"requests": requests, "poisoned": poisoned, **row, "deaths": deaths,
            "modes": {name: modes.count(getattr(fault_injection, name.upper()))
                      for name in ("kill", "exception", "hang")},
            "seconds": round(monotonic() - began, 1), "wrong": wrong + made.left}


async def _afterwards(made: Rig, maker: RequestMaker) -> list[str]:
    """Checks that the engine serves and holds nothing."""
    traffic = Traffic(maker)
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        code = await traffic.send(client, maker.make())
        wrong = traffic.tally.wrong + await held_at_rest(client, 5.0)
    if code is not None:
        wrong.append(f"a request at the end: {code}")
    if pages := made.gauges().get("quarantined_pages"):
        wrong.append(f"at rest: quarantined_pages is {pages:g}")
    return wrong


async def post(http: Http, want: CheckedRequest, latest: float) -> str:
    """Returns how a request ends: `COMPLETE`, `QUARANTINED`, or with which error."""
    params = want.params
    body = {"prompt": want.prompt, "max_tokens": params.max_tokens, "seed": params.seed,
            "n": params.n, "ignore_eos": True, "return_token_ids": True}
    until, last = monotonic() + latest, ""
    while monotonic() < until:
        try:
            async for answer in http.events("/v1/completions", body):
                choices = msgspec.json.decode(answer)["choices"]
                right = all((choice["token_ids"], choice["finish_reason"]) == (
                    want._expected[choice["index"]], "length") for choice in choices)
                return COMPLETE if right and len(choices) == params.n else "another answer"
        except EngineUnavailable as error:
            last = error.message
            if QUARANTINED in last:
                return QUARANTINED
            if last[:3].isdecimal() and not last.startswith("503"):
                return last
        await asyncio.sleep(AGAIN)
    return f"no answer: {last}"


INBOXES: dict[str, Any] = {
    "tokenizer.front": m.ToTokenizerFront, "detokenizer.front": m.ToDetokenizerFront,
    "watchdog.front": m.ToWatchdogFront, "scheduler.inbox": m.ToScheduler,
    "detokenizer.inbox": m.ToDetokenizer, "worker-0.inbox": m.ToWorker,
    "watchdog.inbox": m.ToWatchdog, "launcher.inbox": m.ToLauncher}
"""The messages that each socket accepts."""
TOKENS = (1).to_bytes(4, "little") * 8
SAMPLES: tuple[m.Message, ...] = (
    m.Generate("r", SamplingParams(max_tokens=3, seed=1), tokens=TOKENS), m.Abort("r"),
    m.Tokenize("r", "text"), m.ServerInfo("r"), m.Attach(), m.GetStatus("r", True),
    m.Submit("r", b"c", TOKENS, 1, ResolvedParams(3), TextParams(), 1), m.AbortRequest("r", b"c"),
    m.StepResult(1, 1, b"\1", TOKENS[:4], b"\0"), m.Stop(1, 1), m.Hello("detokenizer", 2),
    m.StepPlan(1, 1, extend=TOKENS[:8], decode=TOKENS[:4],
               admit=[m.Admit(1, TOKENS, 8, 0, TOKENS, ResolvedParams(3), 1)]), m.Reset(1, 1),
    m.Open(1, "r", 0, b"c", TOKENS, TextParams()), m.Unknown("r", b"c"),
    m.TokenBatch(1, TOKENS[:8], bytes(4), b"\1", TOKENS[:4], epoch=1),
    m.Beat("worker-0", 1, 1, "idle", 1, 1.0, {"g": 1.0}), m.Exited("worker-0", 1, 1, 9),
    m.Children([m.Child("worker-0", 1, 1)]), m.Kill("worker-0", 1, "why"), m.Spawn("worker-0", 2),
    m.Fatal("worker-0", 1, 1, "message"))
DEEP, LONG = 5000, 4096
BATCH = 500
LOGGED = re.compile(r"([\w-]+\.[a-z]+): bad frame \((\w+), (\d+) so far\)")
LOG_EVERY = 10.5
"""Seconds after which a kind of bad frame is logged again."""
LAST = 400
"""Frames to each socket after that."""
RARE = 0.95
PATIENCE = 20.0
CLIENTS = 8
"""Connections to a front, each with an identity of its own."""


def frames(seed: int, union: Any) -> Iterator[list[bytes]]:
    """Yields messages (lists of frames) that no decoder of the union accepts, without end."""
    chance = random.Random(seed)
    decode = msgspec.msgpack.Decoder(union).decode
    samples = [msgspec.msgpack.encode(sample) for sample in SAMPLES]
    while True:
        sample = chance.choice(samples)
        if chance.random() < 0.02:
            yield [sample, sample]
            continue
        frame = _broken(chance, sample)
        try:
            decode(frame)
        except Exception:
            yield [frame]


def _broken(chance: random.Random, sample: bytes) -> bytes:
    """Breaks a sample in one of many ways."""
    way, at = chance.randrange(8), chance.randrange(len(sample))
    if way == 0:
        return chance.randbytes(chance.randrange(200))
    if way == 1:
        return sample[:at]
    if way == 2:
        return sample + chance.randbytes(1 + chance.randrange(9))
    if way == 3:
        return sample[:at] + chance.randbytes(1 + chance.randrange(4)) + sample[at + 1:]
    if way == 4:
        return sample[:at] + b"\xcf" + b"\xff" * 8 + sample[at + 1:]
    if way == 5:
        return sample[:at] + b"\xa3\xff\xfe\x80" + sample[at + 1:]
    if way == 6 and chance.random() < 0.1:
        return sample[:1] + b"\x91" * DEEP
    field: Any = chance.choice((None, -1, 2**63, "x" * LONG, [[]], {"a": 1}, 1.5, b"\0" * 3, True))
    return msgspec.msgpack.encode([msgspec.msgpack.decode(sample)[0], field])


DRAINED_MS = 300
"""Milliseconds without an answer, behind which all frames have been read."""


async def _throw(made: Rig, name: str, union: Any, count: int, seed: int) -> int:
    """Sends so many bad messages to one socket; returns how many it accepted."""
    sent = 0
    made_frames = frames(seed, union)
    with zmq.Context() as context:
        sockets = [_connected(context, made, name)
                   for _ in range(CLIENTS if name.endswith("front") else 1)]
        while sent < count:
            for _ in range(min(BATCH, count - sent)):
                socket = sockets[sent % len(sockets)]
                await _send(socket, next(made_frames))
                sent += 1
            for socket in sockets if name.endswith("front") else ():
                while socket.poll(0):
                    socket.recv_multipart()
            await asyncio.sleep(0)
        for socket in sockets:
            # What a client leaves unread when it goes may be lost: its answers cannot be sent.
            while name.endswith("front") and socket.poll(DRAINED_MS):
                socket.recv_multipart()
            socket.close()
    return sent


def _connected(context: zmq.Context[zmq.Socket[bytes]], made: Rig, name: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER if name.endswith("front") else zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 5000)
    socket.connect(address(made.run_dir, name))
    return socket


async def _send(socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
    while True:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
            return
        except zmq.Again:
            await asyncio.sleep(0.002)


async def _throw_all(made: Rig, count: int, seed: int) -> int:
    sent = 0
    for name, union in INBOXES.items():
        sent += await _throw(made, name, union, -(-count // len(INBOXES)), seed)
    return sent


def counted(run_dir: Path) -> dict[str, int]:
    """Returns bad frames by socket, from the actors' logs: "SOCKET: bad frame (KIND, N so far)"."""
    most: dict[tuple[str, str], int] = {}
    for log in run_dir.glob("*.log"):
        for name, kind, number in LOGGED.findall(log.read_text(errors="replace")):
            most[name, kind] = max(most.get((name, kind), 0), int(number))
    return {name: sum(n for (where, _), n in most.items() if where == name)
            for name in {where for where, _ in most}}


async def _drive(made: Rig, count: int, seed: int) -> tuple[Traffic, int]:
    traffic, over = Traffic(RequestMaker(seed, (10, 40), prompt=60)), asyncio.Event()
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        streams = asyncio.create_task(traffic.keep(client, 4, over))
        sent = await _throw_all(made, count, seed)
        await asyncio.sleep(LOG_EVERY)  # each kind is logged at this interval, with its count
        await _throw_all(made, LAST * len(INBOXES), seed + 1)
        over.set()
        await streams
        await client.status()
        until = monotonic() + PATIENCE
        while monotonic() < until and _uncounted(made.run_dir, count // len(INBOXES)):
            await asyncio.sleep(0.1)
    return traffic, sent


def _uncounted(run_dir: Path, count: int) -> list[str]:
    """Returns sockets whose actors have not counted so many bad frames, but for rare kinds. (The
    launcher has no log of its own.)"""
    found = counted(run_dir)
    return [f"{name}: {found.get(name, 0)} bad frames were counted" for name in INBOXES
            if not name.startswith("launcher") and found.get(name, 0) < RARE * count]


def fuzz(seed: int, count: int) -> dict[str, Any]:
    """Sends at least `count` bad messages, spread over the sockets."""
    with rig(SHORT_WORKER) as made:
        before = actors(made.run_dir)
        traffic, sent = asyncio.run(_drive(made, count, seed))
        after = actors(made.run_dir)
        uncounted = _uncounted(made.run_dir, count // len(INBOXES))
    tally = traffic.tally
    died = [role for role, actor in before.items() if after.get(role) != actor]
    wrong = tally.wrong + made.left + uncounted + [f"{role} died" for role in died] + [
        f"beside bad frames: {code}" for code in (*tally.failed, *tally.refused)]
    if not tally.complete:
        wrong.append("no stream went on beside bad frames")
    return {"frames": sent, "sockets": len(INBOXES), "deaths": len(died),
            "streams_beside": tally.complete, "wrong": wrong}
