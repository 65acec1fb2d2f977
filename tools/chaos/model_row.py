"""The row of the demo model, on the CPU, in bfloat16 with `--exact on`: what streams are told must
be the same with and without deaths of worker and scheduler, log-probabilities to the bit.

Undisturbed they are asked of an engine without drafts; then of one that drafts with the model's MTP
layer, and whose actors die. Streams are greedy, sampled, with penalties, of two choices, or held to
a schema, in turn.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.messages import TokenLogprob
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.runtime.roles import ROLES
from actorium.tools.chaos.checked_streams import Gaps
from actorium.tools.chaos.faults import Fault, actors, strike, wait_gone
from actorium.tools.chaos.rig import Rig, rig

STREAMS = 100
TOKENS = (150, 250)
AT_ONCE = 32
LOGPROBS = 3
FAULTS = ("kill worker-0", "kill scheduler", "kill detokenizer", "kill worker-0", "kill worker-0",
          "kill scheduler", "stop worker-0", "kill worker-0", "kill tokenizer", "kill scheduler",
          "kill worker-0", "kill detokenizer", "stop scheduler")
RANK_FAULTS = tuple(f"{kind} worker-{rank}" for rank in (1, 0) for kind in ("kill", "stop"))
APART = 10.0
"""Seconds of work between two deaths of ranks: after less the next delay would be longer."""
WORDS = ("the", "a", "cat", "king", "river", "said", "went", "once", "little", "and", "his", "old")
SCHEMA = """{"type": "object", "required": ["name", "counts"], "properties": {
    "name": {"type": "string"},
    "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 12}}}"""
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
PENALTIES: Mapping[str, Any] = {"frequency_penalty": 0.7, "presence_penalty": 0.4,
                                "repetition_penalty": 1.1}
MIXED: tuple[Mapping[str, Any], ...] = (
    {**GREEDY, "prompt_logprobs": 1}, {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, **PENALTIES},
    {"temperature": 0.9, "top_k": 40, "n": 2}, {**GREEDY, **PENALTIES},
    {"temperature": 1.0, "structured": Structured(json_schema=SCHEMA)})
"""Of streams in turn."""


@dataclass
class HeardChoice:
    """What a client has been told of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    text: str = ""
    reason: str = ""


HeardStream = dict[int, HeardChoice]
"""By number of the choice."""


class DrawnRequests:
    """Prompts of words and how to complete them, from a seed."""

    def __init__(self, seed: int, streams: int, kinds: Sequence[Mapping[str, Any]]) -> None:
        chance = random.Random(seed)
        self.prompts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 30)))
                        for _ in range(streams)]
        self.params = [SamplingParams(**{
            "max_tokens": chance.randint(*TOKENS), "ignore_eos": True, "seed": number,
            "logprobs": LOGPROBS, **kinds[number % len(kinds)]}) for number in range(streams)]

    @property
    def tokens(self) -> int:
        """All that may come."""
        return sum((params.max_tokens or 0) * params.n for params in self.params)


def differs(ours: HeardStream, theirs: HeardStream) -> str | None:
    """Where two streams part."""
    if ours.keys() != theirs.keys():
        return f"choices {sorted(ours)}, not {sorted(theirs)}"
    for number, mine in ours.items():
        other = theirs[number]
        for what, a, b in (
                ("tokens", mine.tokens, other.tokens),
                ("log-probabilities", mine.logprobs, other.logprobs),
                ("log-probabilities of the prompt", mine.prompt_logprobs, other.prompt_logprobs)):
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                          min(len(a), len(b)))
                return (f"choice {number}: {what} equal for {at} of {len(b)}, then {a[at:at + 1]}, "
                        f"not {b[at:at + 1]}; ends with {mine.reason}")
        if (mine.text, mine.reason) != (other.text, other.reason):
            return (f"choice {number}: {mine.text!r} and {mine.reason}, "
                    f"not {other.text!r} and {other.reason}")
    return None


def amiss(stream: HeardStream, params: SamplingParams) -> str | None:
    """What is wrong with a stream whatever it says."""
    if len(stream) != params.n:
        return f"{len(stream)} of {params.n} choices"
    for number, one in stream.items():
        ends = (("stop", one.tokens != []) if params.structured and one.reason == "stop" else
                ("length", len(one.tokens) == params.max_tokens))
        if (one.reason, True) != ends:
            return f"choice {number} ends with {one.reason} after {len(one.tokens)} tokens"
        if [entry.token_id for entry in one.logprobs] != one.tokens:
            return f"choice {number}: log-probabilities are not those of its tokens"
    return None


async def _stream(client: AsyncClient, prompt: str, params: SamplingParams, number: int, gaps: Gaps,
                  count: list[int]) -> HeardStream:
    heard: HeardStream = {}
    begun = last = monotonic()
    try:
        async for delta in client.stream(prompt, params):
            now = monotonic()
            gaps.record(number, begun, last, now)
            last = now
            choice = heard.setdefault(delta.index, HeardChoice())
            choice.tokens += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            choice.prompt_logprobs += delta.prompt_logprobs or ()
            count[0] += len(delta.token_ids)
            choice.text += delta.text
            choice.reason = delta.finish_reason or choice.reason
    except ActoriumError as error:
        heard.setdefault(0, HeardChoice()).reason = error.code
    return heard


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


async def _run(made: Rig, asked: DrawnRequests, faults: Sequence[str], at_once: int, apart: float
               ) -> tuple[list[tuple[int, HeardStream]], Gaps, int]:
    """Runs all streams through these faults, again and again until all have hit. Returns streams by
    number, and the number of faults that hit."""
    gaps, gate, count = Gaps(), asyncio.Semaphore(at_once), [0]
    found: list[tuple[int, HeardStream]] = []
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        every = 0 if apart else asked.tokens // (len(faults) + 2)
        striking = asyncio.create_task(_strike(made, faults, gaps, count, every, apart))

        async def one(number: int) -> None:
            while True:
                async with gate:
                    stream = await _stream(client, asked.prompts[number], asked.params[number],
                                           len(found), gaps, count)
                    found.append((number, stream))
                if not apart or striking.done():
                    return
        await asyncio.gather(*map(one, range(len(asked.prompts))))
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


def model(seed: int, streams: int = STREAMS, faults: Sequence[str] = FAULTS, ranks: int = 1,
          at_once: int = AT_ONCE, apart: float = 0.0, exact: str = "on") -> dict[str, Any]:
    """Runs the whole row: so many streams, undisturbed and then through these faults in turn.
    ranks: of the worker; apart: seconds between faults, and streams begin anew until all have
    hit; exact: `--exact`."""
    asked = DrawnRequests(seed, streams, MIXED)
    flags: dict[str, Any] = {"tensor_parallel_size": ranks, "dtype": "bfloat16", "exact": exact}
    with _engine(ranks, speculative="off", **flags) as made:
        calm = dict(asyncio.run(_run(made, asked, (), at_once, 0.0))[0])
    wrong = [*made.left]
    with _engine(ranks, speculative="mtp:2", **flags) as made:
        found, gaps, hits = asyncio.run(_run(made, asked, faults, at_once, apart))
    wrong += made.left
    if hits < len(faults):
        wrong.append(f"only {hits} of {len(faults)} faults")
    for number, ours in found:
        if part := differs(ours, calm[number]):
            wrong.append(f"stream {number}: {part}")
        elif fault := amiss(ours, asked.params[number]):
            wrong.append(f"stream {number}: {fault}, undisturbed, too")
    return {"streams": len(found), "dtype": flags["dtype"],
            "tokens": sum(len(one.tokens) for _, own in found for one in own.values()),
            "faults": dict(Counter(faults[:hits])), "gaps": gaps.summary(), "wrong": wrong}


def _engine(ranks: int, **flags: Any) -> AbstractContextManager[Rig]:
    worker = ROLES["worker-0"]
    return rig(worker, {f"worker-{rank}": worker for rank in range(ranks)}, null_worker=False,
               skip_tokenizer=False, device="cpu", **flags)
