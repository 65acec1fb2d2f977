"""What a worker imports before it can load a model, for the fork server
(`actors/runtime/fork_server.py`)."""

from __future__ import annotations

import os
from importlib import import_module

from actorium.actors.config.tree import Config
from actorium.gpu.worker.thread_spin import spin_rounds

MODULES = ("actorium.actors.runtime.shell", "actorium.gpu.worker.core",
           "actorium.gpu.worker.device", "actorium.gpu.worker.prefault",
           "actorium.gpu.worker.rank_setup", "actorium.gpu.worker.timing")


def preload(config: Config) -> None:
    """Import it, under the environment that a worker of this configuration sets. No thread is left,
    and CUDA is not touched: both would not survive a fork."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_rounds(config)))
    for name in MODULES:
        import_module(name)
