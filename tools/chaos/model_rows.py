"""The rows with models. Log-probabilities and answers must be the same with and without deaths.

The demo model, on the CPU, in bfloat16 with `--exact on`: what streams receive must be the same
with and without deaths of worker and scheduler, log-probabilities to the bit. Undisturbed they are
asked of an engine without drafts; then of one that drafts with the model's MTP layer, and whose
actors die. Streams are greedy, sampled, with penalties, of two choices, or held to a schema, in
turn.

Images: questions about pictures whose answers must be the same while the process that decodes them
is killed again and again, and worker and scheduler now and then; or, of several replicas, one of
them, the router, or an actor of a replica. The packaged model of drawn pictures, in float32: its
answers show what it has seen. Half of the pictures are made new to the engine by a pixel, so that
there is always something to decode; of those the first answer is held against later ones, and some
are asked again once faults have ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import BytesIO
from time import monotonic
from typing import Any

from PIL import Image as Pillow

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.media import Image
from actorium.actors.config.cluster_settings import ROUTER_ROLE
from actorium.actors.errors import ActoriumError
from actorium.actors.messages import TokenLogprob
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.runtime.roles import MEDIA, ROLES
from actorium.tools.chaos.checked_streams import Gaps
from actorium.tools.chaos.cluster_rows import at_rest
from actorium.tools.chaos.faults import KILL, Fault, actors, strike, wait_ended
from actorium.tools.chaos.rig import Rig, held_at_rest, rig
from actorium.tools.pictures import PICTURE_MODEL
from actorium.tools.pictures.drawn_pictures import draw
from actorium.tools.pictures.picture_questions import PictureItem, held_out

STREAMS = 100
TOKENS = (150, 250)
AT_ONCE = 32
LOGPROBS = 3
FAULTS = ("kill worker-0", "kill scheduler", "kill detokenizer", "kill worker-0", "kill worker-0",
          "kill scheduler", "stop worker-0", "kill worker-0", "kill tokenizer", "kill scheduler",
          "kill worker-0", "kill detokenizer", "stop scheduler")
RANK_FAULTS = tuple(f"{kind} worker-{rank}" for rank in (1, 0) for kind in ("kill", "stop"))
APART = 10.0
"""Seconds of work between two deaths of ranks: after less the delay that follows a stop would be
longer."""
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
"""Parameters of streams in turn."""


@dataclass
class ReceivedChoice:
    """What a client has received of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    text: str = ""
    reason: str = ""


ReceivedStream = dict[int, ReceivedChoice]
"""Choices by number."""


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
        """The most tokens that may arrive."""
        return sum((params.max_tokens or 0) * params.n for params in self.params)


def differs(ours: ReceivedStream, theirs: ReceivedStream) -> str | None:
    """Returns the first difference between two streams."""
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


def amiss(stream: ReceivedStream, params: SamplingParams) -> str | None:
    """Returns what is wrong with a stream by itself."""
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
                  count: list[int]) -> ReceivedStream:
    received: ReceivedStream = {}
    begun = last = monotonic()
    try:
        async for delta in client.stream(prompt, params):
            now = monotonic()
            gaps.record(number, begun, last, now)
            last = now
            choice = received.setdefault(delta.index, ReceivedChoice())
            choice.tokens += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            choice.prompt_logprobs += delta.prompt_logprobs or ()
            count[0] += len(delta.token_ids)
            choice.text += delta.text
            choice.reason = delta.finish_reason or choice.reason
    except ActoriumError as error:
        received.setdefault(0, ReceivedChoice()).reason = error.code
    return received


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
        await asyncio.to_thread(wait_ended, [victims[0].pid], 5.0)
    return len(faults)


async def _run(made: Rig, asked: DrawnRequests, faults: Sequence[str], at_once: int, apart: float
               ) -> tuple[list[tuple[int, ReceivedStream]], Gaps, int]:
    """Runs all streams through these faults, again and again until all have hit. Returns streams by
    number, and the number of faults that hit."""
    gaps, gate, count = Gaps(), asyncio.Semaphore(at_once), [0]
    streams: list[tuple[int, ReceivedStream]] = []
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        every = 0 if apart else asked.tokens // (len(faults) + 2)
        striking = asyncio.create_task(_strike(made, faults, gaps, count, every, apart))

        async def send(number: int) -> None:
            while True:
                async with gate:
                    stream = await _stream(client, asked.prompts[number], asked.params[number],
                                           len(streams), gaps, count)
                    streams.append((number, stream))
                if not apart or striking.done():
                    return
        await asyncio.gather(*map(send, range(len(asked.prompts))))
        hits = await striking
    return streams, gaps, hits


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


ITEMS, CLIENTS, IMAGE_SECONDS = 40, 8, 60.0
AGAIN = 200
"""Questions that are asked again at the end."""
IMAGE_PARAMS = SamplingParams(max_tokens=3, temperature=0.0)
LEAST_RIGHT = 0.75
"""Share of questions that the model answers right without faults."""
IMAGES_APART = 2.0
"""Seconds between an actor's return and the next fault."""
OTHERS = ("worker-0", "scheduler")
REPLICAS_OTHERS = ("replica-0", ROUTER_ROLE, "1/worker-0", "0/scheduler")
BACK = 30.0
"""Seconds within which a dead actor must be back."""


