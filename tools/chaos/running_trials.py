"""Strikes any actor, or any two, in any way at any moment of a running engine's life.

After each strike every stream must have ended, each token as expected, a new request must be served
by both the SDK and HTTP, and nothing may be held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from time import monotonic
from typing import Any

from msgspec import Struct

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.gateway.actor import where
from actorium.actors.params import SamplingParams
from actorium.actors.runtime import roles
from actorium.tools.bench.http_client import Http
from actorium.tools.chaos.checked_streams import CLEAN, CheckedRequest, RequestMaker, Traffic
from actorium.tools.chaos.faults import HALT, KILL, SLOW, STARVE, STOP, actors, busy_processes, send
from actorium.tools.chaos.hostile_rows import post
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, held_at_rest, rig

GATEWAY, LAUNCHER = "gateway-0", "launcher"
ACTORS = ("tokenizer", "scheduler", "worker-0", "detokenizer", GATEWAY, "watchdog")
KINDS = (KILL, STOP, HALT, SLOW, STARVE)
GENTLE = (STOP, SLOW, STARVE)
"""Strikes that the launcher must survive, too."""
IDLE, STEADY, SUBMIT, END, PREFILL, RECOVERY = MOMENTS = (
    "idle", "steady", "submit", "end", "prefill", "recovery")
STREAMS = 6
STOPPED = (1.0, 3.0)
SLOWED = 2.0
SLICE_OFF, SLICE_ON = 0.09, 0.01
LATEST = 45.0
"""Seconds in which everything must have ended."""
PROMPT = 3000
TRIALS_EACH = 8
"""Trials per engine: the pause before a restart doubles from death to death."""


class StrikeTrial(Struct, frozen=True):
    """The roles that are struck, how, and when."""

    moment: str
    kind: str
    roles: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'+'.join(self.roles)} at {self.moment}"


def singles() -> list[StrikeTrial]:
    """Returns every actor, every kind of strike, every moment."""
    found = [StrikeTrial(moment, kind, (role,)) for moment in MOMENTS for kind in KINDS
             for role in ACTORS]
    return found + [StrikeTrial(moment, kind, (LAUNCHER,)) for moment in MOMENTS for kind in GENTLE]


def pairs() -> list[StrikeTrial]:
    """Returns every pair, kind and moment; the launcher is only stopped, while another one is
    killed."""
    found = [StrikeTrial(moment, kind, two) for moment in MOMENTS for kind in KINDS
             for two in combinations(ACTORS, 2)]
    return found + [StrikeTrial(moment, KILL, (LAUNCHER, role))
                    for moment in MOMENTS for role in ACTORS]


class TrialStriker:
    """Strikes the processes of one engine."""

    def __init__(self, made: Rig, chance: random.Random) -> None:
        self._made, self._chance = made, chance

    def _pids(self, roles: Iterable[str]) -> list[int]:
        known = actors(self._made.run_dir)
        pids = [self._made.engine.pid if role == LAUNCHER else
                known[role].pid if role in known else None for role in roles]
        return [pid for pid in pids if pid is not None]

    async def strike(self, trial: StrikeTrial) -> None:
        """Applies a strike; returns when it is over (at once if it does not end by itself)."""
        pids = self._pids(trial.roles)
        match trial.kind:
            case "kill" if LAUNCHER in trial.roles:
                pid = self._made.engine.pid
                send([each for each in pids if each == pid], signal.SIGSTOP)
                send([each for each in pids if each != pid], signal.SIGKILL)
                await asyncio.sleep(self._chance.uniform(*STOPPED))
                send([each for each in pids if each == pid], signal.SIGCONT)
            case "kill":
                send(pids, signal.SIGKILL)
            case "halt":
                send(pids, signal.SIGSTOP)
            case "stop":
                send(pids, signal.SIGSTOP)
                await asyncio.sleep(self._chance.uniform(*STOPPED))
                send(pids, signal.SIGCONT)
            case "slow":
                until = monotonic() + SLOWED
                while monotonic() < until:
                    send(pids, signal.SIGSTOP)
                    await asyncio.sleep(SLICE_OFF)
                    send(pids, signal.SIGCONT)
                    await asyncio.sleep(SLICE_ON)
            case _:
                await _starve(pids)


async def _starve(pids: Sequence[int]) -> None:
    """Lowers the priority only as far as permitted: it need not be raised again."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)
    with busy_processes(os.cpu_count() or 1):
        await asyncio.sleep(SLOWED)
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, pid, 0)


