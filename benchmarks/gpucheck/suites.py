"""Groups of tests: several processes of pytest side by side, each going on behind a test that ended
it; their outcomes as rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from .outcomes import read
from .plan import ROOT, Group, Suite
from .record import FAILED, LEFT_OUT, RIGHT, TIMED_OUT, WRONG, Record, without_paths

AGAIN = 6
"""Most processes of one suite."""
POLL = 0.5
PRINTED = 60_000
"""The most characters of each pytest's output in the log."""


def command(suite: Suite) -> list[str]:
    return [sys.executable, "-m", "pytest", *suite.file.split(), "-m", "gpu",
            "-p", "gpucheck.outcomes", "-o", "addopts=",
            "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short", "-v",
            *(["-k", suite.keyword] if suite.keyword else [])]


def environment(suite: Suite, file: Path) -> dict[str, str]:
    """What that process is given beside ours. file: of its outcomes."""
    which, number = suite.shard
    return {"GPUCHECK_FILE": str(file), "GPUCHECK_SHARD": f"{which}/{number}",
            "GPUCHECK_LIMIT": str(suite.limit), "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (
                str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))}


class Running:
    def __init__(self, suite: Suite, scratch: Path) -> None:
        self.suite, self._tries = suite, 0
        stem = "".join(c if c.isalnum() else "-" for c in suite.name)
        self.file, self._log = scratch / f"{stem}.outcomes", scratch / f"{stem}.log"
        self.error, self.late = "", False
        self.start()

    def start(self) -> None:
        """A process for the tests that have no outcome yet."""
        suite, self._tries = self.suite, self._tries + 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command(suite), cwd=ROOT, env=os.environ | environment(suite, self.file),
                stdout=log, stderr=log, start_new_session=True)

    def over(self) -> bool:
        """Whether it is; a process that has ended before its last test is followed by another."""
        code = self._process.poll()
        if code is None:
            return False
        now = read(self.file)["now"]
        if now is not None:
            self._failed(now, code)
        found = read(self.file)
        left = found["selected"] - len(found["tests"])
        if left > 0 and self._tries < AGAIN and (code not in (0, 1) or now is not None):
            self.start()
            return False
        if code not in (0, 1, 86) and now is None:
            self.error = "no test is there" if code == 5 else f"pytest's exit code {code}"
        return True

    def _failed(self, now: list[Any], code: int) -> None:
        name, since, limit = now
        spent, why = time() - since, f"exit code {code}"
        if code == TIMED_OUT and spent >= limit:
            why = f"took more than {limit:.0f} s: its stacks are in the log"
        found = read(self.file)
        found["tests"][name] = ["failed", round(spent, 1), why]
        found["now"] = None
        self.file.write_text(json.dumps(found))

    def stop(self) -> None:
        """Dumps its stacks into the log, then ends it."""
        self._process.send_signal(signal.SIGABRT)  # faulthandler dumps its stacks
        sleep(0.3)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        now = read(self.file)["now"]
        self.error, self.late = "the time was over" + (f" in {now[0]}" if now else ""), True

    def print(self) -> None:
        if self._log.exists():
            text = self._log.read_text(errors="replace")
            print(f"\n=== {self.suite.name}\n{text[-PRINTED:]}", flush=True)
            self._log.unlink()


def run_suites(record: Record, group: Group, seconds: float, toy: bool, scratch: Path) -> None:
    """Runs all suites of a group, several at a time."""
    end = monotonic() + seconds
    waiting, running = list(group.suites), list[Running]()
    jobs = min(group.jobs, 2) if toy else group.jobs
    reported: dict[str, Any] = {}
    try:
        while waiting or running:
            late = monotonic() >= end
            while waiting and len(running) < jobs and not late:
                running.append(Running(waiting.pop(0), scratch))
            for each in list(running):
                if late:
                    each.stop()
                over = late or each.over()
                if reported.get(each.suite.name) != (row := _row(each)) or over:
                    reported[each.suite.name] = row
                    record.add(each.suite.name, over, **row)
                if over:
                    running.remove(each)
                    each.print()
                    _judge(record, each, row, toy)
            if late:
                break
            sleep(POLL)
    finally:
        for each in running:
            each.stop()
    for suite in waiting:
        record.skip(suite.name, "no time was left", LEFT_OUT)


def _judge(record: Record, each: Running, row: dict[str, Any], toy: bool) -> None:
    """Records the suite's verdict, its failures and what was not run."""
    name, kinds = each.suite.name, []
    for test, why in row["failures"]:
        kinds.append(WRONG if why.startswith(("assert", "AssertionError")) else FAILED)
        record.skip(test, why, kinds[-1])
    missing = row["selected"] - row["passed"] - row["failed"] - row["skipped"]
    if missing or not row["selected"] or (each.error and not each.late):
        kinds.append(LEFT_OUT if each.late else FAILED)
        record.skip(name, f"{missing or 'no'} tests: {each.error or 'none was selected'}",
                    kinds[-1])
    if row["skipped"] and not toy:
        record.skip(name, f"{row['skipped']} tests were skipped", LEFT_OUT)
    ran = RIGHT if row["passed"] else LEFT_OUT
    record.add(name, False, verdict=next(
        (kind for kind in (WRONG, FAILED, LEFT_OUT) if kind in kinds), ran))


def _row(running: Running) -> dict[str, Any]:
    found = read(running.file)
    outcomes = [outcome for outcome, _, _ in found["tests"].values()]
    return {"selected": found["selected"],
            **{kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")},
            "seconds": round(sum(spent for _, spent, _ in found["tests"].values()), 1),
            "failures": [[name.rpartition("/")[2], _why(text)]
                         for name, (outcome, _, text) in found["tests"].items()
                         if outcome == "failed"]}


def _why(text: str) -> str:
    """Returns the most informative line of a failure."""
    told = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    last = text.strip().splitlines()[-1:] or [""]
    return without_paths((told or last)[0])[:300]
