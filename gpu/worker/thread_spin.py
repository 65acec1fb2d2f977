"""How long the threads of a product wait for each other awake, by the size of the model.

Between two products of a step lie tens of microseconds of Python, and a thread that went to sleep
comes back late: on a processor that two threads and eight processes share, steps of a model of
0.1 G parameters took a sixth longer than with threads that stay awake. But a thread that waits for
another one, whose core a process has taken, keeps that process's core as well: with libgomp's
default of several milliseconds tiny models ran 30 times slower. So threads spin for a small part of
the least time that a step takes, which is what it takes to read the weights once.
"""

from __future__ import annotations

from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.models.model_dir import resolve
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.plan.weight_bytes import weight_bytes

ROUNDS_EACH_US = 25
"""Of libgomp's spinning, about."""
LEAST, MOST = 500, 20_000
"""Rounds: 20 and 800 us."""
BYTES_EACH_US = 25_000
"""That memory gives."""
SHARE = 1 / 20
"""Of the time of a step."""


def spin_rounds(config: Config) -> int:
    """`GOMP_SPINCOUNT` for a model: rounds that its threads spin before they sleep. The least where
    the model cannot be read, which is told by whoever loads it."""
    try:
        size = weight_bytes(read_shape(resolve(config.model.model), config))
    except ActoriumError:
        return LEAST
    return rounds_of(size)


def rounds_of(size: int) -> int:
    """The rounds for so many bytes of weights."""
    return min(max(LEAST, round(ROUNDS_EACH_US * SHARE * size / BYTES_EACH_US)), MOST)