class Battery:
    """Runs trials on one engine, one after the other."""

    def __init__(self, made: Rig, client: AsyncClient, seed: int) -> None:
        self._made, self._client, self._chance = made, client, random.Random(seed)
        self._maker = RequestMaker(seed, (20, 60), prompt=100)
        self._striker = TrialStriker(made, self._chance)
        self.wrong: list[str] = []
        self.requests = self.tokens = 0

    async def run(self, trial: StrikeTrial) -> bool:
        """Runs a trial; False = something went wrong."""
        traffic, before = Traffic(self._maker, latest=LATEST), len(self.wrong)
        running = [asyncio.create_task(traffic.send(self._client, want))
                   for want in self._wants(trial)]
        await self._wait_for(trial.moment, traffic, running)
        striking = asyncio.create_task(self._striker.strike(trial))
        if trial.moment == SUBMIT:
            await asyncio.sleep(0.0)
            running += [asyncio.create_task(traffic.send(self._client, self._maker.make()))
                        for _ in range(STREAMS)]
        await asyncio.gather(striking, *running)
        await self._afterwards(traffic)
        tally = traffic.tally
        self.requests, self.tokens = self.requests + tally.requests, self.tokens + tally.tokens
        wrong = tally.wrong + [f"{n} failed with {code}" for code, n in tally.failed.items()]
        wrong += [f"{n} refused with {code}" for code, n in tally.refused.items()]
        self.wrong += [f"{trial}: {text}" for text in wrong]
        return len(self.wrong) == before

    def _wants(self, trial: StrikeTrial) -> list[CheckedRequest]:
        """Returns the requests that run during the strike."""
        if trial.moment == IDLE:
            return []
        wants = [self._maker.make() for _ in range(STREAMS)]
        if trial.moment == PREFILL:
            wants.append(CheckedRequest([self._chance.randrange(CLEAN) for _ in range(PROMPT)],
                              SamplingParams(max_tokens=10, seed=self._chance.getrandbits(62),
                                             ignore_eos=True)))
        return wants

    async def _wait_for(self, moment: str, traffic: Traffic, running: list[asyncio.Task[str | None]]
                        ) -> None:
        if moment in (IDLE, SUBMIT, PREFILL):
            await asyncio.sleep(self._chance.uniform(0.0, 0.08))
            return
        wanted = 1 if moment in (STEADY, RECOVERY) else 19
        while not any(task.done() for task in running):
            if any(want.count >= wanted for want in traffic.live.values()):
                break
            await asyncio.sleep(0.002)
        if moment == RECOVERY:
            other = self._chance.choice(ACTORS)
            await self._striker.strike(StrikeTrial(moment, KILL, (other,)))
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))

    async def _afterwards(self, traffic: Traffic) -> None:
        """Checks that SDK and HTTP serve, and that nothing is held."""
        code = await traffic.send(self._client, self._maker.make())
        if code is not None:
            traffic.tally.wrong.append(f"afterwards: {code}")
        found = where(self._made.run_dir)
        http = Http(found.url) if found is not None else None
        end = "there is no gateway" if http is None else await post(http, self._maker.make(),
                                                                     LATEST)
        if http is not None:
            http.close()
        if end != "complete":
            traffic.tally.wrong.append(f"afterwards, over HTTP: {end}")
        traffic.tally.wrong += await held_at_rest(self._client, 10.0, ready=True)


class TrialReport(Struct):
    trials: int = 0
    requests: int = 0
    tokens: int = 0
    wrong: list[str] = []


