"""The process of a model's engine, its launcher, which belongs to the server and not to the manager
that has started it:

    python -m actorium.actors.model_manager.engine_process REPORT_FD SERVER_PID SERVER_PIDFD

with an `EngineJob` on stdin. It ends when the server's launcher does, however that ends. REPORT_FD
gets the lines of a `JobReport`, which nobody may read any more.
"""

from __future__ import annotations

import os
import sys

import msgspec

from actorium.actors.errors import ActoriumError
from actorium.actors.launcher.engine import EngineJob, JobReport, report, report_failure
from actorium.actors.launcher.launcher import Launcher
from actorium.actors.models.obtain import with_model_path
from actorium.actors.runtime.process import EXIT_BAD_CONFIG


def main(argv: list[str]) -> int:
    """Runs the engine; returns the exit code of its launcher."""
    report_fd, server, server_fd = map(int, argv)
    for fd in (report_fd, server_fd):
        os.set_inheritable(fd, False)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineJob)
    try:
        config = with_model_path(job.config)
    except ActoriumError as error:
        report_failure(report_fd, error)
        return EXIT_BAD_CONFIG
    launcher = Launcher(config, job.roles, lambda path: report(
        report_fd, JobReport("started", run_dir=str(path))))
    launcher.tie_to(server, server_fd)
    code = launcher.run()
    report_failure(report_fd, launcher.failure)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
