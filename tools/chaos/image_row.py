"""The row of images: questions about pictures whose answers must be the same while the process that
decodes them is killed again and again, and worker and scheduler now and then; or, of several
replicas, one of them, the router, or an actor of a replica.

The packaged model of drawn pictures, in float32: its answers tell what it has seen. Half of the
pictures are made new to the engine by a pixel, so that there is always something to decode; of
those the first answer is held against later ones, and some are asked for again when all is quiet.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from time import monotonic
from typing import Any

from PIL import Image as Pillow

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.media import Image
from actorium.actors.config.cluster_settings import ROUTER_ROLE
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import MEDIA, ROLES
from actorium.tools.chaos.cluster_row import at_rest
from actorium.tools.chaos.faults import KILL, Fault, actors, strike, wait_gone
from actorium.tools.chaos.rig import Rig, held_at_rest, rig
from actorium.tools.pictures import PICTURE_MODEL
from actorium.tools.pictures.drawn_pictures import draw
from actorium.tools.pictures.picture_questions import PictureItem, held_out

ITEMS, CLIENTS, LATEST = 40, 8, 60.0
AGAIN = 200
"""Questions that are asked again at the end."""
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
LEAST_RIGHT = 0.75
"""Part of the questions that the model answers as it should when nobody dies."""
APART = 10.0
"""Seconds of work between an actor's return and the next fault: after less the next delay would be
longer."""
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
    """The answer, and why it ended."""
    async with asyncio.timeout(LATEST):
        found = await client.chat([{"role": "user", "content": content}], GREEDY)
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
        """One client's questions, until it is over."""
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


async def _strike(made: Rig, roles: Sequence[str], traffic: ImageTraffic, apart: float) -> int:
    """Kills these in turn, each so many seconds after the last one was back; returns how many were
    there."""
    for done, role in enumerate(roles):
        await asyncio.sleep(apart)
        before, asked = actors(made.run_dir).get(role), traffic.asked
        victims = strike(Fault(0.0, KILL, (role,)), made.run_dir)
        if before is None or not victims:
            return done
        await asyncio.to_thread(wait_gone, [victims[0].pid], 5.0)
        until = monotonic() + BACK
        while monotonic() < until:
            now = actors(made.run_dir).get(role)
            if now is not None and now.pid != before.pid and traffic.asked > asked + CLIENTS:
                break
            await asyncio.sleep(0.05)
    return len(roles)


async def _run(made: Rig, pictures: Sequence[AskedPictures], roles: Sequence[str], seed: int,
               apart: float, replicas: int) -> tuple[ImageTraffic, int]:
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        traffic = ImageTraffic(pictures, seed)
        for number in range(len(pictures)):
            await traffic.ask(client, number, 0)
        keeping = [asyncio.create_task(traffic.keep(made)) for _ in range(CLIENTS)]
        try:
            hits = await _strike(made, roles, traffic, apart)
        finally:
            traffic.over.set()
        await asyncio.gather(*keeping)
        await traffic.again(client)
        traffic.wrong += await (held_at_rest(client, 5.0) if replicas == 1 else at_rest(client))
    return traffic, hits


def images(seed: int, kills: int = 20, others: int = 4, items: int = ITEMS,
           apart: float = APART, replicas: int = 1) -> dict[str, Any]:
    """Runs the whole row. kills: of the actor that decodes; others: of `OTHERS` in turn, or of
    `REPLICAS_OTHERS`; apart: seconds between them."""
    turns = OTHERS if replicas == 1 else REPLICAS_OTHERS
    pictures = [AskedPictures(item) for item in held_out(items)]
    roles = ["media"] * kills
    for at in range(others):
        roles.insert((at + 1) * len(roles) // (others + 1), turns[at % len(turns)])
    with rig(ROLES["worker-0"], {"media": MEDIA}, null_worker=False, skip_tokenizer=False,
             model=str(PICTURE_MODEL), device="cpu", dtype="float32", replicas=replicas) as made:
        traffic, hits = asyncio.run(_run(made, pictures, roles, seed, apart, replicas))
    wrong = [*traffic.wrong, *made.left]
    if hits < len(roles):
        wrong.append(f"only {hits} of {len(roles)} faults")
    right = sum(traffic.said.get((number, 0), ("", ""))[0].strip() == picture.right
                for number, picture in enumerate(pictures))
    if right < LEAST_RIGHT * len(pictures):  # or what is compared are no answers
        wrong.append(f"only {right} of {len(pictures)} undisturbed answers are right")
    return {"questions": traffic.asked, "compared": traffic.compared, "items": len(pictures),
            "right_undisturbed": right, "faults": dict(Counter(roles[:hits])), "wrong": wrong}
