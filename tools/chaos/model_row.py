"""The row of the demo model, on the CPU: greedy streams must be the same with and without deaths of
worker and scheduler. In float32: bfloat16 rounds differently from one batch to another, which
changes a greedy choice between near equals even where no actor dies.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import ROLES
from actorium.tools.chaos.checked_streams import Gaps
from actorium.tools.chaos.faults import Fault, actors, strike, wait_gone
from actorium.tools.chaos.rig import Rig, rig

STREAMS = 100
TOKENS = (60, 120)
AT_ONCE = 32
KILLS = tuple(f"kill {role}" for role in (
    "worker-0", "scheduler", "worker-0", "worker-0", "scheduler", "worker-0", "scheduler",
    "worker-0"))
RANK_FAULTS = tuple(f"{kind} worker-{rank}" for rank in (1, 0) for kind in ("kill", "stop"))
APART = 10.0
"""Seconds of work between two deaths of ranks: after less the next delay would be longer."""
WORDS = ("the", "a", "cat", "king", "river", "said", "went", "once", "little", "and", "his", "old")
Stream = tuple[list[int], str, str]
"""Tokens, text, finish reason."""


class WordPrompts:
    """Prompts of words and lengths of completions, from a seed."""

    def __init__(self, seed: int, streams: int) -> None:
        chance = random.Random(seed)
        self.all = [" ".join(chance.choices(WORDS, k=chance.randint(3, 30)))
                    for _ in range(streams)]
        self.tokens = [chance.randint(*TOKENS) for _ in range(streams)]


async def _stream(client: AsyncClient, prompt: str, tokens: int, number: int, gaps: Gaps,
                  count: list[int]) -> Stream:
    ids: list[int] = []
    text, reason = "", ""
    begun = last = monotonic()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    try:
        async for delta in client.stream(prompt, params):
            now = monotonic()
            gaps.record(number, begun, last, now)
            last = now
            ids += delta.token_ids
            count[0] += len(delta.token_ids)
            text += delta.text
            reason = delta.finish_reason or reason
    except ActoriumError as error:
        reason = error.code
    return ids, text, reason


async def _strike(made: Rig, faults: Sequence[str], gaps: Gaps, count: list[int], every: int,
                  apart: float) -> int:
    """Applies the next of `faults` each time `every` more tokens have arrived, and `apart` seconds
    after the last one was overcome. Returns the number of those that hit."""
    for done, (kind, role) in enumerate(map(str.split, faults)):
        begun = count[0]
        while count[0] == begun:
            await asyncio.sleep(0.01)
        await asyncio.sleep(apart)
        while count[0] < (done + 1) * every:
            await asyncio.sleep(0.01)
        gaps.fault(f"{kind} {role}", monotonic())
        before = actors(made.run_dir).get(role)
        victims = strike(Fault(0.0, kind, (role,)), made.run_dir)
        if before is None or not victims:
            return done
        await asyncio.to_thread(wait_gone, [victims[0].pid], 5.0)
    return len(faults)


async def _run(made: Rig, prompts: WordPrompts, faults: Sequence[str], at_once: int, apart: float
               ) -> tuple[list[tuple[int, Stream]], Gaps, int]:
    """Runs all streams through these faults, again and again until all have hit. Returns streams by
    number, and the number of faults that hit."""
    gaps, gate, count = Gaps(), asyncio.Semaphore(at_once), [0]
    found: list[tuple[int, Stream]] = []
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        every = 0 if apart else sum(prompts.tokens) // (len(faults) + 2)
        striking = asyncio.create_task(_strike(made, faults, gaps, count, every, apart))

        async def one(number: int) -> None:
            while True:
                async with gate:
                    stream = await _stream(client, prompts.all[number], prompts.tokens[number],
                                           len(found), gaps, count)
                    found.append((number, stream))
                if not apart or striking.done():
                    return
        await asyncio.gather(*map(one, range(len(prompts.all))))
        hits = await striking
    return found, gaps, hits


def ranks(seed: int, faults: int) -> dict[str, Any]:
    """Runs the row over a worker of two ranks, each of which is killed and stopped in turn, 100
    streams at once; the scheduler is killed twice in between."""
    chance = random.Random(seed)
    several = list(RANK_FAULTS) * -(-faults // len(RANK_FAULTS))
    chance.shuffle(several)
    several = several[:faults]
    for third in (1, 2):
        several.insert(third * faults // 3, "kill scheduler")
    return model(seed, faults=several, ranks=2, at_once=STREAMS, apart=APART)


def model(seed: int, streams: int = STREAMS, faults: Sequence[str] = KILLS, ranks: int = 1,
          at_once: int = AT_ONCE, apart: float = 0.0) -> dict[str, Any]:
    """Runs the whole row: so many streams, undisturbed and then through these faults in turn.
    ranks: of the worker; apart: seconds between faults, and streams begin anew until all have
    hit."""
    prompts = WordPrompts(seed, streams)
    worker = ROLES["worker-0"]
    with rig(worker, {f"worker-{rank}": worker for rank in range(ranks)}, null_worker=False,
             skip_tokenizer=False, device="cpu", dtype="float32", tensor_parallel_size=ranks
             ) as made:
        calm = dict(asyncio.run(_run(made, prompts, (), at_once, 0.0))[0])
        found, gaps, hits = asyncio.run(_run(made, prompts, faults, at_once, apart))
    wrong = [*made.left]
    if hits < len(faults):
        wrong.append(f"only {hits} of {len(faults)} faults")
    for number, ours in found:
        theirs = calm[number]
        if ours != theirs:
            same = sum(1 for _ in _common(ours[0], theirs[0]))
            wrong.append(f"stream {number}: equal for {same} of {len(theirs[0])} tokens, then not; "
                         f"ends with {ours[2]} after {len(ours[0])}")
        elif len(ours[0]) != prompts.tokens[number] or ours[2] != "length":
            wrong.append(f"stream {number}: ends with {ours[2]} after {len(ours[0])} tokens, "
                         "undisturbed, too")
    return {"streams": len(found), "tokens": sum(len(ids) for _, (ids, _, _) in found),
            "faults": dict(Counter(faults[:hits])), "gaps": gaps.summary(), "wrong": wrong}


def _common(ours: list[int], theirs: list[int]) -> Any:
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return
        yield a
