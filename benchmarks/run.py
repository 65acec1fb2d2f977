"""Runs a scenario: `python benchmarks/run.py NAME [PART] [OPTIONS]`; without a name, lists them.

Without a part the first one of the scenario runs. `--help` behind a name says what it takes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from harness import all_scenarios, run_scenario


def listing() -> str:
    """Returns all scenarios and their parts, a line each."""
    lines = ["python benchmarks/run.py NAME [PART] [OPTIONS]", ""]
    for name, (about, parts) in all_scenarios().items():
        lines.append(f"{name:<12} {about}")
        lines += [f"  {part.name:<12} {part.about}" for part in parts]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    known = all_scenarios()
    if not argv or argv[0] not in known:
        print(listing())
        return int(bool(argv) and argv[0] not in ("-h", "--help"))
    parts = [part.name for part in known[argv[0]][1]]
    named = len(argv) > 1 and argv[1] in parts
    part = argv[1] if named else parts[0]
    module = importlib.import_module(f"scenarios.{argv[0]}")
    run_scenario(getattr(module, part), f"{argv[0]} {part}", argv[1 + named:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
