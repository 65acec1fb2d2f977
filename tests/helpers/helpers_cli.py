"""Running the command line as a user does: own process, own run directory, no stray settings; but
forked off one that has imported what it needs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from helpers_zygote import ForkedPython

NULL = ("--null-worker", "--skip-tokenizer", "--device", "cpu")
"""Flags of an engine without a model."""
ROLES = {"tokenizer", "scheduler", "worker-0", "detokenizer", "watchdog"}


class Cli:
    """The command line, with engines under a run directory of its own."""

    forked = True
    """Off what has imported most of it; see `real_starts`."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.env = {name: value for name, value in os.environ.items()
                    if not name.startswith("ACTORIUM_")} | {"ACTORIUM_RUN_DIR": run_dir,
                                                            "ACTORIUM_CRASH_REPORTS": "off",
                                                            "ACTORIUM_FORK_SERVER": "off"}

    def start(self, *words: str, env: Mapping[str, str], **pipes: Any) -> subprocess.Popen[bytes]:
        """A process of this command line."""
        if self.forked:
            return ForkedPython(self.argv(*words)[1:], env, **pipes)
        return subprocess.Popen(self.argv(*words), env=env, **pipes)

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "actorium.tools.cli", *words]

    def run(self, *words: str, stdin: bytes = b"", timeout: float = 90.0,
            **env: str) -> subprocess.CompletedProcess[bytes]:
        """Run to its end."""
        with self.start(*words, env=self.env | env, stdin=PIPE, stdout=PIPE,
                        stderr=PIPE) as process:
            try:
                said = process.communicate(stdin, timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, *said)

    def actors(self) -> list[dict[str, Any]]:
        """Returns the output of `ps --json`."""
        done = self.run("ps", "--json")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert isinstance(rows, list)
        return rows

    def entries(self) -> list[str]:
        """Returns what engines have left behind."""
        base = Path(self.run_dir)
        return sorted(entry.name for entry in base.iterdir()) if base.is_dir() else []

    @contextlib.contextmanager
    def serve(self, *words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
        """`actorium serve` in the background, ready; killed at the end if it still runs. Without
        HTTP unless a port is named."""
        if "--port" not in words:
            words = ("--no-http", *words)
        process = self.start("serve", *words, env=self.env | env, stdin=subprocess.DEVNULL,
                             stdout=PIPE, stderr=PIPE)
        try:
            report = read_until(process, b"ready after:")
            process.report = report  # type: ignore[attr-defined]
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def read_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """The lines of its stderr up to the one with `text`."""
    seen = b""
    assert process.stderr is not None
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"it ended with {process.wait()}: {seen.decode()}")


def eventually(check: Callable[[], bool], timeout: float = 10.0) -> bool:
    """Whether `check` comes true in time."""
    until = time.monotonic() + timeout
    while not check():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def one_line(stderr: bytes) -> str:
    """The error, asserted to be a single line."""
    lines = [line for line in stderr.decode().splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def cli() -> Iterator[Cli]:
    run_dir = tempfile.mkdtemp(prefix="act", dir="/tmp")
    try:
        yield Cli(run_dir)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