def run(trials: Sequence[StrikeTrial], seed: int, seconds: float | None = None,
        report_line: Callable[[str], None] | None = None) -> TrialReport:
    """Runs trials in their order, on as many engines as it takes; seconds: after which no more
    begin; report_line: called with a line for each."""
    report = TrialReport(wrong=[])
    until = monotonic() + seconds if seconds is not None else None
    left = list(trials)
    while left and (until is None or monotonic() < until):
        with rig(SHORT_WORKER, {GATEWAY: roles.GATEWAY}, port=0, max_num_batched_tokens=256,
                 drain_timeout=20.0) as made:
            left = asyncio.run(_some(made, left, seed + report.trials, report, until, report_line))
        report.wrong += made.left
    return report


async def _some(made: Rig, trials: list[StrikeTrial], seed: int, report: TrialReport,
                until: float | None,
                report_line: Callable[[str], None] | None) -> list[StrikeTrial]:
    """Runs trials on one engine; returns those that are left."""
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        battery, done = Battery(made, client, seed), 0
        for trial in trials[:TRIALS_EACH]:
            if until is not None and monotonic() >= until:
                break
            done, began = done + 1, monotonic()
            fine = await battery.run(trial)
            if report_line is not None:
                report_line(f"{trial}: {'fine' if fine else 'wrong'}, {monotonic() - began:.1f} s")
            if not fine:
                break  # the next trial gets a fresh engine
        report.trials += done
        report.requests += battery.requests
        report.tokens += battery.tokens
        report.wrong += battery.wrong
    return trials[done:]


def lanes(trials: Sequence[StrikeTrial], seed: int, seconds: float | None = None, many: int = 3,
          report_line: Callable[[str], None] | None = None) -> TrialReport:
    """Runs trials on so many engines at a time: most of the time is waiting."""
    return in_lanes(run, trials, seed, seconds, many, report_line)


Runner = Callable[[Sequence[StrikeTrial], int, float | None, Callable[[str], None] | None],
                  TrialReport]


def in_lanes(run: Runner, trials: Sequence[StrikeTrial], seed: int, seconds: float | None,
             many: int, report_line: Callable[[str], None] | None) -> TrialReport:
    """Calls `run` for each share of the trials, `many` shares at a time; returns the merged report.
    """
    with ThreadPoolExecutor(many) as pool:
        parts = [pool.submit(run, trials[lane::many], seed + 1000 * lane, seconds, report_line)
                 for lane in range(many)]
    found = [part.result() for part in parts]
    return TrialReport(sum(r.trials for r in found), sum(r.requests for r in found),
                  sum(r.tokens for r in found), [text for r in found for text in r.wrong])


def sample(seed: int, pairs_too: int) -> list[StrikeTrial]:
    """Returns all singles and so many pairs, each in the seed's order."""
    chance = random.Random(seed)
    alone, two = singles(), pairs()
    chance.shuffle(alone)
    chance.shuffle(two)
    return alone + two[:pairs_too]


def command(about: str | None, run: Runner, flag: str, default: Any, explained: str,
            trials: Callable[[int, Any], Sequence[StrikeTrial]]) -> int:
    """Runs a command line of trials; returns its exit code. flag, default, explained: of the choice
    of trials; trials: from the seed and that choice to those that run."""
    parser = argparse.ArgumentParser(description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="default: all of them")
    parser.add_argument("--lanes", type=int, default=3, help="engines at a time")
    parser.add_argument(flag, dest="chosen", type=type(default), default=default, help=explained)
    options = parser.parse_args()
    report = in_lanes(run, trials(options.seed, options.chosen), options.seed, options.seconds,
                      options.lanes, lambda line: print(line, flush=True))
    print(f"seed {options.seed}: {report.trials} trials, {report.requests} requests, "
          f"{report.tokens} tokens, {len(report.wrong)} wrong")
    print("\n".join(report.wrong[:40]))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(command(__doc__, run, "--pairs", len(pairs()), "beside all singles", sample))
