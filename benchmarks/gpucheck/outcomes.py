"""A plugin of pytest: what became of each test, in a file that is whole after every one; a share of
the tests; and an end to those that hang.

From the environment: GPUCHECK_FILE; GPUCHECK_SHARD "0/4"; GPUCHECK_LIMIT, seconds of one test. The
tests that the file knows already are not run again: who goes on after a crash begins behind it.
"""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path
from time import time
from typing import Any
from zlib import crc32

import pytest

from .record import BROKEN, BROKEN_CODE

FILE = Path(os.environ.get("GPUCHECK_FILE", os.devnull))
_STDERR = os.dup(2)  # pytest captures the other one


def read(path: Path) -> dict[str, Any]:
    """{"selected", "now", "tests": {name: [outcome, seconds, text]}}"""
    if path.exists() and path.is_file():
        outcomes: dict[str, Any] = json.loads(path.read_text())
        return outcomes
    return {"selected": 0, "now": None, "tests": {}}


def _change(**changes: Any) -> dict[str, Any]:
    found = read(FILE)
    found["tests"] |= changes.pop("tests", {})
    found |= changes
    scratch = FILE.with_suffix(".new")
    scratch.write_text(json.dumps(found))
    os.replace(scratch, FILE)
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Behind the selection by mark and keyword."""
    which, number = (int(n) for n in os.environ.get("GPUCHECK_SHARD", "0/1").split("/"))
    done = read(FILE)
    mine = [item for item in items if crc32(item.nodeid.encode()) % number == which]
    if not done["selected"]:
        _change(selected=len(mine))
    keep = [item for item in mine if item.nodeid not in done["tests"]]
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = keep


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    limit = float(os.environ.get("GPUCHECK_LIMIT", "90"))
    _change(now=[nodeid, time(), limit])
    faulthandler.dump_traceback_later(limit, exit=True, file=_STDERR)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of set-up, call and teardown counts; seconds: of all."""
    there = read(FILE)["tests"].get(report.nodeid)
    if report.when != "call" and report.outcome == "passed":
        return
    outcome = report.outcome
    if there and there[0] == "failed":
        outcome = "failed"
    text = ""
    if report.outcome == "failed":
        text = report.longreprtext[-6000:]
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    spent = (there[1] if there else 0.0) + report.duration
    _change(tests={report.nodeid: [outcome, spent, text or (there[2] if there else "")]})


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """A device's context that is lost fails whatever comes behind it: another process goes on."""
    faulthandler.cancel_dump_traceback_later()
    found = _change(now=None)
    outcome, _, text = found["tests"].get(nodeid, ("", 0, ""))
    if outcome == "failed" and any(sign in text for sign in BROKEN):
        os._exit(BROKEN_CODE)
