"""Prepares a worker's process before torch is loaded: imports for the fork server
(`actors/runtime/fork_server.py`), and how long threads spin.

Between two products of a step lie tens of microseconds of Python, and a thread that went to sleep
wakes late: on a processor that two threads and eight processes share, steps of a model of 0.1 G
parameters took a sixth longer than with threads that stay awake. But a thread that spins for
another one, whose core a process has taken, keeps that process's core as well: with libgomp's
default of several milliseconds tiny models ran 30 times slower. So threads spin for a small part of
the least time that a step takes, which is the time to read the weights once."""

from __future__ import annotations

import os
from importlib import import_module

from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.models.model_dir import resolve
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.plan.weight_bytes import weight_bytes

MODULES = ("actorium.actors.runtime.shell", "actorium.gpu.worker.core",
           "actorium.gpu.worker.device", "actorium.gpu.worker.timing")
"""What a worker imports before it can load a model."""
ROUNDS_EACH_US = 25
"""Rounds of libgomp's spinning in a microsecond, about."""
LEAST, MOST = 500, 20_000
"""Rounds: 20 and 800 us."""
BYTES_EACH_US = 25_000
"""Bytes that memory delivers in a microsecond."""
SHARE = 1 / 20
"""Part of a step's time that threads spin for."""


def preload(config: Config) -> None:
    """Imports `MODULES` under the environment that a worker of this configuration sets. Starts no
    thread and leaves CUDA untouched: neither would survive a fork."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_rounds(config)))
    for name in MODULES:
        import_module(name)


def spin_rounds(config: Config) -> int:
    """`GOMP_SPINCOUNT` for a model: rounds that its threads spin before they sleep. `LEAST` where
    the model cannot be read; loading it reports why."""
    try:
        size = weight_bytes(read_shape(resolve(config.model.model), config))
    except ActoriumError:
        return LEAST
    return rounds_of(size)


def rounds_of(size: int) -> int:
    """The rounds for so many bytes of weights."""
    return min(max(LEAST, round(ROUNDS_EACH_US * SHARE * size / BYTES_EACH_US)), MOST)
