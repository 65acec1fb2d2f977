"""The row of drawn faults: streams over the SDK and answers over HTTP, while the faults of a seed
strike at their points of the load.

Replayed by the seed: the faults, their order and parameters, the points at which they strike (in
tokens that clients have got), the requests and the order in which they are sent. Not replayed, as
real processes do not allow it: in which step or system call a signal arrives, how the streams
interleave, how long restarts take, and so which requests are on their way when a fault strikes.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.gateway.actor import where
from actorium.actors.ledger.segments import segments
from actorium.actors.runtime import roles as actor_roles
from actorium.tools.bench.http_client import Http
from actorium.tools.chaos.checked_streams import Gaps, RequestMaker, Traffic
from actorium.tools.chaos.drawn_faults import (
    BY_NAME,
    DrawnFault,
    draw,
    faketime,
    memory_group,
    skipped,
)
from actorium.tools.chaos.faults import SOFT_LIMIT, actors, limit_files, send, wait_ended
from actorium.tools.chaos.hostile_rows import COMPLETE, post
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, held_at_rest, rig
from actorium.tools.chaos.running_trials import ACTORS, GATEWAY, StrikeTrial, TrialStriker
from actorium.tools.cli.status import ask

STREAMS, POSTS = 24, 4
EACH = 8
"""Faults of one engine: the pause before a restart doubles from death to death."""
PATIENCE = 0.5
"""Seconds for which requests wait for a ledger."""
RECOVERED = 60.0
"""Seconds in which all actors must be back, and the tokens up to the next fault must come."""
LATEST = 120.0
OFTEN, OFTEN_SECONDS = 6, 5.0
DISK_MIB = 64
CUT = 40
"""Bytes at most: within the last record."""
DAY = 86400


class DrawnPlayer:
    """Strikes the actors of one engine."""

    def __init__(self, made: Rig, traffic: Traffic, ledger: Path, clock: Path) -> None:
        """ledger: its directory; clock: the file that says how wrong the wall clock is."""
        self._made, self._traffic = made, traffic
        self._ledger, self._clock = ledger, clock
        self.wrong: list[str] = []

    async def run(self, fault: DrawnFault) -> None:
        """Waits for the fault's point, applies it, and waits until all actors are back."""
        point = self._tokens() + fault.after
        await self._until(lambda: self._tokens() >= point,
                          f"before {fault}: {fault.after} tokens have not come")
        self._traffic.gaps.fault(fault.kind, monotonic())
        await self._strike(fault)
        await self._until(lambda: actors(self._made.run_dir).keys() >= {*ACTORS},
                          f"{fault}: actors are missing")

    async def _until_durable(self, fault: DrawnFault) -> None:
        """A death before that would lose what the ledger has not taken, as the log says."""
        until = monotonic() + RECOVERED
        while not await asyncio.to_thread(self._durable):
            if monotonic() > until:
                self.wrong.append(f"{fault}: the ledger takes no records")
                break
            await asyncio.sleep(0.1)

    def _durable(self) -> bool:
        found = ask(self._made.run_dir)
        return found is not None and any(actor.gauges.get("ledger_not_durable") == 0
                                         for actor in found.actors)

    def _tokens(self) -> int:
        return self._traffic.tally.tokens + sum(
            want.count for want in self._traffic.live.values())

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        until = monotonic() + RECOVERED
        while not holds():
            if monotonic() > until:
                self.wrong.append(f"{what} after {RECOVERED:g} s")
                return
            await asyncio.sleep(0.01)

    async def _strike(self, fault: DrawnFault) -> None:
        by_kind: dict[str, Callable[[DrawnFault], Awaitable[None]]] = {
            "kill": self._kill, "kill-two": self._kill, "kill-again": self._kill_again,
            "kill-recovery": self._kill_recovery, "kill-often": self._kill_often,
            "hang": self._hang, "disk-full": self._limit_files, "disk-full-long": self._limit_files,
            "disk-filled": self._fill_disk, "ledger-cut": self._cut_ledger,
            "ledger-removed": self._remove_ledger, "memory": self._limit, "files": self._limit,
            "memory-group": self._limit_group, "clock": self._move_clock}
        if (apply := by_kind.get(fault.kind)) is not None:
            await apply(fault)
        else:
            chance = random.Random(fault.number)
            kind = {"pause": "stop"}.get(fault.kind, fault.kind)
            await TrialStriker(self._made, chance).strike(StrikeTrial("", kind, fault.roles))

    async def _pid(self, role: str, not_this: int = 0) -> int:
        """Returns the actor's process, as soon as there is another one than that."""
        until = monotonic() + RECOVERED
        while monotonic() < until:
            known = actors(self._made.run_dir).get(role)
            if known is not None and known.pid != not_this:
                return known.pid
            await asyncio.sleep(0.005)
        self.wrong.append(f"{role} does not come back")
        return 0

    async def _end(self, role: str, not_this: int = 0) -> int:
        """Kills an actor; returns its process."""
        if pid := await self._pid(role, not_this):
            send([pid], signal.SIGKILL)
        return pid

    async def _kill(self, fault: DrawnFault) -> None:
        known = actors(self._made.run_dir)
        send([known[role].pid for role in fault.roles if role in known], signal.SIGKILL)

    async def _kill_again(self, fault: DrawnFault) -> None:
        await self._end(fault.roles[0], await self._end(fault.roles[0]))

    async def _kill_recovery(self, fault: DrawnFault) -> None:
        first, second = fault.roles
        await self._pid(first, await self._end(first))
        await asyncio.sleep(0.3 * fault.amount)
        await self._end(second)

    async def _kill_often(self, fault: DrawnFault) -> None:
        until, last, pid = monotonic() + OFTEN_SECONDS, 0, 0
        for _ in range(OFTEN):
            known = actors(self._made.run_dir).get(fault.roles[0])
            pid = known.pid if known is not None else 0
            if pid and pid != last:
                send([pid], signal.SIGKILL)
                last = pid
            await asyncio.sleep(OFTEN_SECONDS / OFTEN)
            if monotonic() > until:
                break

    async def _hang(self, fault: DrawnFault) -> None:
        pid = await self._pid(fault.roles[0])
        send([pid], signal.SIGSTOP)
        if await asyncio.to_thread(wait_ended, [pid], RECOVERED):
            self.wrong.append(f"{fault}: it was not killed")
            send([pid], signal.SIGCONT)

    async def _limit_files(self, fault: DrawnFault) -> None:
        pid = await self._pid("scheduler")
        limit_files(pid, SOFT_LIMIT)
        await asyncio.sleep(fault.seconds + (2 * PATIENCE if fault.kind == "disk-full-long" else 0))
        limit_files(pid, -1)
        await self._until_durable(fault)

    async def _fill_disk(self, fault: DrawnFault) -> None:
        filler = self._ledger.parent / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        await asyncio.sleep(fault.seconds)
        filler.unlink()
        await self._until_durable(fault)

    async def _cut_ledger(self, fault: DrawnFault) -> None:
        pid = await self._end("scheduler")
        await asyncio.to_thread(wait_ended, [pid], 1.0)
        path = segments(self._ledger)[-1]
        with suppress(OSError):
            os.truncate(path, max(path.stat().st_size - 1 - int(CUT * fault.amount), 0))

    async def _remove_ledger(self, fault: DrawnFault) -> None:
        for path in segments(self._ledger):
            path.unlink(missing_ok=True)
        await asyncio.sleep(fault.seconds)

    async def _limit(self, fault: DrawnFault) -> None:
        """Leaves an actor no more than it has, or a little more."""
        pid = await self._pid(fault.roles[0])
        entry, with_files = Path(f"/proc/{pid}"), fault.kind == "files"
        kind = resource.RLIMIT_NOFILE if with_files else resource.RLIMIT_AS
        with suppress(OSError):
            has = len(list((entry / "fd").iterdir())) if with_files else int(
                (entry / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            more = 3 * fault.amount if with_files else fault.amount * 2**22
            _, hard = resource.prlimit(pid, kind)
            resource.prlimit(pid, kind, (int(has + more), hard))
            await asyncio.sleep(fault.seconds)
            resource.prlimit(pid, kind, (hard, hard))

    async def _limit_group(self, fault: DrawnFault) -> None:
        """What it has stays with the group that it was in; the new one counts what is new."""
        pid = await self._pid(fault.roles[0])
        with memory_group(2**14 + int(fault.amount * 2**17)) as group:
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
            await asyncio.sleep(fault.seconds)

    async def _move_clock(self, fault: DrawnFault) -> None:
        self._clock.write_text(f"{round((2 * fault.amount - 1) * DAY):+d}")
        await asyncio.sleep(1.0 + fault.seconds)  # it is looked at once a second


@contextmanager
def _ledger_and_clock(filled: bool) -> Iterator[tuple[Path, Path]]:
    """Yields the ledger's directory, where possible in a file system of its own, and the clock's
    file. The wall clock of an engine started meanwhile follows that file."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ac-", dir="/tmp")))
        disk, clock = base / "disk", base / "clock"
        disk.mkdir(0o700)
        if filled:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "tmpfs",
                            str(disk)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        clock.write_text("+0")
        if (library := faketime()) is not None:
            moved = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock),
                     "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            before = {name: os.environ.get(name) for name in moved}
            os.environ.update(moved)
            stack.callback(_restore, before)
        yield disk / "ledger", clock


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


async def _posts(made: Rig, maker: RequestMaker, over: asyncio.Event) -> Counter[str]:
    """Asks over HTTP, one request after the other; returns how they have ended."""
    ends: Counter[str] = Counter()

    async def again() -> None:
        while not over.is_set():
            want = maker.make()
            while (found := where(made.run_dir)) is None:
                await asyncio.sleep(0.05)
            http = Http(found.url)
            try:
                ends[await post(http, want, LATEST)] += 1
            finally:
                http.close()

    await asyncio.gather(*(again() for _ in range(POSTS)))
    return ends


async def _part(made: Rig, ledger: Path, clock: Path, faults: Iterator[DrawnFault], seed: int,
                until: float, report: Callable[[str], None]
                ) -> tuple[Traffic, Counter[str], list[str]]:
    """Runs faults on one engine; returns its streams, the ends over HTTP, and what is wrong."""
    traffic = Traffic(RequestMaker(seed, (20, 120)), Gaps(), aborts=0.03, latest=LATEST)
    over = asyncio.Event()
    async with AsyncClient(made.engine.name, str(made.base), resume_timeout=LATEST) as client:
        running = asyncio.create_task(traffic.keep(client, STREAMS, over))
        posting = asyncio.create_task(_posts(made, RequestMaker(seed + 1, (20, 60)), over))
        playing = DrawnPlayer(made, traffic, ledger, clock)
        try:
            for fault in faults:
                why = BY_NAME[fault.kind].why_not()
                report(f"{fault}{why and ': skipped, ' + why}")
                if not why:
                    await playing.run(fault)
                if monotonic() > until or playing.wrong:
                    break
        finally:
            over.set()
        await running
        wrong = [*playing.wrong, *await held_at_rest(client, 10.0, ready=True)]
        ends = await posting
        gauges = next(a.gauges for a in (await client.status()).actors if a.role == "scheduler")
        ended = sum(n for name, n in gauges.items() if name.startswith("finished_"))
        lost = gauges["started_sequences"] - ended - gauges["open_sequences"]
        if lost:
            wrong.append(f"{lost:g} sequences are unaccounted for")
    return traffic, ends, wrong


def drawn(seed: int, minutes: float, report: Callable[[str], None] = print,
          most: int | None = None) -> dict[str, Any]:
    """Runs faults of the seed for so long; most: faults at the most. "wrong" lists all errors."""
    until, faults = monotonic() + 60 * minutes, islice(draw(seed), most)
    passed_over, struck = skipped(), Counter[str]()
    row: dict[str, Any] = {"seed": seed, "minutes": minutes, "faults": 0, "requests": 0,
                           "complete": 0, "aborted": 0, "tokens": 0, "http": Counter(),
                           "refused": Counter(), "skipped": passed_over, "wrong": []}

    def count(fault: DrawnFault) -> DrawnFault:
        if fault.kind not in passed_over:
            row["faults"] += 1
            struck[fault.kind] += 1
        return fault

    part = 0
    while monotonic() < until and (several := list(islice(faults, EACH))):
        with _ledger_and_clock("disk-filled" not in passed_over) as (ledger, clock), rig(
                SHORT_WORKER, {GATEWAY: actor_roles.GATEWAY}, port=0, max_num_seqs=4 * STREAMS,
                ledger_dir=str(ledger), ledger_patience=PATIENCE, drain_timeout=20.0) as made:
            traffic, ends, wrong = asyncio.run(_part(
                made, ledger, clock, map(count, several), seed + part, until, report))
        tally, part = traffic.tally, part + 1
        for name in ("requests", "complete", "aborted", "tokens"):
            row[name] += getattr(tally, name)
        row["refused"] += tally.refused
        row["http"] += ends
        row["wrong"] += [*tally.wrong, *wrong, *made.left, *(
            f"{n} requests failed with {code}" for code, n in tally.failed.items()), *(
            f"{n} HTTP requests: {end}" for end, n in ends.items() if end != COMPLETE)]
        if row["wrong"]:
            break
    return row | {"http": dict(row["http"]), "refused": dict(row["refused"]),
                  "kinds": dict(sorted(struck.items()))}
