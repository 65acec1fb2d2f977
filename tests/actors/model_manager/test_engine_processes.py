"""Engines of the manager before."""

from __future__ import annotations

import os
import subprocess

from actorium.actors.model_manager.engine_processes import LAUNCHER, launchers_of
from actorium.actors.runtime.process import python


def test_a_launcher_without_a_run_directory_is_found() -> None:
    """It waits for its engine's settings."""
    read, write = os.pipe()
    server = os.getpid()
    process = subprocess.Popen(python(LAUNCHER, str(write), str(server), str(read)),
                               stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               pass_fds=(read, write))
    try:
        assert launchers_of(server) == {process.pid}
        assert not launchers_of(server + 1)
    finally:
        process.kill()
        process.communicate()
        os.close(read)
        os.close(write)
    assert not launchers_of(server)