class AskedPictures:
    """One item's files, and what is said of it undisturbed."""

    def __init__(self, item: PictureItem) -> None:
        self.text, self.right = item.question.text, item.question.answer
        self._drawn = [draw(picture) for picture in item.pictures]

    def content(self, mark: int) -> list[Any]:
        """A message's content; mark: 0 to 255, of a corner's pixel, makes other files of it."""
        parts: list[Any] = []
        for pixels in self._drawn:
            own, held = pixels.copy(), BytesIO()
            own[0, 0, 0] = mark
            Pillow.fromarray(own).save(held, "PNG")
            parts.append(Image(held.getvalue()))
        return [*parts, self.text]


async def _ask(client: AsyncClient, content: list[Any]) -> tuple[str, str]:
    async with asyncio.timeout(IMAGE_SECONDS):
        found = await client.chat([{"role": "user", "content": content}], IMAGE_PARAMS)
    return found.text, found.finish_reason


class ImageTraffic:
    """Clients that ask, and what was wrong with the answers."""

    def __init__(self, pictures: Sequence[AskedPictures], seed: int) -> None:
        self.pictures, self._chance = pictures, random.Random(seed)
        self.asked, self.compared, self.wrong = 0, 0, list[str]()
        self.said: dict[tuple[int, int], tuple[str, str]] = {}
        """(item, mark) -> the first answer."""
        self.over = asyncio.Event()

    async def ask(self, client: AsyncClient, number: int, mark: int) -> None:
        """Asks, and holds the answer against what was said before."""
        self.asked += 1
        try:
            said = await _ask(client, self.pictures[number].content(mark))
        except (ActoriumError, TimeoutError) as error:
            self.wrong.append(f"item {number}: {type(error).__name__}: {error}")
            return
        before = self.said.get((number, mark))
        if before is None:
            self.said[number, mark] = said
            return
        self.compared += 1
        if said != before:
            self.wrong.append(f"item {number}, {mark}: {said!r} instead of {before!r}")

    async def keep(self, made: Rig) -> None:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            while not self.over.is_set():
                number = self._chance.randrange(len(self.pictures))
                mark = self._chance.randrange(256) if self._chance.random() < 0.5 else 0
                await self.ask(client, number, mark)

    async def again(self, client: AsyncClient) -> None:
        """Some of what was answered under faults, undisturbed."""
        marked = [asked for asked in self.said if asked[1]]
        for asked in self._chance.sample(marked, min(AGAIN, len(marked))):
            await self.ask(client, *asked)


async def _strike_in_turn(made: Rig, roles: Sequence[str], traffic: ImageTraffic, apart: float
                          ) -> int:
    """Kills these in turn, each so many seconds after the last one was back; returns how many were
    there."""
    for done, role in enumerate(roles):
        await asyncio.sleep(apart)
        before, asked = actors(made.run_dir).get(role), traffic.asked
        victims = strike(Fault(0.0, KILL, (role,)), made.run_dir)
        if before is None or not victims:
            return done
        await asyncio.to_thread(wait_ended, [victims[0].pid], 5.0)
        until = monotonic() + BACK
        while monotonic() < until:
            now = actors(made.run_dir).get(role)
            if now is not None and now.pid != before.pid and traffic.asked > asked + CLIENTS:
                break
            await asyncio.sleep(0.05)
    return len(roles)


async def _run_images(made: Rig, pictures: Sequence[AskedPictures], roles: Sequence[str], seed: int,
               apart: float, replicas: int) -> tuple[ImageTraffic, int]:
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        traffic = ImageTraffic(pictures, seed)
        for number in range(len(pictures)):
            await traffic.ask(client, number, 0)
        keeping = [asyncio.create_task(traffic.keep(made)) for _ in range(CLIENTS)]
        try:
            hits = await _strike_in_turn(made, roles, traffic, apart)
        finally:
            traffic.over.set()
        await asyncio.gather(*keeping)
        await traffic.again(client)
        traffic.wrong += await (held_at_rest(client, 5.0) if replicas == 1 else at_rest(client))
    return traffic, hits


def images(seed: int, kills: int = 20, others: int = 4, items: int = ITEMS,
           apart: float = IMAGES_APART, replicas: int = 1) -> dict[str, Any]:
    """Runs the whole row. kills: of the actor that decodes; others: of `OTHERS` in turn, or of
    `REPLICAS_OTHERS`; apart: seconds between them."""
    turns = OTHERS if replicas == 1 else REPLICAS_OTHERS
    pictures = [AskedPictures(item) for item in held_out(items)]
    roles = ["media"] * kills
    for at in range(others):
        roles.insert((at + 1) * len(roles) // (others + 1), turns[at % len(turns)])
    with rig(ROLES["worker-0"], {"media": MEDIA}, null_worker=False, skip_tokenizer=False,
             model=str(PICTURE_MODEL), device="cpu", dtype="float32", replicas=replicas) as made:
        traffic, hits = asyncio.run(_run_images(made, pictures, roles, seed, apart, replicas))
    wrong = [*traffic.wrong, *made.left]
    if hits < len(roles):
        wrong.append(f"only {hits} of {len(roles)} faults")
    right = sum(traffic.said.get((number, 0), ("", ""))[0].strip() == picture.right
                for number, picture in enumerate(pictures))
    if right < LEAST_RIGHT * len(pictures):  # or what is compared are no answers
        wrong.append(f"only {right} of {len(pictures)} undisturbed answers are right")
    return {"questions": traffic.asked, "compared": traffic.compared, "items": len(pictures),
            "right_undisturbed": right, "faults": dict(Counter(roles[:hits])), "wrong": wrong}
