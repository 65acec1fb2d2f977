"""The agent that Ray runs on a machine: it starts a node's agent there, and watches it.

Ray makes an actor of `RayAgent` and calls its methods; they take and return texts and numbers
alone. Nothing here imports Ray. The agent is no child of Ray's process: when that dies, or all of
Ray does, the agent and its replicas go on, and whoever comes to this machine for the same node
finds them. Run as a module, it starts a program that is nobody's child, and prints its pid:

    python -m actorium.actors.cluster.ray.ray_agent LOG PROGRAM ARG...
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from actorium import __version__
from actorium.actors.runtime.process import kill_group, python, send_signal
from actorium.actors.runtime.rundir import OWN_LEVELS, base_dir, is_running, write_private
from actorium.actors.runtime.security import private_paths

CLI = "actorium.tools.cli"
START = 60.0
"""Seconds that an agent gets to be there."""
LOOK = 0.05
SETS_THREADS = "OMP_NUM_THREADS"
"""Ray sets it for its own workers; ours get it from the agent."""


class RayAgent:
    """The agent of one node, and what knows of it."""

    def __init__(self, node: str, cluster: str, tag: str) -> None:
        """cluster: its name; tag: tells it from others of that name."""
        self._base = Path(f"{base_dir()}-ray") / tag / node
        self._run_dir = self._base / cluster
        self._key = self._base / f"{node}.key"
        self._pid_file, self._log = self._base / f"{cluster}.pid", self._base / f"{cluster}.log"
        self._starting = asyncio.Lock()
        self._pid = 0

    async def start(self, version: str, words: list[str], key: str) -> bool:
        """Have the agent run; False if it did already. version: of the head's actorium; words:
        those of `actorium cluster join` without what is this machine's; key: what is in the node's
        key file. Raises `RuntimeError` with what the agent said."""
        if version != __version__:
            raise RuntimeError(f"this machine has actorium {__version__}, the head {version}")
        async with self._starting:
            return await asyncio.to_thread(self._start, words, key)

    def _start(self, words: list[str], key: str) -> bool:
        private_paths.check_directory(self._base, make=True, keep_links=OWN_LEVELS)
        if is_running(self._run_dir):
            self._pid = int(self._pid_file.read_text())
            return False
        write_private(self._log, b"")
        write_private(self._key, key.encode())
        try:
            self._pid = detached(self._log, python(
                CLI, "cluster", "join", *words, "--key", str(self._key), "--run-dir",
                str(self._base)))
            write_private(self._pid_file, b"%d" % self._pid)
            until = time.monotonic() + START
            while not is_running(self._run_dir):
                if not Path(f"/proc/{self._pid}").exists() or time.monotonic() > until:
                    raise RuntimeError(f"the agent does not start: {self._last_line()}")
                time.sleep(LOOK)
        finally:
            self._key.unlink(missing_ok=True)  # it has been read
        return True

    async def watch(self) -> str:
        """Returns when the agent has ended, with the last line that it wrote."""
        await self._ended()
        return self._last_line() or "its agent has ended"

    async def end(self, patience: float) -> None:
        """End the agent and its replicas; after `patience` seconds they are killed."""
        send_signal(self._pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended(), patience)
        except TimeoutError:
            kill_group(self._pid)  # replicas die with it
            await self._ended()

    async def _ended(self) -> None:
        try:
            pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            return
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            return (self._log.read_text(errors="replace").splitlines() or [""])[-1][:400]
        return ""


def detached(log: Path, argv: list[str]) -> int:
    """Start a program that outlives this process and whoever kills its children. Returns its pid;
    what it writes goes to the end of `log`."""
    environ = {name: value for name, value in os.environ.items() if name != SETS_THREADS}
    done = subprocess.run(python("actorium.actors.cluster.ray.ray_agent", str(log), *argv),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environ, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    with open(sys.argv[1], "ab") as out:
        process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                   start_new_session=True)
    print(process.pid, flush=True)
    os._exit(0)  # it is not waited for
