"""Groups of tests: several processes of pytest side by side, each going on behind a test that ended
it; their outcomes as rows, and as one JUnit file of all."""

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
from xml.etree import ElementTree

from .outcomes import read
from .plan import ROOT, Group, Suite
from .record import LEFT_OUT, TIMED_OUT, Record, without_paths

AGAIN = 6
"""Most processes of one suite."""
POLL = 0.5
PRINTED = 60_000
"""Of what each pytest has said, most characters in the log."""


def command(suite: Suite) -> list[str]:
    """Of its process."""
    return [sys.executable, "-m", "pytest", suite.file, "-m", "gpu", "-p", "gpucheck.outcomes",
            "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header",
            "--tb=short", "-v", *(["-k", suite.keyword] if suite.keyword else [])]


def environment(suite: Suite, file: Path) -> dict[str, str]:
    """What that process is given beside ours. file: of its outcomes."""
    which, number = suite.shard
    return {"GPUCHECK_FILE": str(file), "GPUCHECK_SHARD": f"{which}/{number}",
            "GPUCHECK_LIMIT": str(suite.limit), "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (
                str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))}


class Running:
    """A suite and its process."""

    def __init__(self, suite: Suite, scratch: Path) -> None:
        self.suite, self._tries = suite, 0
        stem = "".join(c if c.isalnum() else "-" for c in suite.name)
        self.file, self._log = scratch / f"{stem}.outcomes", scratch / f"{stem}.log"
        self.error = ""
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
        """The test that was under way."""
        name, since, limit = now
        spent, why = time() - since, f"exit code {code}"
        if code == TIMED_OUT and spent >= limit:
            why = f"took more than {limit:.0f} s: its stacks are in the log"
        found = read(self.file)
        found["tests"][name] = ["failed", round(spent, 1), why]
        found["now"] = None
        self.file.write_text(json.dumps(found))

    def stop(self) -> None:
        """Its stacks into the log, then an end."""
        self._process.send_signal(signal.SIGABRT)  # faulthandler tells where it is
        sleep(0.3)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.error = "stopped: the time was over"

    def print(self) -> None:
        """What pytest said, into the log."""
        if self._log.exists():
            text = self._log.read_text(errors="replace")
            print(f"\n=== {self.suite.name}\n{text[-PRINTED:]}", flush=True)
            self._log.unlink()


def run_suites(record: Record, group: Group, seconds: float, toy: bool, scratch: Path) -> None:
    """All of a group's, so many at a time."""
    end = monotonic() + seconds
    waiting, running, over = list(group.suites), list[Running](), list[Running]()
    jobs = min(group.jobs, 2) if toy else group.jobs
    told: dict[str, Any] = {}
    try:
        while waiting or running:
            late = monotonic() >= end
            while waiting and len(running) < jobs and not late:
                running.append(Running(waiting.pop(0), scratch))
            for each in list(running):
                if late:
                    each.stop()
                if late or each.over():
                    running.remove(each)
                    over.append(each)
                    each.print()
                if told.get(each.suite.name) != (row := _row(each)) or each in over:
                    told[each.suite.name] = row
                    record.add(each.suite.name, each in over, **row)
            if late:
                break
            sleep(POLL)
    finally:
        for each in running:
            each.stop()
    for suite in waiting:
        record.skip(suite.name, "no time was left", LEFT_OUT)
    for each in over:
        _told(record, each, told[each.suite.name], toy)
    _write_xml(record.path.with_name(f"{record.path.stem}-tests.xml"), group.name,
               [(each.suite.name, read(each.file)["tests"]) for each in over])


def _told(record: Record, each: Running, row: dict[str, Any], toy: bool) -> None:
    """What failed, and what was not run."""
    missing = row["selected"] - row["passed"] - row["failed"] - row["skipped"]
    if each.error or not row["selected"]:
        record.skip(each.suite.name, f"{missing} tests: {each.error or 'none was selected'}")
    for name, why in row["failures"]:
        record.skip(name, why)
    if not toy and row["skipped"]:
        record.skip(each.suite.name, f"{row['skipped']} tests were skipped", LEFT_OUT)


def _row(running: Running) -> dict[str, Any]:
    found = read(running.file)
    outcomes = [outcome for outcome, _, _ in found["tests"].values()]
    return {"file": Path(running.suite.file).name, "selected": found["selected"],
            **{kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")},
            "seconds": round(sum(spent for _, spent, _ in found["tests"].values()), 1),
            "failures": [[name.rpartition("/")[2], _why(text)]
                         for name, (outcome, _, text) in found["tests"].items()
                         if outcome == "failed"]}


def _why(text: str) -> str:
    """The line that tells most."""
    told = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    last = text.strip().splitlines()[-1:] or [""]
    return without_paths((told or last)[0])[:300]


def _write_xml(path: Path, group: str, suites: list[tuple[str, dict[str, Any]]]) -> None:
    """Add the suites to the file, a JUnit one."""
    root = (ElementTree.parse(path).getroot() if path.exists()
            else ElementTree.Element("testsuites"))
    for name, tests in suites:
        count = [outcome for outcome, _, _ in tests.values()]
        suite = ElementTree.SubElement(
            root, "testsuite", name=f"{group}: {name}", tests=str(len(count)), errors="0",
            failures=str(count.count("failed")), skipped=str(count.count("skipped")),
            time=f"{sum(spent for _, spent, _ in tests.values()):.3f}")
        for test, (outcome, spent, text) in tests.items():
            file, _, case = test.partition("::")
            node = ElementTree.SubElement(suite, "testcase", time=f"{spent:.3f}", name=case,
                                          classname=file.removesuffix(".py").replace("/", "."))
            if outcome != "passed":
                said = ElementTree.SubElement(
                    node, "failure" if outcome == "failed" else "skipped", message=_why(text))
                said.text = without_paths("".join(c for c in text if c >= " " or c in "\n\t"))
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)

