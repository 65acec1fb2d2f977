"""How many examples Hypothesis tries where its profile's number is not what a test wants."""

from __future__ import annotations

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

TIMES = 25
"""The battery's examples beside those of the quick profile."""
FRESH = 10
"""Of one seed Hypothesis draws so many examples anew. From then on five of six are earlier ones of
which a part is repeated, which say little of a machine."""


def examples(quick: int, battery: int | None = None) -> int:
    """Returns `quick`, in the battery `battery` (25 times as many, unless it is said)."""
    return (battery or TIMES * quick) if in_battery() else quick


def in_battery() -> bool:
    """Whether tests look for new ways, and take their time."""
    assert settings.default is not None
    return not settings.default.derandomize


def walks(quick: int) -> range:
    """Returns the numbers of a state machine's walks: `quick` short ones, or the battery's long
    one."""
    return range(1 if in_battery() else quick)


def walk(machine: type[RuleBasedStateMachine], number: int, steps: int) -> None:
    """Runs examples of so many steps: those of a seed, or in the battery as many new ones as it
    has."""
    chosen = settings(stateful_step_count=steps, deadline=None,
                      suppress_health_check=list(HealthCheck))
    if not in_battery():
        machine = seed(number)(type(f"{machine.__name__}{number}", (machine,), {}))
        chosen = settings(chosen, max_examples=FRESH)
    run_state_machine_as_test(machine, settings=chosen)
