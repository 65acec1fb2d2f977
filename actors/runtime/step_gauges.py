"""Names of the gauges by which a worker tells how it ran its steps, and at which sizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

STEP_MODES = ("full_graph", "piecewise_graph", "program", "eager")
"""How a worker runs steps: decodes from one graph; graphs with attention between them; decodes from
a program in C; operation by operation."""
EAGER_REASONS = ("off", "images", "tokens", "prompts", "sequences")
"""Why a step ran operation by operation: nothing is captured that could serve it; images are in it;
more tokens than any size that is captured; prompts in it, or more or other numbers of sequences
than programs in C are for."""
PREFIX, OF = "steps_", "_of_"


def step_key(mode: str, size: int) -> str:
    """The name by which a worker counts steps that were run so: sequences of graphs and programs
    of decodes, tokens of segments, of eager steps the power of two that their tokens are within. In
    a heartbeat `PREFIX` stands before it."""
    return f"{mode}{OF}{size}"


def eager_key(reason: str) -> str:
    """The name by which a worker counts the eager steps of a reason."""
    return f"eager_for_{reason}"


def steps_by_size(gauges: Mapping[str, float]) -> dict[tuple[str, int], float]:
    """(mode, size) -> steps so far, of a worker's gauges; modes in the order of `STEP_MODES`, sizes
    rising."""
    found = {}
    for name, count in gauges.items():
        mode, of, size = name.removeprefix(PREFIX).rpartition(OF)
        if name.startswith(PREFIX) and of and mode in STEP_MODES and size.isdecimal():
            found[mode, int(size)] = count
    return dict(sorted(found.items(), key=lambda own: (STEP_MODES.index(own[0][0]), own[0][1])))
