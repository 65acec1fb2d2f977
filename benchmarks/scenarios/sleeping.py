"""Sleep: how long falling asleep and waking take, what memory comes back, what a sleep costs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from harness import Rows, scenario

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client

TICKS = os.sysconf("SC_CLK_TCK")
SETTLE_S = 8.0
"""Until the fork servers, of which a worker starts quickly, have imported what they need."""


@scenario
def sleeps(model: str = "smollm2", runs: int = 5, seconds: float = 10.0) -> Rows:
    """Levels 1 and 2: seconds to sleep, to wake, to a first token; MiB; processor time asleep."""
    one = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    with Engine(model) as engine:
        client = engine.client
        time.sleep(SETTLE_S)
        client.generate("Once upon a time there was", SamplingParams(max_tokens=64))
        yield {"state": "awake, idle", **mib(engine), **cpu(engine, seconds)}
        for level in (1, 2):
            slept, woke, first = [], [], []
            for number in range(runs):
                began = time.perf_counter()
                client.sleep(level)
                slept.append(time.perf_counter() - began)
                if not number:
                    yield {"state": f"level {level}", **mib(engine), **cpu(engine, seconds)}
                began = time.perf_counter()
                client.wake_up()
                woke.append(time.perf_counter() - began)
                client.generate("Once", one)
                first.append(time.perf_counter() - began)
            yield {"level": level, "sleep_s": median(slept), "wake_s": median(woke),
                   "first_token_s": median(first), "most_wake_s": round(max(woke), 3)}
    with Engine(model, sleep_after=0.5) as engine:
        time.sleep(SETTLE_S)
        first = []
        for _ in range(runs):
            while not engine.client.is_sleeping():
                time.sleep(0.05)
            began = time.perf_counter()
            engine.client.generate("Once", one)
            first.append(time.perf_counter() - began)
        yield {"by_itself": "level 1", "first_token_s": median(first)}


def median(seconds: list[float]) -> float:
    return round(statistics.median(seconds), 3)


def processes(engine: Engine) -> dict[int, str]:
    """Pid -> role of all that belongs to an engine: its launcher and whatever that has started."""
    with Client(engine.name) as client:
        roles = {own.pid: own.role for own in client.status().actors if own.phase != "released"}
    (launcher,) = {parent_of(pid) for pid in roles}
    others = [int(own.name) for own in Path("/proc").iterdir()
              if own.name.isdecimal() and parent_of(int(own.name)) == launcher]
    return {launcher: "launcher", **dict.fromkeys(others, "fork server"), **roles}


def parent_of(pid: int) -> int:
    """0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def mib(engine: Engine) -> dict[str, float]:
    """Memory of the worker (its resident size), and of all processes (shared pages counted once).
    """
    def field(pid: int, name: str) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    found = processes(engine)
    worker = [field(pid, "Rss") for pid, role in found.items() if role == "worker-0"]
    return {"worker_mib": round(sum(worker) / 1024),
            "all_mib": round(sum(field(pid, "Pss") for pid in found) / 1024)}


def cpu(engine: Engine, seconds: float) -> dict[str, float]:
    """Milliseconds of processor time in a second, of the worker and of all processes."""
    def used(pids: Iterable[int]) -> dict[int, float]:
        fields = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                  for pid in pids}
        return {pid: (int(own[11]) + int(own[12])) / TICKS for pid, own in fields.items()}

    found = processes(engine)
    before = used(found)
    time.sleep(seconds)
    after = used(found)
    spent = {pid: 1e3 * (after[pid] - before[pid]) / seconds for pid in found}
    worker = sum(own for pid, own in spent.items() if found[pid] == "worker-0")
    return {"worker_cpu_ms_per_s": round(worker, 1), "cpu_ms_per_s": round(sum(spent.values()), 1)}
