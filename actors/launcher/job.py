"""The job of an `Engine`'s launcher: the messages between the two, as lines of JSON, and its entry.

`python -m actorium.actors.launcher.job PARENT_PID REPORT_FD`, with an `EngineJob` on stdin, runs
that job; it stops when that parent dies.
"""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import Config


class EngineJob(Struct, frozen=True):
    """What an `Engine` asks its launcher to run."""

    config: Config
    roles: dict[str, str] | None = None


class JobReport(Struct, frozen=True, omit_defaults=True):
    """A line of JSON from the launcher to its `Engine`: started, or failed and why."""

    event: str
    run_dir: str = ""
    code: str = ""
    message: str = ""


def main(argv: list[str]) -> int:
    """Run the job on stdin for the process `argv[0]`, reporting to the descriptor `argv[1]`."""
    from actorium.actors.launcher.cluster_launcher import ClusterLauncher
    from actorium.actors.launcher.hooks import launcher_hooks

    parent, report_fd = int(argv[0]), int(argv[1])
    os.set_inheritable(report_fd, False)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineJob)

    def report(line: JobReport) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(report_fd, msgspec.json.encode(line) + b"\n")

    launcher = ClusterLauncher(job.config, job.roles,
                               lambda path: report(JobReport("started", run_dir=str(path))),
                               launcher_hooks())
    launcher.tie_to(parent)
    code = launcher.run()
    if launcher.failure is not None:
        report(JobReport("failed", code=launcher.failure.code, message=launcher.failure.message))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
