"""Runs a call: its groups in order, each in its own processes, within the time limit. Imports no
torch and never touches the device."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time

from .plan import PARTS, SLOWER, Group
from .record import FAILED, LEFT_OUT, TIMED_OUT, WRONG, Record, readings, versions
from .suites import run_suites

GRACE = 12.0
"""Seconds that a group's process gets to end by itself, when its time is over."""
AGAIN = 4
"""Most processes of one group: after a row that ended one, the next goes on behind it."""
KILLED = 124
"""Stands for the exit code of a process that had to be killed."""
SCRIPT = Path(__file__).parent.parent / "gpu.py"


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 where a test or a row failed or is wrong. A row that was left out for want
    of time or memory is no failure."""
    end = monotonic() + options.seconds
    groups = [group for group in PARTS[options.part]()
              if not options.group or group.name in options.group]
    record = Record(options.out / f"gpu-{options.part}.json")
    record.path.unlink(missing_ok=True)
    said = versions() | readings() | {
        "cache": "carried" if options.carried else "empty"}
    record.change_all(lambda all_: all_.update(part=options.part, toy=options.toy, facts=said))
    for group in groups:
        left = end - monotonic() - GRACE
        print(f"\n--- {group.name}: {max(0, left):.0f} s left", flush=True)
        own, start = Record(record.path, group.name), monotonic()
        if left < group.least and not options.toy:
            _missing(own, group,
                     f"{max(0, left):.0f} s are left, all of it takes {group.least:.0f}", LEFT_OUT)
            continue
        seconds = SLOWER * group.most if options.toy else min(left, group.most)
        if group.suites:
            run_suites(own, group, seconds, options.toy, options.scratch)
        else:
            _measured(own, group, seconds, options)
        spent, now = monotonic() - start, readings()
        own.change(lambda own, spent=spent, now=now: own["facts"].update(
            seconds_spent=round(spent, 1), **({"readings_behind_it": now} if now else {})))
    found = record.read()
    return 1 if any(each["kind"] in (FAILED, WRONG) for own in found["groups"].values()
                    for each in own["skipped"]) else 0


def _measured(record: Record, group: Group, seconds: float, options: argparse.Namespace) -> None:
    """Measures a group's rows, in as many processes as it takes."""
    end = monotonic() + seconds
    why = "it was not reached"
    for _ in range(AGAIN):
        before, start = _accounted(record), monotonic()
        given = max(5.0, end - start)
        code, why = in_a_process(record, group.name, given, options)
        if code == TIMED_OUT and monotonic() - start > given - 1:
            why = f"its process took more than {given:.0f} s: its stacks are in the log"
        if why:
            why += _blame(record, group, code)
        if code == 0 or _accounted(record) == before or (
                end - monotonic() < group.least / 2 and not options.toy):
            break
    if error := record.group()["facts"].get("error"):
        why = error
    _missing(record, group, why or "it was not reached", FAILED)


def in_a_process(record: Record, name: str, seconds: float, options: argparse.Namespace
                 ) -> tuple[int, str]:
    """(exit code, why it is not 0) of a process that measures a group."""
    command = [sys.executable, str(SCRIPT), options.part, "--only", name, "--record",
               str(record.path), "--seconds", str(seconds), "--out", str(options.out),
               "--memory", str(options.memory), "--row-limit", str(options.row_limit),
               *(["--toy"] if options.toy else [])]
    for each in options.fault:
        group, _, fault = each.partition("/")
        command += ["--fault", fault] if group == name else []
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(seconds + GRACE / 2)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # its stacks, into the log
        sleep(1.0)
        code = None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
    if code is None:
        return KILLED, f"it took more than {seconds:.0f} s; where, the log tells"
    if code < 0:
        return code, f"signal {signal.Signals(-code).name}"
    return code, f"exit code {code}" if code else ""


def _blame(record: Record, group: Group, code: int) -> str:
    """What was under way when a process ended has failed; more words on why it did."""
    now = record.group()["now"]
    if now is None:
        return ""
    late = code in (TIMED_OUT, KILLED) and time() - now["since"] >= now["limit"]
    reason = f"took more than {now['limit']:.0f} s: its stacks are in the log" if late else (
        "its process ended: see the log")
    record.skip(now["name"], reason)
    record.end()
    return "" if now["name"] in {row.name for row in group.rows} else f" in {now['name']}"


def _accounted(record: Record) -> int:
    own = record.group()
    return len(own["rows"]) + len(own["skipped"])


def _missing(record: Record, group: Group, why: str, kind: str) -> None:
    """Marks every row without a result as skipped."""
    own = record.group()
    there = {each["name"] for each in (*own["rows"], *own["skipped"])}
    for row in group.rows:
        if row.name not in there:
            record.skip(row.name, why, kind)

