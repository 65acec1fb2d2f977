"""The file of a call, complete after every row, so that a call stopped midway loses nothing; and
the labels of every result: versions, driver, clocks, date. Imports no torch.

One process writes at a time: the battery between its groups, a group's process while it runs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import time
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numpy", "fla-core")
ASKED = {"driver": "driver_version", "sm_mhz": "clocks.sm", "sm_mhz_most": "clocks.max.sm",
         "memory_mhz": "clocks.mem", "watts": "power.draw", "watts_most": "power.limit",
         "celsius": "temperature.gpu"}


def versions() -> dict[str, Any]:
    content: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                             "python": platform.python_version()}
    for name in PACKAGES:
        try:
            content[name] = version(name)
        except PackageNotFoundError:
            continue
    return content


def readings() -> dict[str, Any]:
    """Returns current clocks, power and temperature; empty where they cannot be read."""
    if shutil.which("nvidia-smi") is None:
        return {}
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(ASKED.values())}",
             "--format=csv,noheader,nounits", "--id=0"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
    return {name: _number(value) for name, value in zip(ASKED, values, strict=False)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a driver's version has two dots


RIGHT, SLOW, WRONG = "right", "slow", "wrong"
"""What a row says of itself: as its reference has it and as fast as is wanted, or not."""
FAILED, LEFT_OUT = "failed", "left out"
"""Why a row is not there, or says nothing, beside that it is wrong."""
BROKEN = ("illegal memory access", "device-side assert", "misaligned address", "launch failure",
          "illegal instruction", "operation not permitted when stream is capturing",
          "operation failed due to a previous error during capture")
"""What CUDA says of a context that nothing can be done in any more."""
BROKEN_CODE = 86
"""Exit code of a process that ends after such an error."""
TIMED_OUT = 1
"""Exit code of a process ended by faulthandler after it dumped its stacks."""
PATHS = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+([\w.+@-]*)")


class Record:
    """{"part", "toy", "facts", "groups": {name: {"facts", "rows", "skipped", "now", ...}}}"""

    def __init__(self, path: Path, group: str = "") -> None:
        """path: of the .json file; beside it a .md is kept. group: whose rows are written."""
        self.path, self._group = path, group

    def read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"part": "", "toy": False, "facts": {}, "groups": {}}
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content

    def group(self, name: str = "") -> dict[str, Any]:
        content: dict[str, Any] = self.read()["groups"].get(name or self._group, {})
        return {"facts": {}, "rows": [], "skipped": [], "now": None} | content

    def row(self, name: str, group: str = "") -> dict[str, Any]:
        """One row of a group; empty where it is not there."""
        return next((row for row in self.group(group)["rows"] if row["name"] == name), {})

    def change(self, edit: Callable[[dict[str, Any]], object]) -> None:
        def whole(all_: dict[str, Any]) -> None:
            own = all_["groups"].setdefault(self._group, {
                "facts": {}, "rows": [], "skipped": [], "now": None})
            edit(own)
        self.change_all(whole)

    def change_all(self, edit: Callable[[dict[str, Any]], object]) -> None:
        found = self.read()
        edit(found)
        _replace(self.path, json.dumps(found, indent=1) + "\n")
        try:
            from . import report
            _replace(self.path.with_suffix(".md"), report.page(found))
        except Exception:  # figures are worth more than their table
            traceback.print_exc()

    # --- a group's ---------------------------------------------------------------------------

    def facts(self, **facts: Any) -> None:
        self.change(lambda own: own["facts"].update(facts))
        print(f"  {facts}", flush=True)

    def add(self, name: str, aloud: bool = True, /, **row: Any) -> None:
        """A row, or more of it. aloud: in the log as well."""
        def edit(own: dict[str, Any]) -> None:
            for there in own["rows"]:
                if there["name"] == name:
                    there.update(row)
                    return
            own["rows"].append({"name": name, **row})
        self.change(edit)
        if aloud:
            print(f"  {name}: " + ", ".join(f"{k} {short(v)}" for k, v in row.items()),
                  flush=True)

    def skip(self, name: str, why: str, kind: str = FAILED) -> None:
        """Say that a row, or a part of one, is not there."""
        why = without_paths(why)
        self.change(lambda own: own["skipped"].append({"name": name, "why": why, "kind": kind}))
        print(f"  {kind}: {name}: {why}", flush=True)

    def begin(self, name: str, limit: float) -> None:
        """A row is under way: if the process ends, it was that one."""
        now = {"name": name, "limit": limit, "since": time()}
        self.change(lambda own: own.update(now=now))

    def end(self) -> None:
        self.change(lambda own: own.update(now=None))


def _replace(path: Path, text: str) -> None:
    scratch = path.with_suffix(path.suffix + ".new")
    scratch.write_text(text)
    os.replace(scratch, path)


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def without_paths(text: str) -> str:
    """The same without the folders of this machine."""
    return PATHS.sub(r"\1", text)


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
