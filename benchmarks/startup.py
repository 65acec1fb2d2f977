"""Start-up times, medians: `import actorium`, `actorium version`, `actorium --help`, the flags of
`generate`, and for the demo model the command's way to its first token, phase by phase.

    python benchmarks/startup.py [--runs 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARSE = ("from actorium.tools.cli.command_line import parse; "
         "from actorium.tools.cli.generate_command import GenerateOptions; "
         "parse('actorium generate', ['--prompt', 'x', '--max-tokens', '8'], GenerateOptions)")
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "python -c pass": (["-c", "pass"], None),
    "import actorium": (["-c", "import actorium"], 0.100),
    "import Client": (["-c", "from actorium import Client"], None),
    "actorium version": (["-m", "actorium.tools.cli", "version"], 0.250),
    "actorium generate: its flags read": (["-c", PARSE], None),
}
"""What is run -> (arguments of the interpreter, seconds aimed at)."""
FIRST_TOKEN = "request to first token"
FIRST_TOKEN_AIM = 3.0


def wall(argv: list[str], runs: int) -> list[float]:
    """Seconds of each run, one discarded run before."""
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, *argv], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def demo(runs: int) -> list[dict[str, Any]]:
    """The times that the demo writes, of each run; one discarded run before."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        for _ in range(runs + 1):
            subprocess.run([sys.executable, "-m", "actorium.tools.demo", "--packaged", "--json",
                            str(path), "--started", repr(time.time())], capture_output=True)
            found.append(json.loads(path.read_text()))
            path.unlink()
    return found[1:]


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each key that all rows have."""
    keys = [key for key in rows[0] if all(key in row for row in rows)]
    return {key: statistics.median(row[key] for row in rows) for key in keys}


def measure(runs: int) -> dict[str, Any]:
    """Everything, in seconds."""
    commands = {name: statistics.median(wall(argv, runs)) for name, (argv, _) in COMMANDS.items()}
    runs_of_demo = demo(max(3, runs // 2))
    roles = runs_of_demo[0]["actors"]
    actors = {role: {"ready_s": statistics.median(run["actors"][role]["ready_s"]
                                                  for run in runs_of_demo),
                     "phases_s": median_of([run["actors"][role]["phases_s"]
                                            for run in runs_of_demo])}
              for role in roles if all(role in run["actors"] for run in runs_of_demo)}
    return {"commands_s": commands, "demo_until_s": median_of([run["until_s"]
                                                               for run in runs_of_demo]),
            "demo_actors": actors, "runs": runs}


def show(result: dict[str, Any]) -> None:
    """Print it as tables."""
    for name, seconds in result["commands_s"].items():
        aim = COMMANDS[name][1]
        print(f"{name:<38} {1000 * seconds:>7.0f} ms"
              + (f"   (aim {1000 * aim:.0f})" if aim else ""))
    print("demo model, from the command:")
    for phase, until in result["demo_until_s"].items():
        aimed = f"   (aim {FIRST_TOKEN_AIM:.1f})" if phase == FIRST_TOKEN else ""
        print(f"  until {phase:<40} {until:>6.2f} s{aimed}")
    for role, entry in sorted(result["demo_actors"].items(), key=lambda e: e[1]["ready_s"]):
        phases = ", ".join(f"{name} {took:.2f}" for name, took in entry["phases_s"].items())
        print(f"  {role:<12} ready at {entry['ready_s']:.2f} s  ({phases})")


def main() -> int:
    """Measure, print, write."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--runs", type=int, default=5)
    flags.add_argument("--json")
    given = flags.parse_args()
    result = measure(max(1, given.runs))
    show(result)
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
