"""Deaths that `actorium verify` brings about: when, and whom they met."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from actorium.actors.runtime.roles import WORKER
from actorium.tools.chaos.faults import RunningActor
from actorium.tools.verify import engine_readers
from actorium.tools.verify.engine_readers import ReadingProgress, Unfinished, WorkerDeath, met_by


def test_whom_a_death_met() -> None:
    """Four sequences were taken back: those of the requests that ended last."""
    three = [Unfinished(0, 1, 5.0), Unfinished(2, 1, 1.1), Unfinished(5, 3, 5.2)]
    assert met_by(three, 4) == {0, 5}
    assert met_by(three, 3) == {5} and met_by(three, 5) == {0, 2, 5}
    assert met_by(three, 0) == set() and met_by([], 4) == set()


def struck(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, int]) -> tuple[WorkerDeath, int]:
    """The death, and how many tokens had been told. answers: (length, tokens at once) of each."""
    told, kills = 0, list[tuple[int, int]]()
    monkeypatch.setattr(engine_readers, "actors", lambda _: {WORKER: RunningActor(WORKER, 77, 1)})
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append((pid, told)))

    async def answer(progress: ReadingProgress, length: int, at_once: int) -> None:
        nonlocal told
        for done in range(0, length, at_once):
            await asyncio.sleep(0)
            told += at_once
            progress.count(0, at_once, done + at_once >= length)

    async def work() -> WorkerDeath:
        requests = [ReadingProgress(1, 2) for _ in answers]
        death = WorkerDeath(Path("/nowhere"), requests)
        await asyncio.gather(death.strike(), *(
            answer(progress, *each) for progress, each in zip(requests, answers, strict=True)))
        return death

    death = asyncio.run(asyncio.wait_for(work(), 10))
    assert death.struck == bool(kills) and {pid for pid, _ in kills} <= {77}
    return death, kills[0][1] if kills else told


def test_it_comes_while_tokens_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.SIGKILL
    death, told = struck(monkeypatch, (40, 1), (1, 1), (40, 1))
    assert death.struck and 2 <= told < 20
    assert death.met(2) == {0, 2} and death.met(0) == set()


def test_nobody_is_killed_when_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    death, told = struck(monkeypatch, (4, 4))
    assert not death.struck and told == 4 and death.met(3) == set()
