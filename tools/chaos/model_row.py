"""The row of the demo model, on the CPU: greedy streams through the deaths of worker and scheduler
are what they are without. In float32: bfloat16 rounds otherwise from one batch to another, and with
it a greedy choice between near equals, even where nobody dies."""

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
KILLS = ("worker-0", "scheduler", "worker-0", "worker-0", "scheduler", "worker-0", "scheduler",
         "worker-0")
WORDS = ("the", "a", "cat", "king", "river", "said", "went", "once", "little", "and", "his", "old")
Stream = tuple[list[int], str, str]
"""Tokens, text, why it ended."""


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
            gaps.heard(number, begun, last, now)
            last = now
            ids += delta.token_ids
            count[0] += len(delta.token_ids)
            text += delta.text
            reason = delta.finish_reason or reason
    except ActoriumError as error:
        reason = error.code
    return ids, text, reason


async def _kill(made: Rig, roles: Sequence[str], gaps: Gaps, count: list[int], every: int) -> int:
    """Kill the next of `roles` each time `every` more tokens have come. Returns how many."""
    for done, role in enumerate(roles):
        while count[0] < (done + 1) * every:
            await asyncio.sleep(0.01)
        gaps.fault(f"kill {role}", monotonic())
        before = actors(made.run_dir).get(role)
        victims = strike(Fault(0.0, "kill", (role,)), made.run_dir)
        if before is None or not victims:
            return done
        await asyncio.to_thread(wait_gone, [victims[0].pid], 5.0)
    return len(roles)


async def _run(made: Rig, prompts: WordPrompts, roles: Sequence[str]
               ) -> tuple[list[Stream], Gaps, int]:
    """All streams, while these actors are killed; how many were."""
    gaps, gate, count = Gaps(), asyncio.Semaphore(AT_ONCE), [0]
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        async def one(number: int) -> Stream:
            async with gate:
                return await _stream(client, prompts.all[number], prompts.tokens[number], number,
                                     gaps, count)
        every = sum(prompts.tokens) // (len(roles) + 2)
        killing = asyncio.create_task(_kill(made, roles, gaps, count, every))
        streams = await asyncio.gather(*(one(number) for number in range(len(prompts.all))))
        kills = await killing
    return streams, gaps, kills


def model(seed: int, streams: int = STREAMS, roles: Sequence[str] = KILLS) -> dict[str, Any]:
    """The whole row: so many streams, undisturbed and then while `roles` are killed in turn."""
    prompts = WordPrompts(seed, streams)
    with rig(ROLES["worker-0"], null_worker=False, skip_tokenizer=False, device="cpu",
             dtype="float32") as made:
        calm, _, _ = asyncio.run(_run(made, prompts, ()))
        found, gaps, kills = asyncio.run(_run(made, prompts, roles))
    wrong = [*made.left]
    if kills < len(roles):
        wrong.append(f"only {kills} of {len(roles)} kills")
    for number, (ours, theirs) in enumerate(zip(found, calm, strict=True)):
        if ours != theirs:
            same = sum(1 for _ in _common(ours[0], theirs[0]))
            wrong.append(f"stream {number}: equal for {same} of {len(theirs[0])} tokens, then not; "
                         f"ends with {ours[2]} after {len(ours[0])}")
        elif len(ours[0]) != prompts.tokens[number] or ours[2] != "length":
            wrong.append(f"stream {number}: ends with {ours[2]} after {len(ours[0])} tokens, "
                         "undisturbed, too")
    return {"streams": streams, "tokens": sum(len(ids) for ids, _, _ in found),
            "kills": dict(Counter(roles[:kills])), "gaps": gaps.summary(), "wrong": wrong}


def _common(ours: list[int], theirs: list[int]) -> Any:
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return
        yield a
