"""The death of a worker while requests are under way, and which of them it met."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.runtime.roles import WORKER
from actorium.tools.chaos.faults import actors
from actorium.tools.verify.engine_readers import ReadingProgress

LATE = 1.0
"""Seconds that the scheduler's count may come after the answers: it rides on heartbeats."""
POLL = 0.05


class Unfinished(NamedTuple):
    """A request that had not ended when the worker died."""

    number: int
    choices: int
    """Of it, that had not ended."""
    ended_at: float
    """Seconds, of any clock."""


class WorkerDeath:
    """One death, in the midst of a round."""

    def __init__(self, run_dir: Path, requests: Sequence[ReadingProgress]) -> None:
        # Looking for the process takes longer than a short answer.
        self._victim = actors(run_dir).get(WORKER)
        self._requests = requests
        self._open: list[tuple[int, int]] = []
        self.struck = False

    async def strike(self) -> None:
        """Once one of them is under way, or is over: nobody is killed if all are then."""
        waits = [asyncio.ensure_future(one.turned.wait()) for one in self._requests]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        self._open = [(number, one.open_choices) for number, one in enumerate(self._requests)
                      if one.open_choices]
        if self._open and self._victim is not None:
            with suppress(ProcessLookupError):
                os.kill(self._victim.pid, signal.SIGKILL)
                self.struck = True

    def met(self, preempted: int) -> set[int]:
        """Numbers of the requests whose whole answer was under way. preempted: sequences that the
        scheduler took back from the worker."""
        unfinished = [Unfinished(number, choices, self._requests[number].ended_at)
                      for number, choices in self._open]
        return {number for number in met_by(unfinished, preempted)
                if not self._requests[number].leaving}

    async def taken_back(self, client: AsyncClient, before: int) -> int:
        """Sequences that the scheduler ever took back from a dead worker, `before` of them until
        now."""
        until = asyncio.get_running_loop().time() + LATE
        while self.struck:
            count = await taken_back(client)
            if count > before or asyncio.get_running_loop().time() > until:
                return count
            await asyncio.sleep(POLL)
        return before


async def taken_back(client: AsyncClient) -> int:
    """Sequences that the scheduler ever took back from a dead worker, as of its last heartbeat."""
    with suppress(ActoriumError):
        for actor in (await client.status()).actors:
            if actor.role == "scheduler":
                return int(actor.gauges.get("preemptions_worker", 0))
    return 0


def met_by(unfinished: Sequence[Unfinished], preempted: int) -> set[int]:
    """The numbers of those whose sequences were computed when the worker died. Some had only their
    last tokens still on the way: these end first, since the others wait for another worker."""
    found: set[int] = set()
    for one in sorted(unfinished, key=lambda one: -one.ended_at):
        if preempted <= 0:
            break
        found.add(one.number)
        preempted -= one.choices
    return found
